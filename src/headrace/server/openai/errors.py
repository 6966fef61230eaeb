"""Errors as OpenAI's API shows them: `{"error": {"message", "type", "param", "code"}}` and an HTTP status.

Owns the one way from an exception to a status and a body. Nothing of an unexpected exception leaves here but a
sentence: no address, path or traceback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from headrace.server.limits import MAX_ECHOED_CHARS, RETRY_AFTER_S
from headrace.types import CapacityError, RequestError

SHUTTING_DOWN = "server_shutting_down"
ENGINE_FAILED = "engine_failed"
CUT_OFF = "the server is shutting down; the answer is cut off"

# The status of a RequestError by its code; 400 for all others.
_STATUS: Mapping[str, int] = {
    "model_not_found": 404,
    "queue_full": 429,
    ENGINE_FAILED: 500,
    SHUTTING_DOWN: 503,
}
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_RETRIED = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error as it goes to the client."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refusal_of(error: Exception) -> Refusal:
    """What a client is told about an exception."""
    if isinstance(error, RequestError):
        status = _STATUS.get(error.code, 400)
        headers = {"retry-after": str(RETRY_AFTER_S)} if status in _RETRIED else {}
        return Refusal(status, str(error), error.param, error.code, headers)
    if isinstance(error, CapacityError):
        return Refusal(503, str(error), None, "capacity", {"retry-after": str(RETRY_AFTER_S)})
    return Refusal(500, "headrace failed on this request; its log says why", None, "internal_error")


def refusal_of_status(status: int, message: str | None = None) -> Refusal:
    """An error that the framework found: an unknown route, a wrong method."""
    phrase = HTTPStatus(status).phrase
    return Refusal(status, message or phrase, None, phrase.lower().replace(" ", "_").replace("-", "_"))


def printable(text: str, limit: int = MAX_ECHOED_CHARS) -> str:
    """A client's words, fit for a header or a log line: ASCII, control characters escaped, bounded."""
    kept = text[:limit].encode("unicode_escape").decode("ascii")
    return kept[:limit] + ("..." if len(text) > limit or len(kept) > limit else "")
