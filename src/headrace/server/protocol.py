"""uvicorn's HTTP/1.1 protocol with the limits that it lacks: time and size of headers, number of connections, time
without reading.

Owns what happens on a connection before there is a request, and when what is written leaves. A client that connects and
stays silent, or sends half a header, holds a file descriptor and nothing else, and not for long. One that ends its
sending side is taken for gone: TCP tells a half-closed connection from a closed one only once something was sent, and
until then its answer might be computed for nobody.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable

import httptools
import msgspec
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.server.corked import CorkedTransport
from headrace.server.limits import (
    BODY_TIMEOUT_S,
    HEADER_TIMEOUT_S,
    LINGER_S,
    MAX_CONNECTIONS,
    MAX_HEADER_BYTES,
    SEND_TIMEOUT_S,
)
from headrace.server.openai.errors import Refusal


class Reading(enum.Enum):
    """What a connection's next byte is a part of."""

    NEXT_REQUEST = enum.auto()
    HEADERS = enum.auto()
    BODY = enum.auto()  # and its trailers


class LimitedProtocol(HttpToolsProtocol):
    """One connection. What is over a limit is answered with an error in JSON and closed."""

    transport: CorkedTransport
    _deadline: asyncio.TimerHandle | None = None
    _read_deadline: asyncio.TimerHandle | None = None  # of the client, to read a part of what waits for it
    _header_bytes = 0  # since a message began or its body grew: headers, what frames chunks, trailers
    _reading = Reading.NEXT_REQUEST
    _running: RequestResponseCycle | None = None  # what is being answered; uvicorn's `cycle` is the newest request
    _pipelined_bytes = 0  # since a request came to wait for another's answer
    _is_upgrade_ignored = False  # the message just parsed asked for an upgrade; it is to be parsed again without

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(CorkedTransport(transport, self.loop))
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(
                Refusal(503, f"more than {MAX_CONNECTIONS} connections are open", None, "too_many_connections")
            )
            return
        self._await(HEADER_TIMEOUT_S, self._headers_are_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        self._cancel_read_deadline()
        super().connection_lost(exc)
        waiting = [cycle for cycle, _ in self.pipeline]
        for cycle in (*waiting, self._running):  # uvicorn tells only the newest
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        self._cancel_read_deadline()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._header_bytes += len(data)
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError as error:
            self.send_400_response(str(error))
        self._read_on_behind_an_answer(len(data))
        if (  # a blank line, say: it ended uvicorn's keep-alive timer, and no message began
            self._reading is Reading.NEXT_REQUEST
            and self._is_answered
            and self._deadline is None
            and not self.transport.is_closing()
        ):
            self._await(HEADER_TIMEOUT_S, self._headers_are_late)
        if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(Refusal(431, f"headers are larger than {MAX_HEADER_BYTES:,} bytes", None, "headers_too_large"))

    def _read_on_behind_an_answer(self, num_bytes: int) -> None:
        """Read on although a request waits: a client is seen to leave only while there is reading.

        uvicorn stops once a request is behind another. So do we, but only when what is there is as large as a header.
        """
        self._pipelined_bytes = self._pipelined_bytes + num_bytes if self.pipeline else 0
        if self.pipeline and self._pipelined_bytes <= MAX_HEADER_BYTES and not self.transport.is_closing():
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading = Reading.HEADERS
        if self._is_answered:  # else the next request waits for the answer to this one, however long that is
            self._await(HEADER_TIMEOUT_S, self._headers_are_late)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is Reading.HEADERS:  # a trailer must not become a header of a request let in without it
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_upgrade_ignored = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._is_upgrade_ignored:
            return
        self._cancel_deadline()
        self._reading = Reading.BODY
        self.transport.linger_s = LINGER_S
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade_ignored:
            return
        self._cancel_deadline()
        super().on_message_complete()
        self._reading, self._header_bytes = Reading.NEXT_REQUEST, 0
        self.transport.linger_s = 0.0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or not self._is_answered:
            return
        if self._reading is Reading.HEADERS:
            self._await(HEADER_TIMEOUT_S, self._headers_are_late)
        elif self._reading is Reading.BODY:  # nobody waits for the rest of it
            self._await(BODY_TIMEOUT_S, self._body_is_late)

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refusal(400, "this is not a valid HTTP/1.1 request", None, "invalid_http"))

    @property
    def _is_answered(self) -> bool:
        """Whether every request on this connection has its whole answer."""
        return self.cycle is None or self.cycle.response_complete

    def _parse(self, data: memoryview) -> None:
        """Feed the parser, overlooking wishes to upgrade (to h2c, to a WebSocket), as RFC 9110, section 7.8, allows.

        The parser takes what follows such a head for another protocol. So the head is parsed again, without the wish,
        and by a new parser: to the old one a message that ends its connection is over, and nothing may follow.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._is_upgrade_ignored:  # CONNECT, whose answer is an error
                    return
                data = data[upgrade.args[0] :]
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            self.parser.feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode("ascii")
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _await(self, limit_s: float, if_late: Callable[[], None]) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(limit_s, if_late)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _await_reading(self) -> None:
        self._cancel_read_deadline()
        num_unsent = self.transport.get_write_buffer_size()
        self._read_deadline = self.loop.call_later(SEND_TIMEOUT_S, self._abort_unless_read, num_unsent)

    def _abort_unless_read(self, num_unsent: int) -> None:
        """A large answer may take longer than SEND_TIMEOUT_S, as long as some of it leaves in that time."""
        if self.transport.get_write_buffer_size() < num_unsent:
            self._await_reading()
        else:
            self.transport.abort()

    def _cancel_read_deadline(self) -> None:
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None

    def _headers_are_late(self) -> None:
        if not self.transport.is_closing():
            message = f"the request's headers did not arrive within {HEADER_TIMEOUT_S:g} seconds"
            self._refuse(Refusal(408, message, None, "request_timeout"))

    def _body_is_late(self) -> None:
        self.transport.close()  # its request has been answered

    def _refuse(self, refusal: Refusal) -> None:
        """Answer at once and close. A response that is half out is only cut off."""
        if self._is_answered:
            body = msgspec.json.encode(refusal.body)
            head = (
                f"HTTP/1.1 {refusal.status} {refusal.code}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode("ascii") + body)
        self.transport.linger_s = 0.0  # neither one connection too many nor a flood is waited for
        self.transport.close()
