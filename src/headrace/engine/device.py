"""Devices: a backend with what the engine must know of it, made in two steps: first what it will take, then taking it.

Owns the size of the KV pool and the table of devices. A GPU would be another row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from headrace import _core
from headrace.backend.cpu import CpuBackend, StepBounds
from headrace.backend.packed import PackedFolder
from headrace.backend.reference import ReferenceBackend
from headrace.backend.threads import default_num_threads
from headrace.engine.config import BackendKind, EngineConfig
from headrace.engine.memory import Ledger, available_bytes, kv_bytes_to_take
from headrace.engine.stream import CoreLender
from headrace.model import ARCHITECTURES, ModelFiles
from headrace.ops import Backend, Forward
from headrace.run.sampler import sample_rows
from headrace.types import CapacityError, KVGroup, KVKind


@dataclass(frozen=True, slots=True)
class Device:
    """A backend that knows its sizes and has not taken them yet: `load` does."""

    name: str  # for people: which kernels, how many threads
    backend: Backend
    groups: tuple[KVGroup, ...]
    block_size: int
    num_blocks: tuple[int, ...]  # of each group
    ledger: Ledger
    load: Callable[[], Path | None]  # returns the file of packed weights that it maps, or has written
    close: Callable[[], None]  # end background work and threads
    lender: CoreLender | None = None  # its threads, if no core is left beside theirs


def cpu_device(files: ModelFiles, config: EngineConfig, max_len: int) -> Device:
    num_threads = config.threads or default_num_threads()
    pool = _thread_pool(num_threads)
    # Every fed token may ask for logits: where a prompt is scored.
    bounds = StepBounds(config.max_step_tokens, config.max_step_tokens, config.max_seqs, max_len)
    backend = CpuBackend(_forward(files), files.weights(), bounds, pool=pool, isa=config.isa, is_exact=config.is_exact)
    folder = None
    if config.packed_dir is not None:
        folder = PackedFolder(config.packed_dir, files.name, files.path, config.is_packed_kept)
    need = backend.memory
    num_blocks = kv_blocks(config, max_len, need.kv_block, backend.block_size)

    def close() -> None:
        backend.close()
        pool.close()

    return Device(
        name=f"CPU {backend.isa}, {num_threads} thread{'s'[: num_threads != 1]}{', exact' if config.is_exact else ''}",
        backend=backend,
        groups=backend.kv_groups,
        block_size=backend.block_size,
        num_blocks=(num_blocks,),
        ledger=Ledger(need.weights, num_blocks * need.kv_block, need.arena + need.scratch, available_bytes()),
        load=lambda: backend.load(num_blocks, folder),
        close=close,
        lender=pool if num_threads >= len(os.sched_getaffinity(0)) else None,
    )


def reference_device(files: ModelFiles, config: EngineConfig, max_len: int) -> Device:
    """Numpy, for comparison: it takes its memory as it goes."""
    spec, block_size = files.spec, _core.BLOCK_TOKENS
    block_bytes = spec.kv_bytes_per_token(4) * block_size
    num_blocks = kv_blocks(config, max_len, block_bytes, block_size)
    backend = ReferenceBackend(
        _forward(files),
        files.weights(),
        num_blocks=num_blocks,
        block_size=block_size,
        sampler=sample_rows,
        is_exact=config.is_exact,
    )
    row_bytes = spec.num_kv_heads * spec.head_dim * 4
    return Device(
        name=f"numpy reference{', exact' if config.is_exact else ''}",
        backend=backend,
        groups=(KVGroup(KVKind.FULL, tuple(range(spec.num_layers)), row_bytes, row_bytes),),
        block_size=block_size,
        num_blocks=(num_blocks,),
        ledger=Ledger(4 * files.parameters, num_blocks * block_bytes, 0, available_bytes()),
        load=backend.load,
        close=backend.close,
    )


DEVICES: Mapping[BackendKind, Callable[[ModelFiles, EngineConfig, int], Device]] = MappingProxyType(
    {BackendKind.CPU: cpu_device, BackendKind.REFERENCE: reference_device}
)


def _thread_pool(num_threads: int) -> _core.ThreadPool:
    try:
        return _core.ThreadPool(num_threads)
    except RuntimeError as error:
        raise CapacityError(
            f"{error}; lower --threads, or raise the limit on processes (ulimit -u, a control group's pids.max)"
        ) from None


def _forward(files: ModelFiles) -> Forward:
    architecture = ARCHITECTURES[files.spec.architecture]
    return lambda ops, weights: architecture.forward(ops, files.spec, weights)


def kv_blocks(config: EngineConfig, max_len: int, block_bytes: int, block_size: int) -> int:
    """Blocks of the KV pool; CapacityError if not even one sequence of max_len fits."""
    blocks_per_sequence = -(-max_len // block_size)
    most_useful = config.max_seqs * blocks_per_sequence * block_bytes
    pool_bytes = kv_bytes_to_take(config.max_kv_bytes, most_useful, available_bytes())
    if pool_bytes < blocks_per_sequence * block_bytes:
        raise CapacityError(
            f"one sequence of {max_len:,} tokens needs {blocks_per_sequence * block_bytes:,} bytes of KV cache; the "
            f"pool is to have {pool_bytes:,}: lower --max-len or raise --max-kv-bytes"
        )
    return min(pool_bytes // block_bytes, _core.MAX_SIDE)
