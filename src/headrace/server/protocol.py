"""uvicorn's HTTP/1.1 protocol with the limits that it lacks: time and size of headers, number of connections.

Owns what happens on a connection before there is a request. A client that connects and stays silent, or sends half a
header, holds a file descriptor and nothing else, and not for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.server.limits import BODY_TIMEOUT_S, HEADER_TIMEOUT_S, MAX_CONNECTIONS, MAX_HEADER_BYTES
from headrace.server.openai.errors import Refusal


class LimitedProtocol(HttpToolsProtocol):
    """One connection. What is over a limit is answered with an error in JSON and closed."""

    _deadline: asyncio.TimerHandle | None = None
    _header_bytes = 0  # since a message began or its body grew: headers, what frames chunks, trailers
    _is_in_headers = True  # else what comes is the message's body and its trailers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(
                Refusal(503, f"more than {MAX_CONNECTIONS} connections are open", None, "too_many_connections")
            )
            return
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(Refusal(431, f"headers are larger than {MAX_HEADER_BYTES:,} bytes", None, "headers_too_large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_headers:  # a trailer must not become a header of a request that was let in without it
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._cancel_deadline()
        self._is_in_headers = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._cancel_deadline()
        super().on_message_complete()
        self._is_in_headers, self._header_bytes = True, 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_in_headers and not self.transport.is_closing():  # nobody waits for the rest of this body
            self._await(BODY_TIMEOUT_S, self._body_is_late)

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refusal(400, "this is not a valid HTTP/1.1 request", None, "invalid_http"))

    def _await_headers(self) -> None:
        self._is_in_headers = True
        self._await(HEADER_TIMEOUT_S, self._headers_are_late)

    def _await(self, limit_s: float, if_late: Callable[[], None]) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(limit_s, if_late)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _headers_are_late(self) -> None:
        if not self.transport.is_closing():
            message = f"the request's headers did not arrive within {HEADER_TIMEOUT_S:g} seconds"
            self._refuse(Refusal(408, message, None, "request_timeout"))

    def _body_is_late(self) -> None:
        self.transport.close()  # its request has been answered

    def _refuse(self, refusal: Refusal) -> None:
        """Answer at once and close. A response that is half out is only cut off."""
        if self.cycle is None or self.cycle.response_complete:
            body = msgspec.json.encode(refusal.body)
            head = (
                f"HTTP/1.1 {refusal.status} {refusal.code}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode("ascii") + body)
        self.transport.close()
