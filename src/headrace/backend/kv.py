"""KVStore: the bytes of a group's keys and values. Which block belongs to whom is the scheduler's business.

Sizes follow by arithmetic before any memory is taken. Memory is reserved once; a thread then touches it in the
background, so that no step waits for the system to hand over pages.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from headrace import _core
from headrace.types import KVGroup, KVKind

TOUCH_BYTES = 2**20  # at a time
TOUCH_PAUSE_S = 0.001  # between: at most 1 GiB/s of a memory that steps need too


class KVStore:
    """Keys and values of layers that are paged together."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, *, is_exact: bool) -> None:
        self.cache = _core.KvCache("f32" if is_exact else "bf16", num_layers, num_kv_heads, head_dim)
        row_bytes = num_kv_heads * head_dim * (4 if is_exact else 2)
        self.group = KVGroup(KVKind.FULL, tuple(range(num_layers)), row_bytes, row_bytes)
        self._end_touching: Callable[[], object] | None = None

    @property
    def block_nbytes(self) -> int:
        return self.cache.block_nbytes

    def allocate(self, num_blocks: int) -> None:
        self.cache.allocate(num_blocks)
        is_closing = threading.Event()
        toucher = threading.Thread(target=_touch, args=(self.cache, is_closing), name="headrace-kv-touch", daemon=True)
        # Also for a store that nobody closes: a thread that comes back from the core into an interpreter which is
        # going away would abort the process. So the thread must not hold the store.
        self._end_touching = weakref.finalize(self, _end, toucher, is_closing)
        toucher.start()

    def close(self) -> None:
        """End the background work. The memory goes when the last program that uses it does."""
        if self._end_touching is not None:
            self._end_touching()


def _touch(cache: _core.KvCache, is_closing: threading.Event) -> None:
    num_blocks = cache.num_blocks
    at_once = max(1, TOUCH_BYTES // cache.block_nbytes)
    for first in range(0, num_blocks, at_once):
        cache.touch(first, min(at_once, num_blocks - first))
        if is_closing.wait(TOUCH_PAUSE_S):
            return


def _end(toucher: threading.Thread, is_closing: threading.Event) -> None:
    is_closing.set()
    toucher.join()
