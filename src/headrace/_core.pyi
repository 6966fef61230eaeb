"""The C++ core: thread pool, packed weights, KV cache and the recorded program. Shapes are checked at this border."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

BLOCK_TOKENS: int
CONTENDER_MARGIN: float  # nats
MARGIN_HALVINGS: int
MAX_CONTENDERS: int
MAX_HEAD_DIM: int
MAX_SIDE: int  # rows or columns of a weight, tokens, blocks
MAX_THREADS: int
MAX_TILES: int  # of a phase
MAX_TOP: int

def available_isas() -> list[str]: ...  # best first, of "avx512", "avx2", "neon", "scalar"

class ThreadPool:
    """`num_threads` threads in all, the caller's included. RuntimeError if the system does not give as many."""

    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...
    def tile_threads(self, count: int, tile_us: int) -> list[int]:
        """Which thread computed each of `count` tiles, of so many microseconds each. For tests."""

    def lend_core(self) -> None:
        """Have one worker take no tiles from its next phase on, until take_core_back(), for 5 ms at most.

        Its core is for other threads meanwhile.

        From any thread. Nothing is lent by a pool of one.
        """

    def take_core_back(self) -> None: ...
    def close(self) -> None: ...

def line_transfer(pool: ThreadPool, num_passes: int) -> list[float]:
    """Seconds that a cache line takes from one of two threads to the other, of each pass that both took part in."""

def read_bandwidth(pool: ThreadPool, num_bytes: int, num_passes: int) -> list[float]:
    """Bytes per second that the pool's threads read, of each pass over memory of its own."""

class Weight:
    """A matrix packed for the kernels. Knows its size at once, takes memory in place_together() or else in pack()."""

    def __init__(self, isa: str, format: str, rows: int, columns: int) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def format(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    def pack(self, pool: ThreadPool, data: U8) -> None: ...
    def to_f32(self) -> F32: ...

def place_together(weights: Sequence[Weight]) -> U8:
    """Take one block of memory for several weights, which lie in it in their order; pack() then fills it.

    Returns a view of the block.
    """

def place_packed(weights: Sequence[Weight], data: U8) -> None:
    """Give weights a block that pack() filled before, of weights of the same kinds in the same order: all are packed.

    ValueError for a block of another size, or that does not begin at a multiple of 64 bytes. `data` is kept.
    """

def digest(pool: ThreadPool, data: U8) -> int:
    """A checksum of 64 bits, the same for any number of threads: finds damage, not intent."""

class KvCache:
    """The bytes of one KV group. `dtype` is "bf16" or "f32". Takes address space in allocate(), pages when touched."""

    def __init__(self, dtype: str, num_layers: int, num_kv_heads: int, head_dim: int) -> None: ...
    @property
    def block_nbytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    def allocate(self, num_blocks: int) -> None: ...
    def touch(self, first_block: int, num_blocks: int) -> None: ...

class Program:
    """A forward pass, recorded once and replayed each step. Values are arena offsets in floats.

    Recording takes no memory; allocate() ends it and takes all that a step can need. Row operations that follow each
    other over the same rows share a phase: no barrier is between them.
    """

    def __init__(
        self, pool: ThreadPool, isa: str, *, max_tokens: int, max_rows: int, max_seqs: int, max_len: int
    ) -> None: ...
    def embed(self, out: int, table: Weight) -> None: ...
    def rms_norm(self, out: int | None, x: int, weight: F32, eps: float, is_rows: bool) -> None: ...
    def linear(
        self, outs: Sequence[int], x: int | None, weights: Sequence[Weight], add: int | None, is_rows: bool
    ) -> None: ...
    def rotate(self, out: int, x: int, width: int, head_dim: int, frequencies: F64, magnitude: float) -> None: ...
    def attention(
        self, out: int, q: int, k: int, v: int, kv: KvCache, *, group: int, layer: int, num_heads: int, scale: float
    ) -> None: ...
    def silu_mul(self, out: int | None, gate: int, up: int, width: int, is_rows: bool) -> None: ...
    def add(self, out: int, x: int, y: int, width: int, is_rows: bool) -> None: ...
    def select_rows(self, out: int, x: int, width: int) -> None: ...
    def head(self, x: int | None, weight: Weight) -> None: ...
    @property
    def arena_nbytes(self) -> int: ...
    @property
    def scratch_nbytes(self) -> int: ...
    def start_profile(self) -> None: ...  # from zero
    @property
    def profile(self) -> tuple[float, float, float, float, float] | None:
        """Seconds of all runs since start_profile(): whole runs; phases of rows, linears, attention, head."""
    @property
    def max_tiles(self) -> int: ...  # of a phase of any step; allocate() refuses more than MAX_TILES
    def allocate(self) -> None: ...
    def run(
        self,
        tokens: I32,
        token_offsets: I32,
        starts: I32,
        row_tokens: I32,
        block_offsets: tuple[I32, ...],
        blocks: tuple[I32, ...],
        sampling: tuple[object, ...],  # the columns of ops.SamplingRows, in their order
        mask: U32 | None,
        meanwhile: Callable[[], None] | None,  # called beside the step, on this thread
    ) -> tuple[list[int], tuple[F32, I32, F32] | None]:
        """The fields of ops.RowResults. Arrays are held until others come in their place; where they lie is remembered,
        what is in them is read, and checked, each time.
        """

def sample(
    isa: str, logits: F32, sampling: tuple[object, ...], mask: U32 | None
) -> tuple[list[int], tuple[F32, I32, F32] | None]: ...  # for tests: the head's second half alone
def philox(counter: U32, key: int) -> tuple[int, int, int, int]: ...  # the sampler's generator, for its known answers
