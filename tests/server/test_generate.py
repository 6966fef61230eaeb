"""What several answers give, gathered for whoever takes it, with events made by hand."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest
from echoing import tiny_tokenizer

from headrace.server.answer import Answer, Delta, Receipt
from headrace.server.generate import AnswerListener, Gathered
from headrace.text.answer import AnswerText, TextOptions
from headrace.types import Finished, FinishReason, Preempted, Request, RequestError, SamplingParams, Tokens, Usage

TOKENIZER = tiny_tokenizer()
USAGE = Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=0, num_preemptions=0, scheduled_us=150)
REFUSED = RequestError("refused")


def answers(count: int) -> tuple[Gathered, list[AnswerListener]]:
    gathered = Gathered(count)
    requests = [Request(i, array("i", [5]), SamplingParams(), seed=1) for i in range(count)]
    texts = [AnswerText(TOKENIZER, TextOptions()) for _ in requests]
    made = [Answer(i, request, text) for i, (request, text) in enumerate(zip(requests, texts, strict=True))]
    return gathered, [AnswerListener(answer, gathered) for answer in made]


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


async def test_a_wait_that_is_given_up_disturbs_nobody() -> None:
    gathered, (only,) = answers(1)
    waiting = asyncio.ensure_future(gathered.take())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    only.take(tokens("Hi"), 200)
    assert texts_of(await gathered.take()) == [(0, "Hi")]
