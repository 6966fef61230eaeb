"""The Llama family: RMS norm, rotary embedding, grouped-query attention, gated MLP (Touvron et al. 2023).

SmolLM2, Llama 2, 3, 3.1 and 3.2 and whoever copied their shape. Reads like the paper: which kernels run, in what
precision and on which device is the business of `ops`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.model.spec import ModelSpec
from headrace.ops import AttentionShape, Ops, Rotary

V = TypeVar("V")
W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class LlamaLayer(Generic[W]):
    attention_norm: W  # [hidden]
    q: W  # [num_heads * head_dim, hidden]
    k: W  # [num_kv_heads * head_dim, hidden]
    v: W
    o: W  # [hidden, num_heads * head_dim]
    mlp_norm: W
    gate: W  # [intermediate, hidden]
    up: W
    down: W  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class LlamaWeights(Generic[W]):
    embedding: W  # [vocab, hidden]
    layers: tuple[LlamaLayer[W], ...]
    norm: W
    head: W  # [vocab, hidden]; the embedding itself where it is tied


def forward(ops: Ops[V, W], spec: ModelSpec, weights: LlamaWeights[W]) -> None:
    rotary = Rotary(spec.rope.frequencies(), spec.rope.magnitude())
    x = ops.embed(weights.embedding)
    for i, layer in enumerate(weights.layers):
        shape = AttentionShape(i, spec.num_heads, spec.num_kv_heads, spec.head_dim, 1 / math.sqrt(spec.head_dim))

        h = ops.rms_norm(x, layer.attention_norm, spec.norm_eps)
        q, k, v = ops.linear(h, (layer.q, layer.k, layer.v))
        q, k = ops.rotate(q, k, rotary, shape)
        attended = ops.attention(q, k, v, shape)
        if layer is weights.layers[-1]:  # the last keys and values are written: from here on only logits are wanted
            x, attended = ops.select_rows(x), ops.select_rows(attended)
        (attended,) = ops.linear(attended, (layer.o,))
        x = ops.add(x, attended)

        h = ops.rms_norm(x, layer.mlp_norm, spec.norm_eps)
        gate, up = ops.linear(h, (layer.gate, layer.up))
        (mlp,) = ops.linear(ops.silu_mul(gate, up), (layer.down,))
        x = ops.add(x, mlp)

    ops.head(ops.rms_norm(x, weights.norm, spec.norm_eps), weights.head)
