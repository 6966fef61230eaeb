"""An answer as server-sent events: what comes before an error, and after it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from echoing import tiny_tokenizer

from headrace.server.answer import Delta, Item, Receipt
from headrace.server.endpoints import events
from headrace.server.openai.responses import Completions, Envelope
from headrace.server.timing import Timing
from headrace.types import RequestError

SHAPE = Completions(Envelope("cmpl-1", 0, "tiny"), tiny_tokenizer())
RECEIPT = Receipt(0, True, 3, 2, 0, Timing(0, 1, 2, 3, 2))
LATE = RequestError("it broke", None, "engine_failed")


async def asked(*batches: Sequence[Item] | Exception) -> AsyncGenerator[list[Item], None]:
    for batch in batches:
        if isinstance(batch, Exception):
            raise batch
        yield list(batch)


async def told(*batches: Sequence[Item] | Exception) -> list[Any]:
    """The events' contents; the last event's end is [DONE]."""
    written = b"".join([part async for part in events(asked(*batches), SHAPE, has_usage_chunk=True)])
    *blocks, done, rest = written.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


async def test_deltas_of_one_batch_are_events_of_their_own_and_the_usage_comes_last() -> None:
    *chunks, usage = await told([Delta(0, "a"), Delta(0, "b"), RECEIPT])
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b"]
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 5)


async def test_what_came_in_the_batch_before_an_error_is_told_before_it_and_no_usage_after() -> None:
    *chunks, error = await told([Delta(0, "a"), Delta(0, "b"), RECEIPT], LATE)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b"]
    assert error["error"]["message"] == "it broke"


@pytest.mark.parametrize("before", [[], [[]], [[RECEIPT]]], ids=["nothing", "an empty batch", "a receipt"])
async def test_an_error_before_any_text_is_raised_so_that_it_has_a_status_of_its_own(before: list[Any]) -> None:
    with pytest.raises(RequestError, match="it broke"):
        await told(*before, LATE)


async def test_the_items_are_closed_when_whoever_reads_the_events_leaves() -> None:
    items = asked([Delta(0, "a")], [Delta(0, "b")])
    stream = events(items, SHAPE, has_usage_chunk=False)
    await anext(stream)
    await stream.aclose()
    assert [batch async for batch in items] == []
