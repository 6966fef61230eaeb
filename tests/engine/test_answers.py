"""The rules that the server and the offline API share."""

from __future__ import annotations

import itertools
from array import array

import pytest

from headrace.engine.answers import Asker, Ending, ending_of, fitted, text_options
from headrace.text.stops import StopStrings
from headrace.types import FinishReason, RequestError, SamplingParams

PARAMS = SamplingParams()
PROMPT = array("i", [5, 6, 7])


def asker() -> Asker:
    return Asker(itertools.count(1).__next__, frozenset({2}))


@pytest.mark.parametrize(
    ("asked", "default", "expected"), [(None, None, 7), (None, 5, 5), (None, 16, 7), (7, None, 7), (0, None, 0)]
)
def test_max_tokens_is_what_was_asked_or_the_room_that_is_left(
    asked: int | None, default: int | None, expected: int
) -> None:
    assert fitted(SamplingParams(max_tokens=asked), 3, 10, default=default).max_tokens == expected


@pytest.mark.parametrize(
    ("num_prompt", "asked", "param"),
    [(0, None, "prompt"), (11, 0, "prompt"), (10, None, "prompt"), (3, 8, "max_tokens")],
)
def test_what_does_not_fit_is_refused(num_prompt: int, asked: int | None, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        fitted(SamplingParams(max_tokens=asked), num_prompt, 10)
    assert caught.value.param == param


def test_a_prompt_that_fills_the_context_can_be_scored() -> None:
    assert fitted(SamplingParams(max_tokens=0), 10, 10).max_tokens == 0


def test_choices_share_the_seed_and_differ_by_their_index() -> None:
    requests = asker().requests(PROMPT, PARAMS, 3, arrival_us=1)
    assert len({request.seed for request in requests}) == 1
    assert [(request.id, request.choice) for request in requests] == [(1, 0), (2, 1), (3, 2)]
    assert asker().requests(PROMPT, SamplingParams(seed=9), arrival_us=1)[0].seed == 9
    assert len({asker().requests(PROMPT, PARAMS, arrival_us=1)[0].seed for _ in range(5)}) == 5


def test_end_tokens_end_an_answer_unless_ignored_and_its_own_stop_tokens_always() -> None:
    kept = asker().requests(PROMPT, SamplingParams(stop_token_ids=(9,)), arrival_us=1)[0]
    ignored = asker().requests(PROMPT, SamplingParams(stop_token_ids=(9,), ignore_eos=True), arrival_us=1)[0]
    assert (kept.stop_ids, ignored.stop_ids) == ({2, 9}, {9})
    assert text_options(kept, StopStrings(("x",))).stop_ids == kept.stop_ids


@pytest.mark.parametrize(
    ("reason", "stop", "last", "expected"),
    [
        (FinishReason.STOP, None, 2, Ending("stop")),
        (FinishReason.STOP, None, 9, Ending("stop", 9)),
        (FinishReason.LENGTH, None, 9, Ending("length")),
        (FinishReason.LENGTH, None, None, Ending("length")),
        (FinishReason.CANCELLED, "END", 5, Ending("stop", "END")),
        (FinishReason.LENGTH, "END", 5, Ending("stop", "END")),
    ],
)
def test_an_ending_is_named_after_what_came_first(
    reason: FinishReason, stop: str | None, last: int | None, expected: Ending
) -> None:
    assert ending_of(reason, stop, last, SamplingParams(stop_token_ids=(9,))) == expected
