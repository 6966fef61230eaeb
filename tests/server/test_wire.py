"""Streams that are given up at every point of their way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from headrace.server.wire import EventStream


class Work:
    """Pieces of an answer, and whether what makes them has ended."""

    def __init__(self) -> None:
        self.is_open = True

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        try:
            for i in range(3):
                yield b"piece %d" % i
        finally:
            self.is_open = False


async def never_gone() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("fails_at", range(5))
async def test_a_stream_whose_sending_fails_ends_its_work_wherever_that_is(fails_at: int) -> None:
    work, num_sent = Work(), 0

    async def send(message: Any) -> None:
        nonlocal num_sent
        if num_sent == fails_at:
            raise OSError("broken")
        num_sent += 1

    pieces = work.pieces()
    stream = EventStream(await anext(pieces), pieces)
    with pytest.raises(OSError, match="broken"):
        await stream({}, never_gone, send)
    assert not work.is_open


async def test_a_client_that_left_before_the_first_piece_ends_the_work() -> None:
    work = Work()

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    pieces = work.pieces()
    stream = EventStream(await anext(pieces), pieces)
    with pytest.raises(ClientDisconnect):
        await stream({}, gone, send)
    assert not work.is_open
