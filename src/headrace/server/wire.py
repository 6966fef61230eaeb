"""Bytes in and out of ASGI: bodies read within their limits, answers sent, a client that left noticed.

Owns size and time limits of a body that comes in. Refuses to know what the bytes mean.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.server.limits import BODY_TIMEOUT_S, MAX_BODY_BYTES
from headrace.server.openai.errors import Refusal

T = TypeVar("T")

CLOSE: Mapping[str, str] = {"connection": "close"}  # the rest of the body is not read


class HttpError(Exception):
    """A refusal that belongs to HTTP rather than to what was asked."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def refusal_response(refusal: Refusal) -> Response:
    return json_response(refusal.body, refusal.status, refusal.headers)


async def send_refusal(send: Send, refusal: Refusal) -> None:
    """Answer with an error where there is no Request yet. The body was not read, so the connection ends."""
    body = msgspec.json.encode(refusal.body)
    headers = {
        **refusal.headers,
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def read_body(request: Request) -> bytes:
    """The whole body; HttpError if it is too large, too slow or compressed."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise HttpError(Refusal(415, "compressed bodies are not taken", None, "unsupported_encoding"))
    too_large = Refusal(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes", None, "body_too_large", CLOSE)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
        raise HttpError(too_large)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise HttpError(too_large)
    except TimeoutError:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:g} seconds"
        raise HttpError(Refusal(408, message, None, "request_timeout", CLOSE)) from None
    return bytes(body)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves first; then ClientDisconnect is raised."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """A response whose body comes piece by piece: `first`, which is there already, then `rest`.

    `rest` is closed at once when the client leaves, so that what makes it ends too. One that stops reading is made to
    leave by its connection (protocol.py).
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None
    ) -> None:
        self.status_code = 200
        self.background = None
        self.first = first
        self.rest = rest
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self.rest):
            await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.first, "more_body": True})
        async for piece in self.rest:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
