"""The reference backend: every operation in numpy, run at once. Slow, short, and the oracle of the others.

Two precisions: `exact` computes in f32 throughout; otherwise inputs of linears, keys, values, queries and
probabilities are rounded as the CPU backend rounds them, so that the two can be compared closely. Owns its own keys and
values, read through block tables like everybody's. The sampler is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.backend.weights import map_weights
from headrace.ops import (
    CONTENDER_MARGIN,
    F32,
    I32,
    MARGIN_HALVINGS,
    MAX_CONTENDERS,
    U32,
    AttentionShape,
    Batch,
    Forward,
    Rotary,
    RowResults,
    SamplingRows,
)
from headrace.tensor import GROUP, Tensor, round_bf16
from headrace.types import InvariantError

Sampler = Callable[[F32, SamplingRows, U32 | None], RowResults]
Rounding = Callable[[F32], F32]


def contenders(logits: F32, margin: float = CONTENDER_MARGIN, most: int = MAX_CONTENDERS) -> npt.NDArray[np.bool_]:
    """Which of a row's logits may win, as `Ops.head` defines it: [vocab]."""
    greatest = np.fmax.reduce(logits, initial=-np.inf)
    for halvings in range(MARGIN_HALVINGS + 1):
        near: npt.NDArray[np.bool_] = logits >= greatest - np.float32(margin / 2**halvings)
        if near.sum() <= most:
            return near
    return np.zeros_like(near)


def round_q8(x: F32) -> F32:
    """Round to 8 bits with one scale per 32 inputs: absmax / 127, ties to even. Rows are padded to whole groups."""
    rows, width = x.shape
    padded = np.pad(x, ((0, 0), (0, -width % GROUP)))
    groups = padded.reshape(rows, -1, GROUP)
    scale = (np.abs(groups).max(axis=2, keepdims=True) / np.float32(127)).astype(np.float32)
    quants = np.rint(groups / np.where(scale == 0, np.float32(1), scale))
    rounded: F32 = (quants * scale).reshape(rows, -1)[:, :width].astype(np.float32)
    return rounded


def unchanged(x: F32) -> F32:
    return x


INPUT_ROUNDING: dict[str, Rounding] = {
    "f32": unchanged,
    "f16": unchanged,
    "bf16": round_bf16,
    "q8_0": round_q8,
    "q4_0": round_q8,
    "q4_1": round_q8,
}


@dataclass(frozen=True, slots=True)
class ReferenceWeight:
    """A weight's exact values, and how a linear rounds what it multiplies them with."""

    values: F32
    round_input: Rounding


@dataclass(slots=True)
class ReferenceKV:
    """Keys and values by layer: [num_blocks, block_size, num_kv_heads, head_dim] f32, made when first written."""

    num_blocks: int
    block_size: int
    keys: dict[int, F32] = field(default_factory=dict)
    values: dict[int, F32] = field(default_factory=dict)

    def of(self, shape: AttentionShape) -> tuple[F32, F32]:
        if shape.layer not in self.keys:
            size = (self.num_blocks, self.block_size, shape.num_kv_heads, shape.head_dim)
            # NaN: what was never written must never matter
            self.keys[shape.layer] = np.full(size, np.nan, np.float32)
            self.values[shape.layer] = np.full(size, np.nan, np.float32)
        return self.keys[shape.layer], self.values[shape.layer]


class ReferenceBackend:
    """A `Backend` in numpy."""

    def __init__(
        self, forward: Forward, weights: Any, *, num_blocks: int, block_size: int, sampler: Sampler, is_exact: bool
    ) -> None:
        self._forward = forward
        self._kv = ReferenceKV(num_blocks, block_size)
        self._sampler = sampler
        self._is_exact = is_exact
        self._stored = weights

    def load(self) -> None:
        """Decode the weights now, not in the first step."""
        _ = self._weights

    @cached_property
    def _weights(self) -> Any:
        return map_weights(self._stored, self._prepare)

    def _prepare(self, tensor: Tensor) -> ReferenceWeight:
        rounding = unchanged if self._is_exact else INPUT_ROUNDING[tensor.format.name]
        return ReferenceWeight(tensor.to_f32(), rounding)

    def logits(self, batch: Batch) -> F32:
        """The raw logits of a step's rows: [R, vocab]."""
        ops = ReferenceOps(batch, self._kv, unchanged if self._is_exact else round_bf16)
        self._forward(ops, self._weights)
        if ops.logits is None:
            raise InvariantError("the forward pass has no head")
        return ops.logits

    def run(self, batch: Batch, mask: U32 | None = None, meanwhile: Callable[[], None] | None = None) -> RowResults:
        if meanwhile is not None:
            meanwhile()
        return self._sampler(self.logits(batch), batch.sampling, mask)

    def close(self) -> None:
        """Nothing to end."""


@dataclass(slots=True)
class ReferenceOps:
    """One step's operations. `round_kv`: how keys, values, queries and probabilities are rounded."""

    batch: Batch
    kv: ReferenceKV
    round_kv: Rounding
    logits: F32 | None = None

    def embed(self, table: ReferenceWeight) -> F32:
        return table.values[self.batch.tokens]

    def rms_norm(self, x: F32, weight: ReferenceWeight, eps: float) -> F32:
        mean_square: F32 = np.mean(x * x, axis=1, keepdims=True, dtype=np.float32)
        scaled: F32 = x / np.sqrt(mean_square + np.float32(eps)) * weight.values
        return scaled

    def linear(self, x: F32, weights: Sequence[ReferenceWeight]) -> tuple[F32, ...]:
        return tuple(weight.round_input(x) @ weight.values.T for weight in weights)

    def rotate(self, q: F32, k: F32, rotary: Rotary, shape: AttentionShape) -> tuple[F32, F32]:
        angles = self._positions()[:, None].astype(np.float64) * np.array(rotary.frequencies)
        cos = (np.cos(angles) * rotary.magnitude).astype(np.float32)[:, None]
        sin = (np.sin(angles) * rotary.magnitude).astype(np.float32)[:, None]
        pairs = len(rotary.frequencies)

        def rotated(x: F32) -> F32:
            heads = x.reshape(len(x), -1, shape.head_dim)
            first, second, rest = np.split(heads, [pairs, 2 * pairs], axis=2)
            turned = np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=2)
            return turned.reshape(x.shape)

        return rotated(q), rotated(k)

    def attention(self, q: F32, k: F32, v: F32, shape: AttentionShape) -> F32:
        keys, values = self.kv.of(shape)
        contexts = list(self._contexts())
        for fed, positions, table in contexts:
            blocks, slots = table[positions // self.kv.block_size], positions % self.kv.block_size
            keys[blocks, slots] = self.round_kv(k[fed]).reshape(-1, shape.num_kv_heads, shape.head_dim)
            values[blocks, slots] = self.round_kv(v[fed]).reshape(-1, shape.num_kv_heads, shape.head_dim)
        out = np.empty_like(q)
        for fed, positions, table in contexts:
            length = positions[-1] + 1
            seen_keys, seen_values = (
                stored[table].reshape(-1, *stored.shape[2:])[:length] for stored in (keys, values)
            )
            out[fed] = self._attend(q[fed], positions, seen_keys, seen_values, shape)
        return out

    def _attend(self, q: F32, positions: I32, keys: F32, values: F32, shape: AttentionShape) -> F32:
        """Causal attention of [n, num_heads * head_dim] over [length, num_kv_heads, head_dim]."""
        grouped = self.round_kv(q).reshape(len(q), shape.num_kv_heads, -1, shape.head_dim)
        scores = np.einsum("nkgd,lkd->kgnl", grouped, keys) * np.float32(shape.scale)
        scores = np.where(np.arange(len(keys)) <= positions[:, None], scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weighted = np.einsum("kgnl,lkd->nkgd", self.round_kv(weights), values)
        totals = weights.sum(axis=-1).transpose(2, 0, 1)[..., None]
        result: F32 = (weighted / totals).reshape(q.shape)
        return result

    def silu_mul(self, gate: F32, up: F32) -> F32:
        with np.errstate(over="ignore"):
            product: F32 = gate / (1 + np.exp(-gate)) * up
        return product

    def add(self, x: F32, y: F32) -> F32:
        return x + y

    def select_rows(self, x: F32) -> F32:
        return x[self.batch.row_tokens]

    def head(self, x: F32, weight: ReferenceWeight) -> None:
        rounded = weight.round_input(x)
        self.logits = rounded @ weight.values.T
        if weight.round_input is round_q8:
            rest = round_q8(x - rounded) @ weight.values.T
            contend = np.array([contenders(row) for row in self.logits]).reshape(rest.shape)
            self.logits += np.where(contend, rest, np.float32(0))

    def _positions(self) -> I32:
        """Absolute position of each token fed: [T]."""
        return np.concatenate([positions for _, positions, _ in self._contexts()] or [np.zeros(0, np.int32)])

    def _contexts(self) -> list[tuple[slice, I32, I32]]:
        """Per slice: its tokens in the step, their positions, its block table."""
        batch, contexts = self.batch, []
        (offsets,), (blocks,) = batch.block_offsets, batch.blocks
        for s, start in enumerate(batch.starts):
            begin, end = batch.token_offsets[s], batch.token_offsets[s + 1]
            positions = np.arange(start, start + end - begin, dtype=np.int32)
            contexts.append((slice(begin, end), positions, blocks[offsets[s] : offsets[s + 1]]))
        return contexts
