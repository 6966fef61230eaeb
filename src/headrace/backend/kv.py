"""KVStore: the bytes of a group's keys and values. Which block belongs to whom is the scheduler's business.

Sizes follow by arithmetic before any memory is taken. Memory is reserved once; a thread then touches it in the
background, so that no step waits for the system to hand over pages.
"""

from __future__ import annotations

import threading

from headrace import _core
from headrace.types import KVGroup, KVKind

TOUCH_BYTES = 2**20  # at a time
TOUCH_PAUSE_S = 0.001  # between: at most 1 GiB/s of a memory that steps need too


class KVStore:
    """Keys and values of layers that are paged together."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, *, is_exact: bool) -> None:
        self.memory = _core.KvMemory("f32" if is_exact else "bf16", num_layers, num_kv_heads, head_dim)
        row_bytes = num_kv_heads * head_dim * (4 if is_exact else 2)
        self.group = KVGroup(KVKind.FULL, tuple(range(num_layers)), row_bytes, row_bytes)
        self._is_closing = threading.Event()
        self._toucher: threading.Thread | None = None

    @property
    def block_nbytes(self) -> int:
        return self.memory.block_nbytes

    def num_blocks_for(self, budget_bytes: int) -> int:
        """How many blocks fit into a budget."""
        return budget_bytes // self.block_nbytes

    def allocate(self, num_blocks: int) -> None:
        self.memory.allocate(num_blocks)
        self._toucher = threading.Thread(target=self._touch, name="headrace-kv-touch", daemon=True)
        self._toucher.start()

    def close(self) -> None:
        """End the background work. The memory goes when the last program that uses it does."""
        self._is_closing.set()
        if self._toucher is not None:
            self._toucher.join()

    def _touch(self) -> None:
        num_blocks = self.memory.num_blocks
        at_once = max(1, TOUCH_BYTES // self.block_nbytes)
        for first in range(0, num_blocks, at_once):
            self.memory.touch(first, min(at_once, num_blocks - first))
            if self._is_closing.wait(TOUCH_PAUSE_S):
                return
