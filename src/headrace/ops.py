"""Ops: the operations that a model's forward function is written in, and the ragged arrays that a step works on.

Owns the contract between models and backends: shapes, meaning and the precision of every operation. The numpy backend
(`backend/reference.py`) runs it at once and is the oracle; the CPU backend records it. `V` is whatever a backend uses
for an activation of [rows, width] f32; `W` for a weight it has prepared.

Symbols: T tokens fed in the step, S sequences, R rows that get logits, B tokens of a KV block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]

CONTENDER_MARGIN = 3.0  # nats; see `head`
MAX_CONTENDERS, MARGIN_HALVINGS = 128, 6

V = TypeVar("V")
W_contra = TypeVar("W_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Rotary:
    """What rotates queries and keys: angle = position * frequencies[i], cosine and sine scaled by `magnitude`."""

    frequencies: tuple[float, ...]  # [rotary_dim / 2], radians per position
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Grouped-query attention: query head h reads KV head h // (num_heads // num_kv_heads)."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


class Ops(Protocol[V, W_contra]):
    """Every op takes and gives [rows, width] f32; a row's result never depends on the other rows."""

    def embed(self, table: W_contra) -> V:
        """Rows of `table` [vocab, hidden] for the step's tokens: [T, hidden]. Exact."""

    def rms_norm(self, x: V, weight: W_contra, eps: float) -> V:
        """x / sqrt(mean(x²) + eps) * weight (Zhang and Sennrich 2019)."""

    def linear(self, x: V, weights: Sequence[W_contra]) -> tuple[V, ...]:
        """x @ Wᵀ for each weight [out, in] that reads the same x (q, k and v; gate and up).

        The weight's format sets the precision of its input: f32 for f32 and f16 weights, bf16 for bf16, 8 bits with one
        scale per 32 inputs for the block formats. Accumulated in f32 (32-bit integers within a group).
        """

    def rotate(self, q: V, k: V, rotary: Rotary, shape: AttentionShape) -> tuple[V, V]:
        """Rotary embedding of every head of q and k at the tokens' positions; pairs are (i, i + rotary_dim/2)."""

    def attention(self, q: V, k: V, v: V, shape: AttentionShape) -> V:
        """Write k and v into the layer's KV blocks, then causal attention of every token over its sequence.

        Keys and values are read back as stored (bf16, or f32 in exact mode); queries and probabilities are rounded to
        the stored type before their products; sums and softmax are f32. [T, num_heads * head_dim].
        """

    def silu_mul(self, gate: V, up: V) -> V:
        """gate * sigmoid(gate) * up."""

    def add(self, x: V, y: V) -> V: ...

    def select_rows(self, x: V) -> V:
        """The R rows that get logits: [R, width]."""

    def head(self, x: V, weight: W_contra) -> None:
        """Logits x @ Wᵀ [R, vocab], scored and sampled per row inside the op: they never exist as one array.

        As `linear`; but where inputs are rounded to 8 bits, what that leaves over is rounded to 8 bits again and its
        product joins the logits that are at most CONTENDER_MARGIN below their row's greatest. Where those are more than
        MAX_CONTENDERS, the margin is halved until they are not, MARGIN_HALVINGS times at most, else it joins none.
        """


Forward = Callable[[Ops[Any, Any], Any], None]  # (ops, weights): a model's forward with its spec bound


class Batch(NamedTuple):
    """A plan as the ragged arrays that kernels read. All int32 unless said; nothing is padded."""

    tokens: I32  # [T]
    token_offsets: I32  # [S + 1] into tokens
    starts: I32  # [S] absolute position of each slice's first token
    row_tokens: I32  # [R] index into tokens of each logit row
    block_offsets: tuple[I32, ...]  # per KV group [S + 1] into blocks
    blocks: tuple[I32, ...]  # per KV group; table entry j holds positions [j*B, (j+1)*B); -1: freed
    sampling: SamplingRows


class SamplingRows(NamedTuple):
    """How each logit row is scored or drawn: SamplingParams as columns."""

    targets: I32  # [R] the token to score; -1: draw one
    positions: I32  # [R] absolute position of the token that the row predicts: the counter of the noise
    seeds: U64  # [R] key of the noise
    choices: I32  # [R] second part of the key
    temperature: F32  # [R] 0: argmax
    top_k: I32  # [R] 0: off
    top_p: F32  # [R]
    min_p: F32  # [R]
    repetition_penalty: F32  # [R]
    presence_penalty: F32  # [R]
    frequency_penalty: F32  # [R]
    num_top: I32  # [R] top-N logprobs wanted; -1: no logprobs at all
    bias_offsets: I32  # [R + 1] into bias_ids, bias_values
    bias_ids: I32
    bias_values: F32  # -inf forbids (min_tokens)
    history_offsets: I32  # [R + 1] into history: every token before the one that the row predicts
    history: I32
    num_prompt: I32  # [R] how many of the row's history are the prompt's (presence and frequency skip them)

    @property
    def num_rows(self) -> int:
        return len(self.targets)

    @property
    def max_top(self) -> int:
        return int(self.num_top.max(initial=0))


class RowScores(NamedTuple):
    """Logprobs of each logit row. Rows that asked for none have 0 in `logprobs`."""

    logprobs: F32  # [R] log-softmax of the raw logits at the row's token
    top_ids: I32  # [R, N] N = max_top, best first, ties to the lower id; -1 where a row asked for fewer
    top_logprobs: F32  # [R, N]


class RowResults(NamedTuple):
    """What came of each logit row."""

    tokens: list[int]  # [R] the token drawn, or the target; -1: nothing could be drawn
    scores: RowScores | None  # None: no row asked for logprobs


class Backend(Protocol):
    """A loaded model that can run steps. `reference` and `cpu` give the same answers within stated bounds."""

    def run(self, batch: Batch, mask: U32 | None = None, meanwhile: Callable[[], None] | None = None) -> RowResults:
        """One step. `mask` [R, ceil(vocab / 32)]: bit t % 32 of word t // 32 allows token t in that row. `meanwhile` is
        called once, beside the step if the backend can; what it raises is raised here, when the step is done.
        """

    def close(self) -> None: ...
