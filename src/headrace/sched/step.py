"""A step's two ends: sequences laid out as the columns of a plan, and a result checked against what was planned.

Owns the layout. Refuses to decide anything: what is in flight was chosen before.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf

from headrace.sched.sequence import Sequence, Status
from headrace.types import InvariantError, StepPlan, StepResult

DRAW = -1  # the target of a row from which a token is drawn


def lay_out(step: int, flight: SequenceOf[Sequence], num_groups: int) -> StepPlan:
    """The plan of `flight`, the sequences with tokens in flight, in the order of its slices."""
    tokens, starts, num_drafts, targets = array("i"), array("i"), array("i"), array("i")
    token_offsets, row_offsets = array("i", [0]), array("i", [0])
    blocks = tuple(array("i") for _ in range(num_groups))
    block_offsets = tuple(array("i", [0]) for _ in range(num_groups))
    histories: list[array[int] | None] = []
    for seq in flight:
        start, end = seq.num_computed, seq.num_computed + seq.num_in_flight
        tokens += seq.tokens[start:end]  # drafts are not among the known tokens, so this ends before them
        tokens += seq.drafts
        token_offsets.append(len(tokens))
        starts.append(start)
        num_drafts.append(len(seq.drafts))
        if seq.is_scoring:
            targets.extend(seq.request.prompt[position + 1] for position in seq.scored_positions)
        if seq.is_drawing:
            targets.append(DRAW)
            targets.extend([DRAW] * len(seq.drafts))
        row_offsets.append(len(targets))
        for table, ids, offsets in zip(seq.tables, blocks, block_offsets, strict=True):
            ids += table
            offsets.append(len(ids))
        history = seq.tokens[:end] if seq.needs_history else None
        if history is not None:
            history += seq.drafts
        histories.append(history)
    return StepPlan(
        step=step,
        requests=tuple([seq.request for seq in flight]),
        tokens=tokens,
        token_offsets=token_offsets,
        starts=starts,
        num_drafts=num_drafts,
        row_offsets=row_offsets,
        targets=targets,
        block_offsets=block_offsets,
        blocks=blocks,
        histories=tuple(histories),
    )


def check_result(flight: SequenceOf[Sequence], result: StepResult) -> None:
    """Raise InvariantError unless `result` has the shape that `flight` asked for. Of a request that ended since, what
    came of its slice is dropped, whatever it is.
    """
    offsets, tokens = result.token_offsets, result.tokens
    if not len(offsets) - 1 == len(result.logprobs) == len(result.prompt_logprobs) == len(flight):
        raise InvariantError(f"step {result.step}: the result has not {len(flight)} slices")
    if offsets[0] != 0 or offsets[-1] != len(tokens):
        raise InvariantError(f"step {result.step}: the result's offsets do not cover its tokens")
    for s, seq in enumerate(flight):
        if seq.status is Status.FINISHED:
            continue
        count = offsets[s + 1] - offsets[s]
        if count != 1 or not seq.is_drawing:
            _check_count(result.step, seq, tokens[offsets[s] : offsets[s + 1]], count)
        if (logprobs := result.logprobs[s]) is not None and len(logprobs) != count:
            raise InvariantError(f"step {result.step}: request {seq.request.id} has not one logprob per token")
        if (scores := result.prompt_logprobs[s]) is not None and len(scores) != len(seq.scored_positions):
            raise InvariantError(f"step {result.step}: request {seq.request.id} has not one prompt logprob per row")


def _check_count(step: int, seq: Sequence, tokens: array[int], count: int) -> None:
    allowed = range(1, 2 + len(seq.drafts)) if seq.is_drawing else range(1)
    if count not in allowed:
        raise InvariantError(f"step {step}: request {seq.request.id} drew {count} tokens, not {allowed}")
    if tokens[:-1] != seq.drafts[: count - 1] and count:
        raise InvariantError(f"step {step}: request {seq.request.id} accepted tokens that were not drafted")
