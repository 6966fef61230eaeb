"""A transport that holds what is written until everything that is ready to run has run, and then sends it.

A step's delivery makes a task ready for each of its clients. Had each written to its socket at once, a client on the
same machine would be awake after each write and asleep again before the next: 14 µs a write, and a switch of processes
on a core that computes. One after the other, the writes take 5 µs each, and the client wakes up once.
"""

from __future__ import annotations

import asyncio
from typing import Any


class CorkedTransport(asyncio.Transport):
    """The parts of a transport that HTTP needs, over another one.

    `linger_s`: how long close() lets the client finish what it sends, which the protocol, seeing is_closing(), drops.
    To be set while a message comes: a system that closes what has bytes to be read resets the connection, and the
    client loses the answer that it has not read.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.linger_s = 0.0
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []
        self._is_lingering = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_lingering:
            return
        if not self._held:
            self._loop.call_soon(self._send)
        self._held.append(bytes(data))

    def _send(self) -> None:
        held, self._held = self._held, []
        if held and not self._transport.is_closing():
            self._transport.write(b"".join(held))

    def close(self) -> None:
        """What was written still leaves."""
        self._send()
        if self.is_closing():
            return
        if self.linger_s == 0.0:
            self._transport.close()
            return
        self._is_lingering = True
        self._transport.write_eof()
        self._transport.resume_reading()  # closed once the client does so, or by us
        self._loop.call_later(self.linger_s, self._transport.close)

    def abort(self) -> None:
        """Nothing leaves any more."""
        self._held.clear()
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self._held)) + self._transport.get_write_buffer_size()

    def is_closing(self) -> bool:
        return self._is_lingering or self._transport.is_closing()

    def pause_reading(self) -> None:
        if not self._is_lingering:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
