"""Threads for what would hold up the event loop: large bodies, long texts, templates.

Owns where work runs, and refuses to know what it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.types import Receive

from headrace.server.limits import WORKERS
from headrace.server.wire import unless_gone

T = TypeVar("T")


class Workers:
    """A few threads. Used on the event loop alone."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="headrace-worker")

    async def run(self, work: Callable[[], T], *, is_quick: bool) -> T:
        """What `work` gives: done here if that takes less than two switches of threads would, else on a thread."""
        if is_quick:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def run_for(self, receive: Receive, work: Callable[[], T], *, is_quick: bool) -> T:
        """The same for a client that may leave: then work that still waits for a thread is not done."""
        if is_quick:
            return work()
        return await unless_gone(receive, self.run(work, is_quick=False))

    def stop(self) -> None:
        self._pool.shutdown(cancel_futures=True)
