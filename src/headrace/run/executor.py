"""Executor: what runs a plan. LocalExecutor does so in this process, on one backend.

Owns the way from a plan to a result: pack, run, accept drafts. Keeps nothing from one step to the next but what Packer
saves itself to make again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from typing import Protocol

from headrace.ops import U32, Backend, RowResults, RowScores
from headrace.run.batch import Packer
from headrace.types import InvariantError, StepPlan, StepResult, TokenLogprobs

# Slices of a step beside which the next one is made ready. It waits for the interpreter, which a server needs at that
# moment for what the last step drew; the more there is to tell, the longer the kernels would lack this thread.
MAX_FORESEEN = 4
Foresee = Callable[[], StepPlan | None]  # the next plan, as far as it can be told; see Scheduler.foresee


class Executor(Protocol):
    """Runs plans, each complete in itself. `masks`: see Backend.run."""

    def run(self, plan: StepPlan, masks: U32 | None = None, foresee: Foresee | None = None) -> StepResult:
        """`foresee` may be called while the step runs, and the plan that it gives be made ready."""


class LocalExecutor:
    """Runs plans on a backend of this process. `clock` gives microseconds."""

    def __init__(self, backend: Backend, clock: Callable[[], int]) -> None:
        self._backend = backend
        self._clock = clock
        self._packer = Packer()

    def run(self, plan: StepPlan, masks: U32 | None = None, foresee: Foresee | None = None) -> StepResult:
        began = self._clock()
        meanwhile = None
        if foresee is not None and plan.num_slices <= MAX_FORESEEN:
            meanwhile = partial(self._make_ready, foresee)
        rows = self._backend.run(self._packer.pack(plan), masks, meanwhile)
        return _result(plan, rows, self._clock() - began)

    def _make_ready(self, foresee: Foresee) -> None:
        if (plan := foresee()) is not None:
            self._packer.pack(plan)


def _result(plan: StepPlan, rows: RowResults, elapsed_us: int) -> StepResult:
    # One token each, and nothing else to tell?
    if plan.is_decode and not any(request.params.logprobs is not None for request in plan.requests):
        nothing = (None,) * plan.num_slices
        return StepResult(plan.step, array("i", rows.tokens), plan.row_offsets, nothing, nothing, elapsed_us)
    tokens, offsets = array("i"), array("i", [0])
    logprobs: list[tuple[TokenLogprobs, ...] | None] = []
    prompt_logprobs: list[tuple[TokenLogprobs, ...] | None] = []
    for s, request in enumerate(plan.requests):
        row, end = plan.row_offsets[s], plan.row_offsets[s + 1]
        first_draw = row
        while first_draw < end and plan.targets[first_draw] >= 0:
            first_draw += 1
        count = _num_accepted(plan, s, rows.tokens[first_draw:end])
        tokens.extend(rows.tokens[first_draw : first_draw + count])
        offsets.append(len(tokens))
        params = request.params
        logprobs.append(_logprobs(rows.scores, first_draw, count, params.logprobs))
        prompt_logprobs.append(_logprobs(rows.scores, row, first_draw - row, params.prompt_logprobs))
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


def _logprobs(
    scores: RowScores | None, first: int, count: int, num_top: int | None
) -> tuple[TokenLogprobs, ...] | None:
    """Those of `count` rows from `first` on, with as many alternatives as asked for; None: not asked for."""
    if num_top is None:
        return None
    if count == 0:
        return ()
    if scores is None:
        raise InvariantError("logprobs were asked for, and the backend gave none")
    found = []
    for row in range(first, first + count):
        ids = [token for token in scores.top_ids[row, :num_top].tolist() if token >= 0]  # a vocabulary may have fewer
        top = scores.top_logprobs[row, : len(ids)].tolist()
        found.append(TokenLogprobs(float(scores.logprobs[row]), tuple(ids), tuple(top)))
    return tuple(found)
