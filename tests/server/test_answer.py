"""The state of one answer, with events made by hand."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from echoing import tiny_tokenizer

from headrace.engine.answers import Ending
from headrace.server.answer import Answer, Delta, Receipt
from headrace.server.openai.errors import ENGINE_FAILED, SHUTTING_DOWN
from headrace.text.answer import AnswerText, TextOptions
from headrace.text.stops import StopStrings
from headrace.types import (
    Finished,
    FinishReason,
    Preempted,
    Request,
    RequestError,
    SamplingParams,
    TokenLogprobs,
    Tokens,
    Usage,
)

TOKENIZER = tiny_tokenizer()
USAGE = Usage(prompt_tokens=3, completion_tokens=9, cached_tokens=1, num_preemptions=0, scheduled_us=150)


def answer_of(*, stops: tuple[str, ...] = (), logprobs: int | None = None, **fields: Any) -> Answer:
    params = SamplingParams(logprobs=logprobs, **fields)
    request = Request(
        7, array("i", [5]), params, seed=1, stop_ids=frozenset({2, *params.stop_token_ids}), arrival_us=100
    )
    return Answer(0, request, AnswerText(TOKENIZER, TextOptions(StopStrings(stops), stop_ids=request.stop_ids)))


def ids(text: str) -> array[int]:
    return array("i", TOKENIZER.encode(text))


def feed(answer: Answer, *events: Any) -> list[Delta | Receipt]:
    return [item for i, event in enumerate(events) for item in answer.take(event, 200 + 100 * i)]


def tokens(text: str, **fields: Any) -> Tokens:
    return Tokens(7, ids(text), **fields)


def finished(reason: FinishReason, message: str = "") -> Finished:
    return Finished(7, reason, USAGE, message)


def test_an_answer_is_its_deltas_an_ending_and_a_ledger() -> None:
    items = feed(answer_of(), tokens("Hi"), tokens(" the"), finished(FinishReason.LENGTH))
    assert [item.text for item in items[:-1] if isinstance(item, Delta)] == ["Hi", " the", ""]
    assert items[-2] == Delta(0, "", None, Ending("length"))
    receipt = items[-1]
    assert isinstance(receipt, Receipt)
    assert (receipt.prompt_tokens, receipt.completion_tokens, receipt.cached_tokens) == (3, 3, 1)
    timing = receipt.timing
    assert (timing.queue_us, timing.ttft_us, timing.tpot_us, timing.e2e_us) == (50, 100, 50, 200)


def test_a_cut_answer_ends_before_the_engine_does_and_ignores_what_still_comes() -> None:
    answer = answer_of(stops=("b",))
    first = feed(answer, tokens("abc"))
    assert first == [Delta(0, "a", None, Ending("stop", "b"))]
    assert answer.is_cut
    rest = feed(answer, tokens("xyz"), finished(FinishReason.CANCELLED))
    assert len(rest) == 1 and isinstance(rest[0], Receipt)
    assert rest[0].completion_tokens == 2 and rest[0].timing.last_us == 200
    assert not answer.is_cut


def test_a_stop_string_in_the_last_step_wins_over_the_length() -> None:
    items = feed(answer_of(stops=("b",)), tokens("ab"), finished(FinishReason.LENGTH))
    endings = [item.ending for item in items if isinstance(item, Delta) and item.ending]
    assert endings == [Ending("stop", "b")]


def test_text_that_is_held_back_gives_no_delta_and_is_flushed_at_the_end() -> None:
    answer = answer_of(stops=("bcd",))
    assert feed(answer, tokens("b"), tokens("c")) == []
    items = feed(answer, finished(FinishReason.LENGTH))
    assert items[0] == Delta(0, "bc", None, Ending("length"))


def test_the_end_token_is_no_stop_reason_but_a_token_of_the_request_is() -> None:
    for token, expected in ((2, None), (9, 9)):
        items = feed(answer_of(stop_token_ids=(9,)), Tokens(7, array("i", [70, token])), finished(FinishReason.STOP))
        endings = [item.ending for item in items if isinstance(item, Delta) and item.ending]
        assert endings == [Ending("stop", expected)]


def test_each_logprob_travels_with_the_text_of_its_token() -> None:
    answer = answer_of(stops=("bcd",), logprobs=0)
    scores = [TokenLogprobs(-float(i)) for i in range(4)]
    items = feed(
        answer,
        tokens("ab", logprobs=(scores[0], scores[1])),
        tokens("c", logprobs=(scores[2],)),
        tokens("x", logprobs=(scores[3],)),
        finished(FinishReason.LENGTH),
    )
    pieces = [piece for item in items if isinstance(item, Delta) for piece in item.pieces or ()]
    assert [(piece.token.text, piece.logprobs) for piece in pieces] == list(zip("abcx", scores, strict=True))


def test_an_answer_without_tokens_has_no_time_to_first_token() -> None:
    receipt = feed(answer_of(max_tokens=0), finished(FinishReason.LENGTH))[-1]
    assert isinstance(receipt, Receipt)
    assert receipt.timing.block() == {"queue_ms": 0.05, "ttft_ms": None, "tpot_ms": None, "e2e_ms": 0.1}


def test_what_the_engine_gives_up_is_an_error_with_its_reason() -> None:
    for reason, code in ((FinishReason.ERROR, ENGINE_FAILED), (FinishReason.CANCELLED, SHUTTING_DOWN)):
        with pytest.raises(RequestError) as caught:
            feed(answer_of(), tokens("ab"), finished(reason, "why"))
        assert caught.value.code == code


def test_preemptions_are_counted_and_say_nothing_to_the_client() -> None:
    answer = answer_of()
    assert feed(answer, Preempted(7, 12)) == [] and answer.num_preemptions == 1


def test_gaps_are_between_deliveries() -> None:
    answer = answer_of()
    feed(answer, tokens("a"), tokens("bc"), tokens("d"))
    assert answer.gaps_us == [100, 100]
