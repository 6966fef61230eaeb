"""The CPU backend: `forward` recorded once, replayed by the C++ core each step.

Owns the way from a model's tensors to a program that can run: prepare and record (takes no memory, so that sizes can
be refused), then load. Refuses to know architectures, which it meets as a function and a tree of tensors, and the
scheduler, which it meets as batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from headrace import _core
from headrace.backend.kv import KVStore
from headrace.backend.layout import lay_out
from headrace.backend.packed import PackedFolder
from headrace.backend.recording import Attention, Operation, Places, Prepared, Recorder, RowKind, fuse
from headrace.backend.weights import map_weights
from headrace.ops import I32, U32, Batch, Forward, RowResults, RowScores
from headrace.tensor import FORMATS, Tensor, from_f32
from headrace.types import CapacityError, KVGroup, ModelError


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The largest step that memory is taken for."""

    max_tokens: int
    max_rows: int
    max_seqs: int
    max_len: int


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a loaded model takes, exactly, before it takes them."""

    weights: int
    arena: int
    scratch: int
    kv_block: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds that the core took for all steps since profiling began, and what each kind of phase had of them."""

    total: float
    rows: float = 0.0
    linear: float = 0.0
    attention: float = 0.0
    head: float = 0.0  # sampling included

    def since(self, earlier: Profile) -> Profile:
        return Profile(*(getattr(self, kind.name) - getattr(earlier, kind.name) for kind in fields(self)))


class CpuBackend:
    """A `Backend` on the machine's own cores. Constructing it records; `load` takes the memory; then it runs.

    `is_exact` decodes all weights to f32 and keeps keys and values as f32: for comparison with other implementations.
    Raises ModelError for what the kernels cannot do.
    """

    def __init__(
        self,
        forward: Forward,
        weights: Any,
        bounds: StepBounds,
        *,
        pool: _core.ThreadPool,
        isa: str | None = None,
        is_exact: bool = False,
    ) -> None:
        self.isa = choose_isa(isa)
        self._pool = pool
        self._is_exact = is_exact
        self._used_blocks: I32 | None = None
        self._unpacked: list[tuple[_core.Weight, Tensor]] = []
        recorder = Recorder()
        forward(recorder, map_weights(weights, self._prepare))
        operations = fuse(recorder.operations)
        self._store = _store_for(operations, is_exact=is_exact)
        num_rows = {RowKind.TOKENS: bounds.max_tokens, RowKind.LOGITS: bounds.max_rows}
        places = Places(lay_out(operations, num_rows), self._store.cache)
        self._program = _core.Program(pool, self.isa, **asdict(bounds))
        for operation in operations:
            operation.replay(self._program, places)
        if self._program.max_tiles > _core.MAX_TILES:
            raise CapacityError(
                f"a step of {bounds.max_tokens:,} tokens in contexts of {bounds.max_len:,} is cut into up to "
                f"{self._program.max_tiles:,} parts, at most {_core.MAX_TILES:,} are allowed: lower --max-step-tokens "
                "or --max-len"
            )
        self.memory = MemoryNeed(
            weights=sum(weight.nbytes for weight, _ in self._unpacked),
            arena=self._program.arena_nbytes,
            scratch=self._program.scratch_nbytes,
            kv_block=self._store.block_nbytes,
        )

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return (self._store.group,)

    @property
    def block_size(self) -> int:
        return _core.BLOCK_TOKENS

    def load(self, num_blocks: int, folder: PackedFolder | None = None) -> Path | None:
        """Take the memory and pack the weights, or map them packed; afterwards the model's files are not referred to.

        Returns the file of packed weights that was mapped or, if they are to be kept, written.
        """
        self._program.allocate()
        path = self._place_weights(folder)
        self._store.allocate(num_blocks)  # last: its first pages are touched in the background from now on
        return path

    def run(self, batch: Batch, mask: U32 | None = None, meanwhile: Callable[[], None] | None = None) -> RowResults:
        """One step. Raises ValueError for a batch that is out of bounds in any way, before anything is computed."""
        self._store.begin_step()
        try:
            tokens, scores = self._program.run(*batch, mask, meanwhile)
            if batch.blocks[0] is not self._used_blocks:  # steps of one block after another: not searched in each
                self._store.use(batch.blocks[0])
                self._used_blocks = batch.blocks[0]
        finally:
            self._store.end_step()
        return RowResults(tokens, None if scores is None else RowScores(*scores))

    def start_profile(self) -> None:
        self._program.start_profile()

    @property
    def profile(self) -> Profile:
        """What start_profile() began; all zeros before."""
        return Profile(*(self._program.profile or (0.0,)))

    def read_bandwidth(self, num_bytes: int, num_passes: int) -> list[float]:
        """Bytes per second that the threads of this backend read from memory, of each pass."""
        return _core.read_bandwidth(self._pool, num_bytes, num_passes)

    def close(self) -> None:
        """End background work. The pool is its owner's to close."""
        self._store.close()

    def _place_weights(self, folder: PackedFolder | None) -> Path | None:
        weights = [weight for weight, _ in self._unpacked]
        file = None if folder is None else folder.file_for(self._unpacked, self.isa, self._pool)
        if file is not None and file.map(weights, self._pool):
            self._unpacked.clear()
            return file.path
        block = _core.place_together(weights)
        while self._unpacked:
            self._pack(*self._unpacked.pop())
        if file is None or not file.is_kept:
            return None
        file.write(block, self._pool)
        return file.path

    def _pack(self, weight: _core.Weight, tensor: Tensor) -> None:
        """Decoded or reordered bytes live in here alone: those of one matrix at a time."""
        data = from_f32(tensor.to_f32(), FORMATS["f32"]).data if self._is_exact else tensor.data
        weight.pack(self._pool, data)
        tensor.release()

    def _prepare(self, tensor: Tensor) -> Prepared:
        if len(tensor.shape) == 1:
            return tensor.to_f32()
        rows, columns = tensor.shape
        weight = _core.Weight(self.isa, "f32" if self._is_exact else tensor.format.name, rows, columns)
        self._unpacked.append((weight, tensor))
        return weight


def choose_isa(isa: str | None) -> str:
    """The instruction set asked for, or the best; raises CapacityError for one that is not there."""
    available = _core.available_isas()
    if isa is not None and isa not in available:
        raise CapacityError(f"this build and processor have no kernels for {isa}; they have {', '.join(available)}")
    return isa or available[0]


def _store_for(operations: Sequence[Operation], *, is_exact: bool) -> KVStore:
    shapes = [operation.shape for operation in operations if isinstance(operation, Attention)]
    kinds = {(shape.num_kv_heads, shape.head_dim) for shape in shapes}
    if len(kinds) != 1:
        raise ModelError(f"all layers must have keys and values of one shape; this model has {sorted(kinds)}")
    ((num_kv_heads, head_dim),) = kinds
    if head_dim % 16 or head_dim > _core.MAX_HEAD_DIM:
        raise ModelError(f"head_dim is {head_dim}; the kernels need a multiple of 16, at most {_core.MAX_HEAD_DIM}")
    return KVStore(len(shapes), num_kv_heads, head_dim, is_exact=is_exact)
