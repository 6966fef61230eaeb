"""The outermost layer of the application: a request id, one log line, and no exception beyond this point.

Owns what every exchange has in common. Bodies are never logged; what a client wrote is escaped.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.server.openai.errors import printable, refusal_of
from headrace.server.wire import send_refusal

log = logging.getLogger(__name__)

CLIENT_LEFT = 499  # nginx's status for it; only in the log and the metrics


class Boundary:
    """ASGI: wraps `app`; counts responses by status into `responses`."""

    def __init__(self, app: ASGIApp, responses: Counter[int]) -> None:
        self.app = app
        self.responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        try:
            await self.app(scope, receive, exchange.send)
        except ClientDisconnect:
            exchange.status = CLIENT_LEFT
        except Exception as error:
            log.exception("request %s failed", exchange.id)
            if exchange.status is None:
                await send_refusal(exchange.send, refusal_of(error))
            else:
                raise  # the answer is half out: all that is left is to close the connection
        finally:
            status = exchange.status or CLIENT_LEFT
            self.responses[status] += 1
            exchange.log(status)


class _Exchange:
    """One request and its response, seen from outside."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.id = f"req-{secrets.token_hex(12)}"
        self.status: int | None = None
        self._scope = scope
        self._send = send
        self._client_id = Headers(scope=scope).get("x-request-id")
        self._began = time.monotonic()
        scope["state"]["request_id"] = self.id

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(raw=list(message.get("headers", [])))
            headers["x-request-id"] = printable(self._client_id) if self._client_id else self.id
            message = {**message, "headers": headers.raw}
        try:
            await self._send(message)
        except RuntimeError as error:
            if not _is_of_a_closed_transport(error):
                raise
            raise ClientDisconnect from None

    def log(self, status: int) -> None:
        elapsed_ms = (time.monotonic() - self._began) * 1e3
        method, path = self._scope["method"], printable(self._scope["path"])
        log.info("%s %s %s %d %.1f ms", self.id, printable(method), path, status, elapsed_ms)


def _is_of_a_closed_transport(error: RuntimeError) -> bool:
    """Whether the connection broke so lately that uvicorn has not heard of it: uvloop's words, it has no type."""
    return str(error).startswith("unable to perform operation on ") and str(error).endswith("the handler is closed")
