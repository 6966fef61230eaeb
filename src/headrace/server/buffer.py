"""How many bytes of bodies the server holds at once, all clients together.

Owns the count. A body counts from its arrival to the end of its exchange: it is decoded, waits, and is answered in that
time. Small ones do not count, so that they pass whatever others send; connections bound them. Refuses to know what the
bytes mean and what one body may have (wire.py).
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.server.limits import MAX_BUFFERED_BYTES, RETRY_AFTER_S, SMALL_BODY_BYTES
from headrace.server.openai.errors import Refusal
from headrace.server.wire import CLOSE, HttpError


class BodyBuffer:
    """ASGI: lets `app` receive bodies while there is room for them; HttpError in the midst of one otherwise."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = held = 0

        async def counted() -> Message:
            nonlocal size, held
            message = await receive()
            size += len(message.get("body", b""))
            if size > SMALL_BODY_BYTES:
                self._take(size - held)
                held = size
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            self.num_bytes -= held

    def _take(self, num_bytes: int) -> None:
        if self.num_bytes + num_bytes > MAX_BUFFERED_BYTES:
            message = (
                f"large bodies fill the {MAX_BUFFERED_BYTES:,} bytes that the server keeps for them; bodies of at most "
                f"{SMALL_BODY_BYTES:,} bytes pass: try again in {RETRY_AFTER_S} s or later"
            )
            headers = {**CLOSE, "retry-after": str(RETRY_AFTER_S)}
            raise HttpError(Refusal(429, message, None, "bodies_full", headers))
        self.num_bytes += num_bytes
