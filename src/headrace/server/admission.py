"""Admission: how many answers may be open at once, and the end of all of them when the server stops.

Owns the count and the streams under way. Refuses to know what they carry.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from headrace.engine.stream import Stream
from headrace.server.limits import MAX_OPEN_SEQUENCES, RETRY_AFTER_S
from headrace.server.openai.errors import CUT_OFF, SHUTTING_DOWN
from headrace.types import RequestError


class Admission:
    """Places for answers. Used on the event loop alone."""

    def __init__(self, max_open: int = MAX_OPEN_SEQUENCES) -> None:
        self.max_open = max_open
        self.num_open = 0
        self.is_draining = False
        self._is_over = False
        self._streams: dict[int, Stream] = {}  # by request id, so oldest first

    @contextlib.contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Hold places for `count` answers; RequestError if the server stops or has not so many left."""
        if self.is_draining:
            raise RequestError("the server is shutting down", None, SHUTTING_DOWN)
        if self.num_open + count > self.max_open:
            raise RequestError(
                f"{self.num_open} answers are running or waiting and this request asks for {count}; at most "
                f"{self.max_open} may be open: try again in {RETRY_AFTER_S} s or later",
                None,
                "queue_full",
            )
        self.num_open += count
        try:
            yield
        finally:
            self.num_open -= count

    @contextlib.contextmanager
    def under_way(self, stream: Stream) -> Iterator[None]:
        """Know of a stream for as long as it is open; RequestError if all have been ended."""
        if self._is_over:
            raise RequestError(CUT_OFF, None, SHUTTING_DOWN)
        self._streams[stream.request.id] = stream
        try:
            yield
        finally:
            del self._streams[stream.request.id]

    @property
    def oldest_us(self) -> int | None:
        """When the oldest answer under way was asked for."""
        return next((stream.request.arrival_us for stream in self._streams.values()), None)

    @property
    def request_ids(self) -> tuple[int, ...]:
        """Of the answers under way, oldest first."""
        return tuple(self._streams)

    def drain(self) -> None:
        """Take nothing more."""
        self.is_draining = True

    def end_all(self) -> None:
        """Tell every answer under way that it ends here, and why; and those whose prompt is still being made."""
        self._is_over = True
        for stream in self._streams.values():
            stream.cancel()
            stream.fail(RequestError(CUT_OFF, None, SHUTTING_DOWN))
