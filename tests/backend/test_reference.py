"""The reference backend, against a whole tiny Llama written again in a few lines of float64."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.backend.reference import ReferenceBackend, round_q8
from headrace.run.sampler import sample_rows
from tiny_weights import BLOCK_SIZE, Part, TinySpec, batch_of


def float64_logits(spec: TinySpec, tokens: list[int]) -> np.ndarray:
    """Logits after every token of one sequence: [len(tokens), vocab]."""
    weights, frequencies = spec.weights(), np.array(spec.model().rope.frequencies())
    n, dim, groups = len(tokens), spec.head_dim, spec.num_heads // spec.num_kv_heads
    angles = np.arange(n)[:, None, None] * frequencies
    pairs = len(frequencies)

    def get(tensor):
        return tensor.to_f32().astype(np.float64)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + spec.model().norm_eps) * get(weight)

    def rotate(x):
        a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * pairs :]], axis=-1)

    x = get(weights.embedding)[tokens]
    for layer in weights.layers:
        h = norm(x, layer.attention_norm)
        q, k = (rotate((h @ get(w).T).reshape(n, -1, dim)) for w in (layer.q, layer.k))
        v = (h @ get(layer.v).T).reshape(n, -1, dim)
        heads = []
        for head in range(spec.num_heads):
            scores = q[:, head] @ k[:, head // groups].T / np.sqrt(dim)
            scores[np.triu_indices(n, 1)] = -np.inf
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(p / p.sum(axis=1, keepdims=True) @ v[:, head // groups])
        x = x + np.concatenate(heads, axis=1) @ get(layer.o).T
        h = norm(x, layer.mlp_norm)
        gate, up = h @ get(layer.gate).T, h @ get(layer.up).T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ get(layer.down).T
    return norm(x, weights.norm) @ get(weights.head).T


def backend(spec: TinySpec, *, is_exact: bool = True, num_blocks: int = 16) -> ReferenceBackend:
    return ReferenceBackend(
        spec.forward(),
        spec.weights(),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        sampler=sample_rows,
        is_exact=is_exact,
    )


TOKENS = np.random.default_rng(5).integers(0, 77, 50).tolist()


@pytest.mark.parametrize(
    "spec",
    [
        TinySpec("f32"),
        TinySpec("q4_1", num_heads=4, num_kv_heads=1, rotary_dim=8),
        TinySpec("bf16", num_heads=2, num_kv_heads=2, head_dim=48, is_tied=False),
    ],
    ids=["grouped", "one-kv-head-partial-rotary", "untied"],
)
def test_exact_logits_are_those_of_float64(spec: TinySpec) -> None:
    ours = backend(spec).logits(batch_of([Part(TOKENS, 0, [3, 0, 7, 5], num_rows=len(TOKENS))]))
    # f32 rounding through 2 layers of sums of at most 96 terms; logits reach 10
    np.testing.assert_allclose(ours, float64_logits(spec, TOKENS), atol=2e-4)


def test_a_sequence_fed_in_chunks_beside_others_gives_the_same_logits() -> None:
    spec = TinySpec("f32")
    once = backend(spec).logits(batch_of([Part(TOKENS, 0, [0, 1, 2, 3], num_rows=len(TOKENS))]))
    chunked = backend(spec)
    other = Part(TOKENS[::-1], 0, [12, 11, 10, 9])
    first = chunked.logits(batch_of([other, Part(TOKENS[:17], 0, [6, 2, 1, 8], num_rows=17)]))
    second = chunked.logits(batch_of([Part(TOKENS[17:], 17, [6, 2, 1, 8], num_rows=33)]))
    np.testing.assert_allclose(np.concatenate([first[1:], second]), once, atol=1e-4)


def test_fast_precision_differs_from_exact_by_rounding_and_not_by_more() -> None:
    spec = TinySpec("q8_0")
    batch = batch_of([Part(TOKENS, 0, [0, 1, 2, 3], num_rows=len(TOKENS))])
    fast, exact = backend(spec, is_exact=False).logits(batch), backend(spec).logits(batch)
    error = np.abs(fast - exact).mean() / exact.std()
    # 8 bits of absmax over 32 inputs: about 1/127/sqrt(12)*3 = 0.7 % per product, a few of which add up
    assert 0.001 < error < 0.05


def test_q8_rounding_is_within_half_a_step_of_each_groups_absmax() -> None:
    x = np.random.default_rng(0).standard_normal((5, 70)).astype(np.float32)
    rounded = round_q8(x)
    for begin in (0, 32, 64):
        group = x[:, begin : begin + 32]
        step = np.abs(group).max(axis=1, keepdims=True) / 127
        assert (np.abs(rounded[:, begin : begin + 32] - group) <= step * 0.5001).all()
    np.testing.assert_array_equal(round_q8(np.zeros((2, 32), np.float32)), 0)


def test_a_batch_without_rows_runs_and_gives_nothing() -> None:
    results = backend(TinySpec("f32")).run(batch_of([Part(TOKENS[:5], 0, [0], num_rows=0)]))
    assert len(results.tokens) == 0
