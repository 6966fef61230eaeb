"""KVStore: the bytes of a group's keys and values. Which block belongs to whom is the scheduler's business.

Sizes follow by arithmetic before any memory is taken. Memory is reserved once; the system hands pages over when they
are first touched, which a thread does a little ahead of the steps that need them: no step waits for pages, and a cache
that is hardly used takes hardly any.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from headrace import _core
from headrace.ops import I32
from headrace.types import KVGroup, KVKind

AHEAD_BYTES = 32 * 2**20  # of blocks touched before they are needed: more than a step of a small model writes
TOUCH_BYTES = 2**20  # at a time
TOUCH_PAUSE_S = 0.001  # between: at most 1 GiB/s of a memory that steps need too


class KVStore:
    """Keys and values of layers that are paged together."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, *, is_exact: bool) -> None:
        self.cache = _core.KvCache("f32" if is_exact else "bf16", num_layers, num_kv_heads, head_dim)
        row_bytes = num_kv_heads * head_dim * (4 if is_exact else 2)
        self.group = KVGroup(KVKind.FULL, tuple(range(num_layers)), row_bytes, row_bytes)
        self._touching: _Touching | None = None
        self._end_touching: Callable[[], object] | None = None

    @property
    def block_nbytes(self) -> int:
        return self.cache.block_nbytes

    @property
    def num_touched(self) -> int:
        """Blocks whose pages have been asked for so far, from block 0 on."""
        return 0 if self._touching is None else self._touching.num_touched

    def allocate(self, num_blocks: int) -> None:
        self.cache.allocate(num_blocks)
        self._touching = _Touching(self.cache)
        toucher = threading.Thread(target=self._touching.run, name="headrace-kv-touch", daemon=True)
        # Also for a store that nobody closes: a thread that comes back from the core into an interpreter which is
        # going away would abort the process. So the thread must not hold the store.
        self._end_touching = weakref.finalize(self, _end, toucher, self._touching)
        toucher.start()
        self._touching.ask_past(-1)

    def expect(self, blocks: I32) -> None:
        """A step uses `blocks`: have the pages behind them, which the next steps will use, touched meanwhile."""
        if self._touching is not None:
            self._touching.ask_past(int(blocks.max(initial=-1)))

    def close(self) -> None:
        """End the background work. The memory goes when the last program that uses it does."""
        if self._end_touching is not None:
            self._end_touching()


class _Touching:
    """What the thread that touches pages is to do. The scheduler takes fresh blocks in ascending order."""

    def __init__(self, cache: _core.KvCache) -> None:
        self.num_touched = 0
        self._cache = cache
        self._num_ahead = -(-AHEAD_BYTES // cache.block_nbytes)
        self._num_wanted = 0
        self._is_closing = False
        self._is_asked = threading.Event()

    def ask_past(self, block: int) -> None:
        """Have the blocks up to `block`, and some more, touched. Asks for half of "some more" at least at a time."""
        wanted = min(block + 1 + self._num_ahead, self._cache.num_blocks)
        if wanted >= min(self._num_wanted + self._num_ahead // 2, self._cache.num_blocks) > self._num_wanted:
            self._num_wanted = wanted
            self._is_asked.set()

    def end(self) -> None:
        self._is_closing = True
        self._is_asked.set()

    def run(self) -> None:
        at_once = max(1, TOUCH_BYTES // self._cache.block_nbytes)
        while self._is_asked.wait() and not self._is_closing:
            self._is_asked.clear()
            while self.num_touched < self._num_wanted and not self._is_closing:
                count = min(at_once, self._num_wanted - self.num_touched)
                self._cache.touch(self.num_touched, count)
                self.num_touched += count
                time.sleep(TOUCH_PAUSE_S)


def _end(toucher: threading.Thread, touching: _Touching) -> None:
    touching.end()
    toucher.join()
