"""What several answers give, gathered for whoever takes it, with events made by hand."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from echoing import EchoingExecutor, echo_engine, echo_serving, tiny_tokenizer

from headrace.server.admission import Admission
from headrace.server.answer import Answer, Delta, Receipt
from headrace.server.generate import AnswerListener, Gathered, Generator
from headrace.server.limits import GATHERED_ITEMS
from headrace.server.metrics import RequestMetrics
from headrace.server.openai.requests import completion_request
from headrace.server.prompts import Prompts
from headrace.server.workers import Workers
from headrace.text.answer import AnswerText, TextOptions
from headrace.text.stops import StopStrings
from headrace.types import Finished, FinishReason, Preempted, Request, RequestError, SamplingParams, Tokens, Usage

TOKENIZER = tiny_tokenizer()
USAGE = Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=0, num_preemptions=0, scheduled_us=150)
REFUSED = RequestError("refused")


def answers(count: int, *, stop: str = "", notes: list[str] | None = None) -> tuple[Gathered, list[AnswerListener]]:
    """Answers that end at `stop`; `notes` takes down what their listeners ask for."""
    gathered, asked = Gathered(count), [] if notes is None else notes
    options = TextOptions(StopStrings((stop,) if stop else ()))
    requests = [Request(i, array("i", [5]), SamplingParams(), seed=1) for i in range(count)]
    made = [Answer(i, request, AnswerText(TOKENIZER, options)) for i, request in enumerate(requests)]
    ask = [functools.partial(asked.append, what) for what in ("cancel", "close")]
    return gathered, [AnswerListener(answer, gathered, *ask) for answer in made]


def tokens(text: str) -> Tokens:
    return Tokens(7, array("i", TOKENIZER.encode(text)))


def texts_of(items: list[Any]) -> list[tuple[int, str]]:
    return [(item.choice, item.text) for item in items if isinstance(item, Delta)]


async def test_what_came_while_nobody_took_it_is_given_at_once_and_in_order() -> None:
    gathered, (first, second) = answers(2)
    first.take(tokens("Hi"), 200)
    second.take(tokens("x"), 200)
    first.take(tokens(" the"), 300)
    assert texts_of(await gathered.take()) == [(0, "Hi"), (1, "x"), (0, " the")]


async def test_whoever_waits_gets_what_comes_next_and_nothing_once_all_have_ended() -> None:
    gathered, listeners = answers(2)
    for i, listener in enumerate(listeners):
        waiting = asyncio.ensure_future(gathered.take())
        await asyncio.sleep(0)
        listener.take(Preempted(7, 1), 150)  # nothing to show
        await asyncio.sleep(0)
        assert not waiting.done()
        listener.take(Finished(7, FinishReason.LENGTH, USAGE), 200)
        delta, receipt = await waiting
        assert isinstance(delta, Delta) and isinstance(receipt, Receipt)
        assert receipt.choice == i
    assert await gathered.take() == []


async def test_an_error_is_raised_behind_what_came_before_it_and_nothing_comes_after() -> None:
    gathered, (first, second) = answers(2)
    first.take(tokens("Hi"), 200)
    second.fail(REFUSED)
    first.take(tokens(" the"), 300)
    first.fail(RequestError("another"))
    assert texts_of(await gathered.take()) == [(0, "Hi")]
    for _ in range(2):
        with pytest.raises(RequestError, match="refused"):
            await gathered.take()


async def test_an_error_wakes_whoever_waits() -> None:
    gathered, (only,) = answers(1)
    waiting = asyncio.ensure_future(gathered.take())
    await asyncio.sleep(0)
    only.fail(REFUSED)
    with pytest.raises(RequestError, match="refused"):
        await waiting


async def test_text_that_cannot_be_made_is_its_own_requests_error_and_not_its_tellers() -> None:
    gathered, (only,) = answers(1)
    only.take(Tokens(7, array("i", [TOKENIZER.vocab_size])), 200)  # no such token
    with pytest.raises(IndexError):
        await gathered.take()


async def test_nothing_that_comes_once_all_have_ended_is_an_error() -> None:
    gathered, (only,) = answers(1)
    only.take(Finished(7, FinishReason.LENGTH, USAGE), 200)
    only.fail(REFUSED)
    assert len(await gathered.take()) == 2
    assert await gathered.take() == []


async def test_a_client_that_is_behind_gets_some_at_a_time_and_others_have_their_turn_between() -> None:
    gathered, (only,) = answers(1)
    turns: list[int] = []
    for _ in range(GATHERED_ITEMS + 1):
        only.take(tokens("x"), 200)
    assert len(await gathered.take()) == GATHERED_ITEMS
    asyncio.get_running_loop().call_soon(turns.append, 1)
    assert len(await gathered.take()) == 1
    assert turns == [1]


async def test_a_stop_string_cancels_the_answer_once_and_its_end_closes_it() -> None:
    notes: list[str] = []
    gathered, (only,) = answers(1, stop="the", notes=notes)
    only.take(tokens("Hi"), 200)
    assert notes == []
    only.take(tokens(" the"), 300)
    only.take(tokens(" end"), 400)
    assert notes == ["cancel"]
    only.take(Finished(7, FinishReason.CANCELLED, USAGE), 500)
    assert notes == ["cancel", "close"]
    assert texts_of(await gathered.take()) == [(0, "Hi"), (0, " ")]


@pytest.fixture
def without_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def generated(num_choices: int) -> tuple[RequestMetrics, list[int]]:
    """The metrics after a request, and the number of answers that they had counted when each item was given."""
    engine = echo_engine(EchoingExecutor())
    serving, workers, metrics, counts = echo_serving(engine), Workers(), RequestMetrics(), list[int]()
    generator = Generator(serving, Prompts(serving, workers), Admission(), metrics)
    serving.engine.start()
    body = {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True, "n": num_choices, "temperature": 1}
    async for batch in generator.completion(completion_request(json.dumps(body).encode(), SamplingParams()), 0):
        counts += [sum(metrics.answers.values()) for _ in batch]
    await serving.engine.stop()
    workers.stop()
    return metrics, counts


async def test_an_answer_is_counted_when_it_has_ended() -> None:
    metrics, counts = await generated(num_choices=2)
    assert (metrics.answers["length"], metrics.completion_tokens) == (2, 6)
    assert counts[-1] == 2  # before its last item was given


@pytest.mark.usefixtures("without_collection")
async def test_nothing_of_an_answer_is_kept_for_the_garbage_collector() -> None:
    def kept() -> int:
        return sum(isinstance(it, Answer | AnswerListener | Gathered) for it in gc.get_objects())

    before = kept()
    await generated(num_choices=2)
    assert kept() == before


async def test_a_wait_that_is_given_up_disturbs_nobody() -> None:
    gathered, (only,) = answers(1)
    waiting = asyncio.ensure_future(gathered.take())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    only.take(tokens("Hi"), 200)
    assert texts_of(await gathered.take()) == [(0, "Hi")]
