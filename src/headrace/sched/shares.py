"""How those who prefill divide a step: a long prompt delays those behind it, but does not shut them out.

Knows numbers only. Refuses to know sequences and blocks.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf


def sure_share(want: int, left: int) -> int:
    """What the first of those who share `left` tokens gets of the `want` it could use, whatever those behind it want.

    That is half, rounded up. So who has k long prompts before it gets what it wants or the 2^(k+1)-th part of the
    step, twice that if nobody is behind it. Halving leaves a token to about log2(step) long prompts (10 of 512
    tokens); who comes behind those waits until there are fewer of them: first come, first served.
    """
    return min(want, (left + 1) // 2)


def share_out(budget: int, wants: SequenceOf[int]) -> list[int]:
    """Of `budget` tokens what each gets, in order: half of what is left, or more if those behind it leave more.

    Nothing is left over while anyone wants more. Nobody who wants a token gets none, provided that there are as many.
    """
    shares: list[int] = []
    num_behind, wanted_behind = len(wants), sum(wants)
    for want in wants:
        num_behind -= 1
        wanted_behind -= want
        share = max(sure_share(want, budget), min(want, budget - wanted_behind))
        shares.append(min(share, budget - num_behind))
        budget -= shares[-1]
    return shares
