"""EngineConfig: what whoever starts an engine may choose, with the defaults that suit most."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from headrace import _core
from headrace.types import CapacityError

MAX_LEN = _core.MAX_SIDE
MAX_STEP_TOKENS = 1 << 16  # far above what fills any processor; keeps what a step takes within reach
MAX_KV_BYTES = 1 << 62


class BackendKind(enum.Enum):
    CPU = "cpu"
    REFERENCE = "reference"  # numpy: slow, the oracle


class OrderKind(enum.Enum):
    FCFS = "fcfs"
    PRIORITY = "priority"
    STATIC = "static"  # the textbook baseline: a batch runs until its longest answer ends


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """None means, where nothing else is said: decided from the model and the machine, and reported."""

    max_len: int | None = None  # tokens of a sequence; None: the model's context
    max_seqs: int = 64  # sequences running at once
    max_step_tokens: int = 512  # tokens fed in one step
    max_chunk_tokens: int = 192  # of prompts, in a step in which others decode: bounds the gaps between their tokens
    max_kv_bytes: int | None = None
    threads: int | None = None
    isa: str | None = None  # "avx512", "avx2", "neon", "scalar"; None: the best the processor has
    backend: BackendKind = BackendKind.CPU
    is_exact: bool = False  # f32 activations, keys and values: slow, for comparison with other implementations
    has_prefix_cache: bool = True
    order: OrderKind = OrderKind.FCFS
    packed_dir: Path | None = None  # where weights may lie packed for the kernels: a start maps them; None: nowhere
    is_packed_kept: bool = False  # and a start that finds none there writes them

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("max_len", self.max_len, 2, MAX_LEN),
            ("max_seqs", self.max_seqs, 1, MAX_STEP_TOKENS),
            ("max_step_tokens", self.max_step_tokens, 1, MAX_STEP_TOKENS),
            ("max_chunk_tokens", self.max_chunk_tokens, 1, MAX_STEP_TOKENS),
            ("max_kv_bytes", self.max_kv_bytes, 1, MAX_KV_BYTES),
            ("threads", self.threads, 1, _core.MAX_THREADS),
        ):
            if value is not None and not least <= value <= most:
                flag = f"--{name.replace('_', '-')}"
                raise CapacityError(f"{name} is {value}; it must be {least} to {most}: change {flag}")
        if self.is_packed_kept and (self.packed_dir is None or self.backend is not BackendKind.CPU):
            raise CapacityError("packed weights can be kept by the CPU backend alone, and in a folder: give packed_dir")
        if self.max_seqs > self.max_step_tokens:
            raise CapacityError(
                f"max_step_tokens is {self.max_step_tokens}, less than max_seqs ({self.max_seqs}): "
                "a step must have room for one token of every sequence"
            )
