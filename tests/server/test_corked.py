"""Writes that wait for the turn of the event loop to end."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.server.corked import CorkedTransport


class RecordingTransport(asyncio.Transport):
    """What was asked of it, in order."""

    def __init__(self, done: list[Any], name: str = "") -> None:
        super().__init__()
        self.done, self.name, self.has_closed = done, name, False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.done.append(self.name + bytes(data).decode())

    def close(self) -> None:
        self.has_closed = True
        self.done.append(self.name + "closed")

    def write_eof(self) -> None:
        self.done.append(self.name + "ended")

    def pause_reading(self) -> None:
        self.done.append(self.name + "paused")

    def resume_reading(self) -> None:
        self.done.append(self.name + "reads on")

    def abort(self) -> None:
        self.has_closed = True
        self.done.append(self.name + "aborted")

    def is_closing(self) -> bool:
        return self.has_closed


async def one_turn() -> None:
    await asyncio.sleep(0)


async def test_what_is_written_in_one_turn_leaves_in_one_piece_after_it() -> None:
    done: list[Any] = []
    corked = CorkedTransport(RecordingTransport(done), asyncio.get_running_loop())
    buffer = bytearray(b"head ")
    corked.write(buffer)
    buffer[:] = b"other"
    corked.write(b"body")
    assert done == []
    await one_turn()
    assert done == ["head body"]
    corked.write(b"more")
    await one_turn()
    assert done == ["head body", "more"]


async def test_all_who_are_ready_write_before_anything_is_sent() -> None:
    done: list[Any] = []
    loop = asyncio.get_running_loop()

    async def answer(name: str) -> None:
        corked = CorkedTransport(RecordingTransport(done, name), loop)
        done.append(f"{name} runs")
        corked.write(b" sent")

    await asyncio.gather(answer("a"), answer("b"))
    await one_turn()
    assert done == ["a runs", "b runs", "a sent", "b sent"]


async def test_what_was_written_leaves_before_the_end() -> None:
    done: list[Any] = []
    corked = CorkedTransport(RecordingTransport(done), asyncio.get_running_loop())
    corked.write(b"last")
    corked.close()
    await one_turn()
    assert done == ["last", "closed"]
    assert corked.is_closing()


async def test_what_was_written_does_not_leave_after_an_abort() -> None:
    done: list[Any] = []
    corked = CorkedTransport(RecordingTransport(done), asyncio.get_running_loop())
    corked.write(b"too late")
    corked.abort()
    await one_turn()
    assert done == ["aborted"]


async def test_nothing_is_written_to_a_connection_that_broke_meanwhile() -> None:
    done: list[Any] = []
    transport = RecordingTransport(done)
    corked = CorkedTransport(transport, asyncio.get_running_loop())
    corked.write(b"never read")
    transport.close()
    await one_turn()
    assert done == ["closed"]


async def test_a_close_that_lingers_ends_what_is_sent_and_reads_on_until_its_time_is_over() -> None:
    done: list[Any] = []
    corked = CorkedTransport(RecordingTransport(done), asyncio.get_running_loop())
    corked.linger_s = 0.01
    corked.write(b"refused")
    corked.close()
    assert corked.is_closing() and done == ["refused", "ended", "reads on"]
    corked.write(b"late")
    corked.pause_reading()
    corked.close()
    await asyncio.sleep(0.05)
    assert done == ["refused", "ended", "reads on", "closed"]


async def test_a_connection_that_has_broken_does_not_linger() -> None:
    done: list[Any] = []
    corked = CorkedTransport(RecordingTransport(done), asyncio.get_running_loop())
    corked.linger_s = 10.0
    corked.abort()
    corked.close()
    assert done == ["aborted"]
