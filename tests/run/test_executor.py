"""LocalExecutor: drafts are accepted as they must be, and each answer gets its own logprobs."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_batch import plan_of, request

from headrace.ops import U32, Batch, RowResults, RowScores
from headrace.run.executor import MAX_FORESEEN, LocalExecutor
from headrace.types import FAILED_TOKEN, InvariantError, StepResult, TokenLogprobs


class FixedBackend:
    """Draws given tokens, whatever the logits; row r has the logprob -r and the alternatives 10 r, 10 r + 1."""

    def __init__(self, drawn: list[int]) -> None:
        self.drawn = drawn
        self.batches: list[Batch] = []
        self.masks: list[U32 | None] = []

    def run(self, batch: Batch, mask: U32 | None = None, meanwhile: Callable[[], None] | None = None) -> RowResults:
        self.batches.append(batch)
        self.masks.append(mask)
        if meanwhile is not None:
            meanwhile()
        rows = np.arange(len(self.drawn))
        assert batch.sampling.num_rows == len(rows)
        top_ids = np.stack([10 * rows, 10 * rows + 1], axis=1).astype(np.int32)
        return RowResults(self.drawn, RowScores(-rows.astype(np.float32), top_ids, -top_ids / 8))

    def close(self) -> None: ...


def run(drawn: list[int], *parts: dict[str, Any]) -> StepResult:
    ticks = iter((100, 350))
    return LocalExecutor(FixedBackend(drawn), lambda: next(ticks)).run(plan_of(*parts))


def verify(drafts: list[int], **params: Any) -> dict[str, Any]:
    """A decode of token 50 with drafts behind it."""
    rows = [-1] * (len(drafts) + 1)
    return {
        "request": request([1, 2], **params),
        "tokens": [50, *drafts],
        "start": 5,
        "targets": rows,
        "drafts": len(drafts),
    }


@pytest.mark.parametrize(
    ("drawn", "accepted"),
    [
        ([60, 61, 62, 63], [60, 61, 62, 63]),  # all right, and the token after them
        ([60, 61, 99, 63], [60, 61, 99]),  # the third is wrong: its row drew what belongs there
        ([99, 61, 62, 63], [99]),  # the first is wrong: later rows saw a wrong context, however right they look
        ([60, FAILED_TOKEN, 62, 63], [60, FAILED_TOKEN]),
        ([FAILED_TOKEN, 61, 62, 63], [FAILED_TOKEN]),
    ],
)
def test_drafts_are_accepted_up_to_the_first_that_was_not_drawn(drawn: list[int], accepted: list[int]) -> None:
    result = run(drawn, verify([60, 61, 62], logprobs=0))
    assert list(result.tokens) == accepted
    assert [entry.logprob for entry in result.logprobs[0] or ()] == [-float(row) for row in range(len(accepted))]


def test_slices_that_draw_nothing_give_nothing() -> None:
    middle = {"request": request([1] * 9), "tokens": [1, 1], "start": 0, "targets": []}
    result = run([60, 61], middle, verify([]), middle, verify([]))
    assert list(result.tokens) == [60, 61]
    assert list(result.token_offsets) == [0, 0, 1, 1, 2]
    assert result.logprobs == result.prompt_logprobs == (None,) * 4


def test_logprobs_go_only_to_who_asked_with_as_many_alternatives_as_asked_for() -> None:
    result = run([60, 61, 62], verify([], logprobs=1), verify([]), verify([], logprobs=2))
    assert result.logprobs == (
        (TokenLogprobs(0.0, (0,), (0.0,)),),
        None,
        (TokenLogprobs(-2.0, (20, 21), (-2.5, -2.625)),),
    )


def test_scored_rows_give_prompt_logprobs_and_drawn_ones_tokens() -> None:
    scored = {
        "request": request([1, 2, 3], prompt_logprobs=1, logprobs=0),
        "tokens": [1, 2, 3],
        "start": 0,
        "targets": [2, 3, -1],
    }
    result = run([2, 3, 70], scored)
    assert list(result.tokens) == [70]
    assert result.prompt_logprobs == ((TokenLogprobs(0.0, (0,), (0.0,)), TokenLogprobs(-1.0, (10,), (-1.25,))),)
    assert result.logprobs == ((TokenLogprobs(-2.0),),)


def test_a_chunk_that_only_scores_draws_nothing_even_where_a_target_looks_like_a_draft() -> None:
    scoring = {"request": request([1, 2, 3, 4], prompt_logprobs=0), "tokens": [1, 2], "start": 0, "targets": [2, 3]}
    result = run([2, 3], scoring)
    assert list(result.tokens) == []
    assert result.prompt_logprobs == ((TokenLogprobs(0.0), TokenLogprobs(-1.0)),)


def test_logprobs_that_a_backend_does_not_give_are_told_as_our_mistake() -> None:
    class Mute(FixedBackend):
        def run(self, *arguments: Any) -> RowResults:
            return RowResults(super().run(*arguments).tokens, None)

    with pytest.raises(InvariantError, match="asked for, and the backend gave none"):
        LocalExecutor(Mute([60]), lambda: 0).run(plan_of(verify([], logprobs=0)))


def test_missing_alternatives_of_a_small_vocabulary_are_left_out() -> None:
    class Small(FixedBackend):
        def run(self, *arguments: Any) -> RowResults:
            rows = super().run(*arguments)
            rows.scores.top_ids[:, 1] = -1
            return rows

    result = LocalExecutor(Small([60]), lambda: 0).run(plan_of(verify([], logprobs=2)))
    assert result.logprobs == ((TokenLogprobs(0.0, (0,), (0.0,)),),)


def test_the_result_carries_its_step_its_time_and_the_masks_go_through() -> None:
    result = run([60], verify([]))
    assert (result.step, result.elapsed_us) == (3, 250)
    backend, mask = FixedBackend([60]), np.ones((1, 2), np.uint32)
    LocalExecutor(backend, lambda: 0).run(plan_of(verify([])), mask)
    assert backend.masks == [mask]


def test_columns_of_a_result_are_plain_python_values() -> None:
    result = run([60], verify([], logprobs=1))
    assert isinstance(result.tokens, array)
    ((entry,),) = (row for row in result.logprobs if row is not None)
    assert type(entry.logprob) is float
    assert type(entry.top_ids[0]) is int


def test_a_plan_that_is_foreseen_is_made_ready_while_the_step_before_it_runs() -> None:
    backend = FixedBackend([60])
    executor = LocalExecutor(backend, lambda: 0)
    decode = verify([])
    plan, foreseen = plan_of(decode), plan_of(decode | {"tokens": [-1], "start": 6})
    executor.run(plan, foresee=lambda: foreseen)
    ready = executor._packer.pack(foreseen)
    foreseen.tokens[0] = 60
    executor.run(foreseen, foresee=lambda: None)
    assert backend.batches[1] is ready
    assert ready.tokens.tolist() == [60] and ready.sampling.positions.tolist() == [7]


def test_beside_a_step_of_many_sequences_nothing_is_foreseen() -> None:
    asked: list[int] = []
    for count in (MAX_FORESEEN, MAX_FORESEEN + 1):
        backend = FixedBackend([60] * count)
        plan = plan_of(*[verify([]) for _ in range(count)])
        LocalExecutor(backend, lambda: 0).run(plan, foresee=lambda count=count: asked.append(count))
    assert asked == [MAX_FORESEEN]


def test_a_step_without_slices_gives_nothing() -> None:
    result = run([])
    assert (list(result.tokens), list(result.token_offsets), result.logprobs) == ([], [0], ())
