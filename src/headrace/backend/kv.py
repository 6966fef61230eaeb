"""KVStore: the bytes of a group's keys and values. Which block belongs to whom is the scheduler's business.

Sizes follow by arithmetic before any memory is taken. Memory is reserved once; the system hands pages over when they
are first touched, which can take longer than all else that a prompt does to them. So a thread touches the blocks that
come next while no step runs. Beside a step it would take a core from the step's threads, while the others wait for
them: what is still missing then, they take themselves, all at once.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable

from headrace import _core
from headrace.ops import I32
from headrace.types import KVGroup, KVKind

MIN_AHEAD_BYTES = 64 * 2**20  # of blocks touched before they are needed: some prompts' of a small model
MAX_AHEAD_BYTES = 256 * 2**20  # between the two, as much as has been used so far
TOUCH_BYTES = 2 * 2**20  # at a time: a huge page takes up to 5 ms, which a step that begins may have to share
REST_S = 0.05  # without a step, before anything is touched: steps of a busy engine follow each other faster


class KVStore:
    """Keys and values of layers that are paged together."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, *, is_exact: bool) -> None:
        self.cache = _core.KvCache("f32" if is_exact else "bf16", num_layers, num_kv_heads, head_dim)
        row_bytes = num_kv_heads * head_dim * (4 if is_exact else 2)
        self.group = KVGroup(KVKind.FULL, tuple(range(num_layers)), row_bytes, row_bytes)
        self._touching = _Touching(self.cache)
        self._end_touching: Callable[[], object] | None = None

    @property
    def block_nbytes(self) -> int:
        return self.cache.block_nbytes

    @property
    def num_touched(self) -> int:
        """Blocks whose pages have been asked for so far, from block 0 on."""
        return self._touching.num_touched

    def allocate(self, num_blocks: int) -> None:
        self.cache.allocate(num_blocks)
        toucher = threading.Thread(target=self._touching.run, name="headrace-kv-touch", daemon=True)
        # Also for a store that nobody closes: a thread that comes back from the core into an interpreter which is
        # going away would abort the process. So the thread must not hold the store.
        self._end_touching = weakref.finalize(self, _end, toucher, self._touching)
        toucher.start()
        self._touching.use(-1)
        self.end_step()

    def begin_step(self) -> None:
        """Leave the machine to a step."""
        self._touching.resting_since = math.inf

    def use(self, blocks: I32) -> None:
        """The step has used `blocks`, and so touched them. What the next ones will use is touched at rest."""
        self._touching.use(int(blocks.max(initial=-1)))

    def end_step(self) -> None:
        self._touching.resting_since = time.monotonic()

    def close(self) -> None:
        """End the background work. The memory goes when the last program that uses it does."""
        if self._end_touching is not None:
            self._end_touching()


def num_ahead(num_used: int, block_nbytes: int) -> int:
    """Blocks worth touching past those used. A server that is hardly asked keeps its memory small."""
    return -(-min(max(num_used * block_nbytes, MIN_AHEAD_BYTES), MAX_AHEAD_BYTES) // block_nbytes)


class _Touching:
    """What the thread that touches pages is to do. The scheduler takes fresh blocks in ascending order."""

    def __init__(self, cache: _core.KvCache) -> None:
        self.num_touched = 0
        self.resting_since = math.inf  # never, while a step runs
        self._cache = cache
        self._num_used = 0
        self._is_closing = threading.Event()
        self._is_asked = threading.Event()

    def use(self, last_block: int) -> None:
        self._num_used = max(self._num_used, last_block + 1)
        if self.num_touched < self._num_wanted():
            self._is_asked.set()

    def end(self) -> None:
        self._is_closing.set()
        self._is_asked.set()

    def run(self) -> None:
        at_once = max(1, TOUCH_BYTES // self._cache.block_nbytes)
        while self._is_asked.wait() and not self._is_closing.is_set():
            self._is_asked.clear()
            while self.num_touched < self._num_wanted() and self._wait_for_rest():
                wanted = self._num_wanted()  # now: steps that ran meanwhile may have used more than was wanted before
                first = min(max(self.num_touched, self._num_used), wanted)  # steps have touched what they used
                count = min(at_once, wanted - first)
                self._cache.touch(first, count)
                self.num_touched = first + count

    def _num_wanted(self) -> int:
        return min(self._num_used + num_ahead(self._num_used, self._cache.block_nbytes), self._cache.num_blocks)

    def _wait_for_rest(self) -> bool:
        """Until no step has run for REST_S; False when the thread shall end."""
        while (left := self.resting_since + REST_S - time.monotonic()) > 0:
            if self._is_closing.wait(min(left, REST_S)):
                return False
        return not self._is_closing.is_set()


def _end(toucher: threading.Thread, touching: _Touching) -> None:
    touching.end()
    toucher.join()
