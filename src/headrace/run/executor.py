"""Executor: what runs a plan. LocalExecutor does so in this process, on one backend.

Owns the way from a plan to a result: pack, run, accept drafts. Keeps nothing from one step to the next but what Packer
saves itself to make again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Protocol

from headrace.ops import U32, Backend, RowResults
from headrace.run.batch import Packer
from headrace.types import StepPlan, StepResult, TokenLogprobs


class Executor(Protocol):
    """Runs plans, each complete in itself. `masks`: see Backend.run."""

    def run(self, plan: StepPlan, masks: U32 | None = None) -> StepResult: ...


class LocalExecutor:
    """Runs plans on a backend of this process. `clock` gives microseconds."""

    def __init__(self, backend: Backend, clock: Callable[[], int]) -> None:
        self._backend = backend
        self._clock = clock
        self._packer = Packer()

    def run(self, plan: StepPlan, masks: U32 | None = None) -> StepResult:
        began = self._clock()
        rows = self._backend.run(self._packer.pack(plan), masks)
        return _result(plan, rows, self._clock() - began)


def _result(plan: StepPlan, rows: RowResults, elapsed_us: int) -> StepResult:
    drawn: list[int] = rows.tokens.tolist()
    tokens, offsets = array("i"), array("i", [0])
    logprobs: list[tuple[TokenLogprobs, ...] | None] = []
    prompt_logprobs: list[tuple[TokenLogprobs, ...] | None] = []
    for s, request in enumerate(plan.requests):
        row, end = plan.row_offsets[s], plan.row_offsets[s + 1]
        first_draw = row
        while first_draw < end and plan.targets[first_draw] >= 0:
            first_draw += 1
        accepted = drawn[first_draw : first_draw + _num_accepted(plan, s, drawn[first_draw:end])]
        tokens.extend(accepted)
        offsets.append(len(tokens))
        params = request.params
        wanted = None if params.logprobs is None else _logprobs(rows, first_draw, len(accepted), params.logprobs)
        logprobs.append(wanted)
        top = params.prompt_logprobs
        prompt_logprobs.append(None if top is None else _logprobs(rows, row, first_draw - row, top))
    return StepResult(plan.step, tokens, offsets, tuple(logprobs), tuple(prompt_logprobs), elapsed_us)


def _num_accepted(plan: StepPlan, s: int, drawn: list[int]) -> int:
    """How many of a slice's drawn tokens count.

    Each row draws the token after what it was fed. Where that is the draft which was fed next, the draft was right and
    the next row has drawn from the right context; the first row where it is not ends the chain with its own token.
    """
    if not drawn:
        return 0
    end = plan.token_offsets[s + 1]
    drafts = plan.tokens[end - plan.num_drafts[s] : end]
    for i, draft in enumerate(drafts):
        if drawn[i] != draft:
            return i + 1
    return len(drafts) + 1


def _logprobs(rows: RowResults, first: int, count: int, num_top: int) -> tuple[TokenLogprobs, ...]:
    found = []
    for row in range(first, first + count):
        ids = [token for token in rows.top_ids[row, :num_top].tolist() if token >= 0]  # a vocabulary may have fewer
        top = rows.top_logprobs[row, : len(ids)].tolist()
        found.append(TokenLogprobs(float(rows.logprobs[row]), tuple(ids), tuple(top)))
    return tuple(found)
