"""One request's state: its tokens, how far they are computed, and the blocks that hold them.

Owned by the scheduler, which alone changes it. Refuses to know other sequences, pools and budgets.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

from headrace.sched.blocks import Link, chain_link, chain_root
from headrace.sched.order import Rank
from headrace.types import FAILED_TOKEN, FinishReason, Request, Usage


class Status(enum.Enum):
    WAITING = "waiting"  # holds no blocks: not yet run, or preempted
    RUNNING = "running"  # holds the blocks of what is computed
    FINISHED = "finished"  # if a step is out with a slice of it, its blocks are held until that step is back


@dataclass(slots=True, eq=False)
class Sequence:
    """Positions [0, num_computed) are in the blocks; [num_computed, num_computed + num_in_flight) are being computed.

    `num_computed` moves forward in commit alone. It starts at what the prefix cache held when the sequence was let in,
    and is 0 again after a preemption. Every table has the same length and is anchored at position 0: entry j is the
    block of positions [j * block_size, (j + 1) * block_size), NO_BLOCK where they fell out of the group's window.
    """

    request: Request
    rank: Rank
    max_total: int  # prompt and output never exceed this
    tables: tuple[array[int], ...]  # per KV group
    num_dropped: array[int]  # per KV group: leading entries that are NO_BLOCK
    tokens: array[int]  # known: the prompt and every token drawn; only ever appended to
    num_prompt: int
    is_scoring: bool  # wants a row for every prompt position but the last
    needs_history: bool
    status: Status = Status.WAITING
    num_computed: int = 0
    num_in_flight: int = 0  # drafts included
    num_slots: int = 0  # positions that the tables have room for
    num_sealed: int = 0  # leading blocks that are sealed, or equal one that is
    num_scored: int = 0  # prompt positions whose row for prompt_logprobs came back
    drafts: array[int] = field(default_factory=lambda: array("i"))  # in flight behind the last known token
    num_cached: int = 0
    num_preemptions: int = 0
    scheduled_us: int | None = None
    refused_at: int = -1  # the scheduler's count of releases when it was last refused for want of blocks
    refused_hit: int = 0  # and the blocks it could have shared then
    _chain: list[Link] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, rank: Rank, max_total: int, num_groups: int) -> Sequence:
        return cls(
            request=request,
            rank=rank,
            max_total=max_total,
            tables=tuple(array("i") for _ in range(num_groups)),
            num_dropped=array("i", [0] * num_groups),
            tokens=request.prompt[:],
            num_prompt=len(request.prompt),
            is_scoring=request.params.prompt_logprobs is not None,
            needs_history=request.params.needs_history,
        )

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Known tokens still to be computed; a sequence that has 1 is ready to draw its next token."""
        return len(self.tokens) - self.num_computed

    @property
    def num_wanted(self) -> int:
        """Known tokens that one slice could feed: all that remain, or, where the last of them has no row, the others.

        A slice's rows are its last ones, and the last token of a prompt that is only scored has none: it comes alone.
        """
        num_remaining = self.num_remaining
        if self.is_scoring and self.max_total == self.num_prompt and num_remaining > 1:
            return num_remaining - 1
        return num_remaining

    @property
    def is_drawing(self) -> bool:
        """Whether the slice in flight reaches the last known token, and a token is wanted after it."""
        return self.num_computed + self.num_in_flight >= len(self.tokens) and self.max_total > self.num_prompt

    @property
    def scored_positions(self) -> range:
        """Positions in flight whose row scores the known next token of the prompt."""
        if not self.is_scoring:
            return range(0)
        end = min(self.num_computed + self.num_in_flight, self.num_prompt - 1)
        return range(max(self.num_computed, self.num_scored), end)

    def link(self, index: int, block_size: int) -> Link:
        """The link of full block `index` of the known tokens; hashed once, however often it is asked for."""
        chain = self._chain
        while len(chain) <= index:
            parent = chain[-1].digest if chain else chain_root(self.request.cache_salt)
            start = len(chain) * block_size
            chain.append(chain_link(parent, self.tokens[start : start + block_size]))
        return chain[index]

    def adopt_links(self, other: Sequence, num_blocks: int, block_size: int) -> bool:
        """Take over the links of the first `num_blocks` full blocks from `other`; False if its text or salt differs.

        The same text under the same salt has the same links, and comparing tokens costs a hundredth of hashing them.
        """
        chain, num_known = self._chain, min(len(self._chain), num_blocks)
        if num_known == 0 and self.request.cache_salt != other.request.cache_salt:
            return False
        if num_known and chain[num_known - 1].digest != other.link(num_known - 1, block_size).digest:
            return False
        rest = slice(num_known * block_size, num_blocks * block_size)
        if self.tokens[rest] != other.tokens[rest]:
            return False
        chain += [other.link(index, block_size) for index in range(num_known, num_blocks)]
        return True

    def accept(self, drawn: array[int]) -> FinishReason | None:
        """Append the tokens drawn, up to the one that ends the answer; returns the reason if one does."""
        request, tokens = self.request, self.tokens
        for token in drawn:
            if token == FAILED_TOKEN:
                return FinishReason.ERROR
            tokens.append(token)
            if token in request.stop_ids and self.num_outputs >= request.params.min_tokens:
                return FinishReason.STOP
            if len(tokens) == self.max_total:
                return FinishReason.LENGTH
        return None

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt,
            completion_tokens=self.num_outputs,
            cached_tokens=self.num_cached,
            num_preemptions=self.num_preemptions,
            scheduled_us=self.scheduled_us,
        )
