"""Tiny random Llama weights without a file, and batches written by hand, for the tests of backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.model.llama import LlamaLayer, LlamaWeights, forward
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.ops import Batch, SamplingRows
from headrace.tensor import FORMATS, Tensor, from_f32

BLOCK_SIZE = 16
FULL_ROTARY = 0  # of TinySpec.rotary_dim: all of head_dim


@dataclass(frozen=True)
class TinySpec:
    """The sizes that a test wants to vary. The format is of all matrices; `mixed` gives some of them another."""

    format: str = "q8_0"
    hidden_size: int = 64
    intermediate_size: int = 96
    vocab_size: int = 77  # no multiple of a tile's 16 outputs
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int = FULL_ROTARY
    is_tied: bool = True
    mixed: tuple[tuple[str, str], ...] = ()  # (name of a weight, its format)

    def model(self) -> ModelSpec:
        return ModelSpec(
            architecture="llama",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_len=2048,
            norm_eps=1e-5,
            rope=RopeSpec(self.rotary_dim or self.head_dim, 10000.0),
            is_embedding_tied=self.is_tied,
        )

    def forward(self) -> Callable[[Any, Any], None]:
        spec = self.model()
        return lambda ops, weights: forward(ops, spec, weights)

    def weights(self, seed: int = 0) -> LlamaWeights[Tensor]:
        rng = np.random.default_rng(seed)
        formats = dict(self.mixed)

        def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> Tensor:
            values = rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)
            return from_f32(values, FORMATS[formats.get(name, self.format)])

        def norm() -> Tensor:
            return from_f32(1 + 0.2 * rng.standard_normal(self.hidden_size), FORMATS["f32"])

        def layer() -> LlamaLayer[Tensor]:
            q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
            return LlamaLayer(
                attention_norm=norm(),
                q=matrix("q", q_rows, self.hidden_size, 2.0),  # sharp attention, so that positions matter
                k=matrix("k", kv_rows, self.hidden_size, 2.0),
                v=matrix("v", kv_rows, self.hidden_size),
                o=matrix("o", self.hidden_size, q_rows),
                mlp_norm=norm(),
                gate=matrix("gate", self.intermediate_size, self.hidden_size),
                up=matrix("up", self.intermediate_size, self.hidden_size),
                down=matrix("down", self.hidden_size, self.intermediate_size),
            )

        embedding = matrix("embedding", self.vocab_size, self.hidden_size, 3.0)
        head = embedding if self.is_tied else matrix("head", self.vocab_size, self.hidden_size, 3.0)
        return LlamaWeights(embedding, tuple(layer() for _ in range(self.num_layers)), norm(), head)


@dataclass(frozen=True)
class Part:
    """One slice of a batch written by hand: `tokens` at `start`, logits for the last `num_rows` of them."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    num_rows: int = 1
    temperature: float = 0.0
    seed: int = 1
    num_top: int = 5
    targets: Sequence[int] = ()  # none: draw


def batch_of(parts: Sequence[Part]) -> Batch:
    counts = [len(part.tokens) for part in parts]
    ends = np.cumsum([0, *counts])
    row_tokens = [
        end - part.num_rows + i for part, end in zip(parts, ends[1:], strict=True) for i in range(part.num_rows)
    ]
    rows = [(part, i) for part in parts for i in range(part.num_rows)]
    return Batch(
        tokens=ints([token for part in parts for token in part.tokens]),
        token_offsets=ints(ends),
        starts=ints([part.start for part in parts]),
        row_tokens=ints(row_tokens),
        block_offsets=(ints(np.cumsum([0, *(len(part.blocks) for part in parts)])),),
        blocks=(ints([block for part in parts for block in part.blocks]),),
        sampling=plain_sampling(len(rows))._replace(
            targets=ints([part.targets[i] if part.targets else -1 for part, i in rows]),
            positions=ints([part.start + len(part.tokens) - part.num_rows + i + 1 for part, i in rows]),
            seeds=np.array([part.seed for part, _ in rows], np.uint64),
            temperature=floats([part.temperature for part, _ in rows]),
            num_top=ints([part.num_top for part, _ in rows]),
        ),
    )


def plain_sampling(num_rows: int) -> SamplingRows:
    """Greedy, without logprobs."""
    zeros, ones = np.zeros(num_rows), np.ones(num_rows)
    return SamplingRows(
        targets=ints(zeros - 1),
        positions=ints(zeros),
        seeds=np.zeros(num_rows, np.uint64),
        choices=ints(zeros),
        temperature=floats(zeros),
        top_k=ints(zeros),
        top_p=floats(ones),
        min_p=floats(zeros),
        repetition_penalty=floats(ones),
        presence_penalty=floats(zeros),
        frequency_penalty=floats(zeros),
        num_top=ints(zeros - 1),
        bias_offsets=ints(np.zeros(num_rows + 1)),
        bias_ids=ints([]),
        bias_values=floats([]),
        history_offsets=ints(np.zeros(num_rows + 1)),
        history=ints([]),
        num_prompt=ints(zeros),
    )


def ints(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.asarray(values, np.int32)


def floats(values: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.asarray(values, np.float32)
