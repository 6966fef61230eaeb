"""Every kernel x format x instruction set x odd shape, against float64 numpy on exactly the kernel's own inputs.

Bounds are first-order rounding analysis (Higham 2002, section 3.1): a chain of n fused additions into an f32
accumulator errs by at most n * U * sum |terms|, with U = 2^-24. Where the design promises equal bits, equality is
asserted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from headrace import _core
from headrace.backend.reference import contenders
from headrace.ops import CONTENDER_MARGIN, MARGIN_HALVINGS, MAX_CONTENDERS
from headrace.tensor import FORMATS, GROUP, Tensor, from_f32, round_bf16

U = 2.0**-24
ISAS = _core.available_isas()
BLOCK_FORMATS = ("q8_0", "q4_0", "q4_1")
ACT_OF = {"f32": "f32", "f16": "f32", "bf16": "bf16"} | dict.fromkeys(BLOCK_FORMATS, "q8")
ROWS = (1, 2, 3, 4, 5, 15, 16, 17, 33)
COLS = (32, 64, 96, 576)
BATCHES = (1, 2, 3, 5, 8, 13, 33)

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
over_isas = pytest.mark.parametrize("isa", ISAS)
over_formats = pytest.mark.parametrize("fmt", list(FORMATS))


def random(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantized(x: F32) -> tuple[F32, npt.NDArray[np.int32]]:
    """One scale per 32 inputs, the largest magnitude on 127: scales [rows, groups], values [rows, groups, 32]."""
    padded = np.zeros((len(x), -(-x.shape[1] // GROUP) * GROUP), np.float32)
    padded[:, : x.shape[1]] = x
    groups = padded.reshape(len(x), -1, GROUP)
    scales = (np.abs(groups).max(axis=2) / np.float32(127)).astype(np.float32)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    return scales, np.rint(groups * inverse[:, :, None]).astype(np.int32)


def block_parts(weight: Tensor) -> tuple[F64, F64, F64]:
    """Scales and minima [rows, groups], integers [rows, groups, 32] of a block format."""
    blocks = weight.data.reshape(weight.shape[0], -1, weight.format.block_bytes)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16).astype(np.float64)[..., 0]
    if weight.format.name == "q8_0":
        return scales, np.zeros_like(scales), blocks[:, :, 2:].view(np.int8).astype(np.float64)
    packed = blocks[:, :, FORMATS[weight.format.name].block_bytes - GROUP // 2 :]
    nibbles = np.concatenate([packed & 15, packed >> 4], axis=2).astype(np.float64)
    if weight.format.name == "q4_0":
        return scales, np.zeros_like(scales), nibbles - 8
    minima = np.ascontiguousarray(blocks[:, :, 2:4]).view(np.float16).astype(np.float64)[..., 0]
    return scales, minima, nibbles


def expected_gemm(weight: Tensor, x: F32) -> tuple[F64, F64]:
    """x @ Wᵀ in float64 as the format defines it, and the bound on what f32 accumulation may add."""
    if weight.format.name not in BLOCK_FORMATS:
        inputs = (round_bf16(x) if weight.format.name == "bf16" else x).astype(np.float64)
        w = weight.to_f32().astype(np.float64)
        return inputs @ w.T, (x.shape[1] + 1) * U * (np.abs(inputs) @ np.abs(w).T)
    scales, values = quantized(x)
    w_scales, minima, w_values = block_parts(weight)
    sums = np.einsum("mgk,ogk->mog", values.astype(np.float64), w_values)
    products = sums * scales.astype(np.float64)[:, None] * w_scales[None]
    offsets = (scales * values.sum(axis=2)).astype(np.float64)[:, None] * minima[None]
    # two chained sums per group, and the roundings of (weight scale * input scale) and (input scale * sum)
    bound = (2 * sums.shape[2] + 2) * U * (np.abs(products) + np.abs(offsets)).sum(axis=2)
    return (products + offsets).sum(axis=2), bound


def gemm(isa: str, weight: Tensor, x: F32, add: F32 | None = None) -> F32:
    out: F32 = _core.kernel_gemm(isa, weight.format.name, weight.shape[0], weight.data, x, add)
    return out


# Formats ------------------------------------------------------------------------------------------------------------


@over_formats
@over_isas
def test_a_packed_row_unpacks_to_the_exact_values(isa: str, fmt: str) -> None:
    for rows in ROWS:
        for cols in COLS:
            weight = from_f32(random(rows * cols, rows, cols), FORMATS[fmt])
            out = _core.kernel_unpack(isa, fmt, rows, cols, weight.data)
            np.testing.assert_array_equal(out, weight.to_f32())


@over_isas
def test_every_bit_pattern_of_the_half_formats_unpacks_exactly(isa: str) -> None:
    data = np.arange(65536, dtype=np.uint16).view(np.uint8)
    for fmt in ("f16", "bf16"):
        weight = Tensor(data, (64, 1024), FORMATS[fmt])
        np.testing.assert_array_equal(_core.kernel_unpack(isa, fmt, 64, 1024, data), weight.to_f32())


@over_isas
def test_inputs_are_quantized_to_the_nearest_of_255_steps_per_group(isa: str) -> None:
    for cols in (*COLS, 33, 47):
        x = random(cols, 9, cols)
        x[3] = 0
        x[4, :GROUP] = 1e-34  # below what counts: zeros
        x[5] = np.arange(cols) % 254 - 126.5  # ties
        scales, values = quantized(x)
        scales[4, 0], values[4, 0] = 0, 0
        groups = _core.kernel_quantize(isa, "q8", x)[:, : scales.shape[1] * (GROUP + 12)].reshape(9, -1, GROUP + 12)
        tails = np.ascontiguousarray(groups[:, :, GROUP:])
        np.testing.assert_array_equal(groups[:, :, :GROUP].view(np.int8), values)
        np.testing.assert_array_equal(tails.view(np.float32)[:, :, 0], scales)
        np.testing.assert_array_equal(tails.view(np.int32)[:, :, 1], -values.sum(axis=2))
        np.testing.assert_array_equal(tails.view(np.float32)[:, :, 2], scales * values.sum(axis=2).astype(np.float32))


@over_isas
def test_bf16_inputs_are_rounded_to_nearest_even(isa: str) -> None:
    x = random(1, 4, 96)
    x[0, :4] = [np.nan, np.inf, -np.inf, -0.0]
    x[1] = (np.arange(96, dtype=np.uint32) * 0x4000 + 0x3F800000).view(np.float32)  # ties
    x[2] *= 1e-36
    out = _core.kernel_quantize(isa, "bf16", x).view(np.uint16)
    np.testing.assert_array_equal(out, from_f32(x, FORMATS["bf16"]).data.view(np.uint16).reshape(4, 96))


@pytest.mark.parametrize("isa", ISAS)
def test_two_terms_of_8_bits_hold_fifteen(isa: str) -> None:
    x = np.random.default_rng(3).standard_normal((7, 70)).astype(np.float32)
    x[3] = 0

    def decoded(wants_rest: bool) -> F32:
        rows = _core.kernel_quantize(isa, "q8", x, wants_rest)[:, : 3 * (GROUP + 12)].reshape(7, 3, GROUP + 12)
        scales = np.ascontiguousarray(rows[:, :, GROUP : GROUP + 4]).view(np.float32)
        return (rows[:, :, :GROUP].view(np.int8) * scales.astype(np.float64)).reshape(7, -1)[:, :70]

    largest = np.abs(np.pad(x, ((0, 0), (0, 26))).reshape(7, 3, GROUP)).max(axis=2).repeat(GROUP, axis=1)[:, :70]
    # Each term is half a step off at most, and the second's step is the first's error / 127; f32 adds a little.
    assert (np.abs(x - decoded(False)) <= largest / 254 * (1 + 1e-5)).all()
    assert (np.abs(x - decoded(False) - decoded(True)) <= largest / 254**2 * (1 + 1e-2)).all()


# gemm ---------------------------------------------------------------------------------------------------------------


@over_formats
@over_isas
def test_gemm_is_within_the_bound_of_its_accumulator(isa: str, fmt: str) -> None:
    for rows in ROWS:
        for cols in (*COLS, *(() if fmt in BLOCK_FORMATS else (1, 31, 33, 47))):
            weight = from_f32(random(rows + cols, rows, cols), FORMATS[fmt])
            x = random(rows * cols, max(BATCHES), cols)
            expected, bound = expected_gemm(weight, x)
            for batch in BATCHES:
                error = np.abs(gemm(isa, weight, x[:batch]) - expected[:batch])
                assert np.all(error <= bound[:batch]), (rows, cols, batch)


@over_formats
@over_isas
def test_a_row_has_the_same_bits_in_every_batch(isa: str, fmt: str) -> None:
    for rows, cols in ((16, 32), (33, 576), (50, 96)):
        weight = from_f32(random(rows, rows, cols), FORMATS[fmt])
        x = random(cols, 33, cols)
        alone = np.concatenate([gemm(isa, weight, x[i : i + 1]) for i in range(33)])
        for batch in range(2, 34):
            np.testing.assert_array_equal(gemm(isa, weight, x[:batch]), alone[:batch])


@over_formats
@over_isas
def test_how_the_outputs_are_cut_into_calls_changes_no_bit(isa: str, fmt: str) -> None:
    weight = from_f32(random(1, 77, 96), FORMATS[fmt])
    x = random(2, 7, 96)
    whole = gemm(isa, weight, x)
    for tiles_per_call in (1, 2, 3, 4):
        cut = _core.kernel_gemm(isa, fmt, 77, weight.data, x, tiles_per_call=tiles_per_call)
        np.testing.assert_array_equal(cut, whole)


@over_isas
def test_contenders_are_the_tokens_near_the_greatest_logit(isa: str) -> None:
    for vocab in (1, 15, 16, 17, 64, 77, 1000):
        logits = random(vocab, vocab) * 4
        logits[vocab // 3] = -np.inf
        logits[vocab // 2] = np.nan if vocab > 1 else 0
        for margin in (0.0, 1.0, 3.0, 1000.0):
            expected = np.flatnonzero(logits >= np.nanmax(logits) - np.float32(margin))
            assert _core.kernel_find_contenders(isa, logits, margin, vocab) == expected.tolist()


@over_isas
def test_of_many_contenders_those_nearest_to_the_greatest_are_taken_or_none(isa: str) -> None:
    logits = random(1000, 5) * 4
    for most in (0, 1, 2, 5, 40, 300, 1000):
        expected = np.flatnonzero(contenders(logits, 3.0, most))
        assert len(expected) <= most
        assert _core.kernel_find_contenders(isa, logits, 3.0, most) == expected.tolist()
    assert 1 < contenders(logits, 3.0, 5).sum() <= 5  # and not none of them
    assert _core.kernel_find_contenders(isa, np.zeros(1000, np.float32), 3.0, 999) == []


@over_isas
def test_a_row_without_a_number_has_no_contenders(isa: str) -> None:
    assert _core.kernel_find_contenders(isa, np.full(40, np.nan, np.float32), 3.0, 40) == []


def test_the_core_and_the_oracle_agree_on_who_contends() -> None:
    assert (_core.CONTENDER_MARGIN, _core.MAX_CONTENDERS, _core.MARGIN_HALVINGS) == (
        CONTENDER_MARGIN,
        MAX_CONTENDERS,
        MARGIN_HALVINGS,
    )


@pytest.mark.parametrize("fmt", [name for name in FORMATS if name != "bf16"])
def test_gemm_has_the_same_bits_on_every_instruction_set(fmt: str) -> None:
    for rows, cols in ((16, 32), (33, 576), (5, 96)):
        weight = from_f32(random(rows, rows, cols), FORMATS[fmt])
        x = random(cols, 13, cols)
        reference = gemm("scalar", weight, x)
        for isa in ISAS:
            np.testing.assert_array_equal(gemm(isa, weight, x), reference)


@over_formats
@over_isas
def test_a_residual_joins_after_the_sum_is_complete(isa: str, fmt: str) -> None:
    weight = from_f32(random(1, 21, 64), FORMATS[fmt])
    x, residual = random(2, 5, 64), random(3, 5, 21)
    np.testing.assert_array_equal(gemm(isa, weight, x, residual), residual + gemm(isa, weight, x))


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
@over_isas
def test_extreme_weights_and_inputs_do_not_saturate(isa: str, fmt: str) -> None:
    block_bytes, scale_bytes = FORMATS[fmt].block_bytes, 4 if fmt == "q4_1" else 2
    for byte in (0x00, 0x80, 0x7F, 0xFF, 0x88, 0x0F, 0xF0):
        blocks = np.full((17 * 3, block_bytes), byte, np.uint8)
        blocks[:, :scale_bytes] = np.ones(scale_bytes // 2, np.float16).view(np.uint8)
        weight = Tensor(blocks.reshape(-1), (17, 96), FORMATS[fmt])
        for sign in (-127, 127):
            x = np.full((3, 96), sign, np.float32)  # scale 1: every step below is an integer in f32
            np.testing.assert_array_equal(gemm(isa, weight, x), expected_gemm(weight, x)[0])


@over_formats
@over_isas
def test_zeros_give_zeros_and_damage_is_seen_in_its_own_row_alone(isa: str, fmt: str) -> None:
    weight = from_f32(random(1, 20, 64), FORMATS[fmt])
    x = random(2, 5, 64)
    clean = gemm(isa, weight, x)
    x[1], x[2, 40], x[3, 7] = 0, np.nan, np.inf
    out = gemm(isa, weight, x)
    np.testing.assert_array_equal(out[1], np.zeros(20))
    assert np.all(np.isnan(out[2]))
    assert not np.any(np.isfinite(out[3]))
    np.testing.assert_array_equal(out[[0, 4]], clean[[0, 4]])


# Rows ---------------------------------------------------------------------------------------------------------------


@over_isas
def test_rms_norm_is_within_its_bound_and_equal_on_every_instruction_set(isa: str) -> None:
    for width in (1, 15, 16, 17, 64, 100, 576, 4096):
        x, weight = random(width, 3, width), random(width + 1, width)
        out = _core.kernel_rms_norm(isa, x, weight, 1e-5)
        wide = x.astype(np.float64)
        expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + np.float32(1e-5)) * weight
        # half of the sum's error under the root, then mean, eps, root, quotient and two products
        assert np.all(np.abs(out - expected) <= ((width / 16 + 5) / 2 + 6) * U * np.abs(expected))
        np.testing.assert_array_equal(out, _core.kernel_rms_norm("scalar", x, weight, 1e-5))


@over_isas
def test_silu_mul_is_within_eight_roundings_and_equal_on_every_instruction_set(isa: str) -> None:
    gate = np.concatenate([np.linspace(-86, 86, 20011), [-0.0, 0.0, -1e-30, 500.0]]).astype(np.float32)
    up = random(1, len(gate))
    out = _core.kernel_silu_mul(isa, gate, up)
    expected = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64))) * up
    assert np.all(np.abs(out - expected) <= 8 * U * np.abs(expected))
    np.testing.assert_array_equal(out, _core.kernel_silu_mul("scalar", gate, up))


@over_isas
def test_silu_mul_goes_to_zero_below_and_passes_nan(isa: str) -> None:
    out = _core.kernel_silu_mul(isa, np.float32([-120, -3e38, np.nan, 3e38]), np.ones(4, np.float32))
    np.testing.assert_array_equal(out, np.float32([0, 0, np.nan, 3e38]))


@pytest.mark.parametrize("act", ["f32", "bf16", "q8", "q8's rest"])
@over_isas
def test_rows_quantized_where_they_are_computed_have_the_bits_of_stored_ones(isa: str, act: str) -> None:
    form = (act.removesuffix("'s rest"), act.endswith("rest"))
    for width in (1, 31, 33, 64, 96, 130, 576, 1100):
        x, y = random(width, 4, width), random(width + 1, 4, width)
        x[1, -1], x[2, width // 2], y[3] = np.inf, np.nan, 1e-32
        normed = _core.kernel_rms_norm(isa, x, y[0], 1e-5)
        gated = np.stack([_core.kernel_silu_mul(isa, *rows) for rows in zip(x, y, strict=True)])
        np.testing.assert_array_equal(
            _core.kernel_quantize_norm(isa, form[0], x, y[0], 1e-5, form[1]),
            _core.kernel_quantize(isa, form[0], normed, form[1]),
        )
        quantized_gate = _core.kernel_quantize_gated(isa, form[0], x, y, form[1])
        np.testing.assert_array_equal(quantized_gate, _core.kernel_quantize(isa, form[0], gated, form[1]))
        np.testing.assert_array_equal(quantized_gate, _core.kernel_quantize_gated("scalar", form[0], x, y, form[1]))


@over_isas
def test_a_group_with_an_infinity_or_nan_is_marked_and_no_other(isa: str) -> None:
    x = random(1, 2, 9 * GROUP)
    for group, damage in ((1, np.inf), (3, np.nan), (4, -np.inf), (8, np.nan)):
        x[1, group * GROUP + 5] = damage
        x[1, group * GROUP + 20] = damage
    for wants_rest in (False, True):
        rows = _core.kernel_quantize(isa, "q8", x, wants_rest)[:, : 9 * (GROUP + 12)].reshape(2, 9, GROUP + 12)
        scales = np.ascontiguousarray(rows[:, :, GROUP : GROUP + 4]).view(np.float32)[:, :, 0]
        sums = np.ascontiguousarray(rows[:, :, GROUP + 4 : GROUP + 8]).view(np.int32)[:, :, 0]
        assert np.flatnonzero(np.isnan(scales[1])).tolist() == [1, 3, 4, 8]
        assert not rows[1, [1, 3, 4, 8], :GROUP].any() and not sums[1, [1, 3, 4, 8]].any()
        assert not np.isnan(scales[0]).any()


@over_isas
def test_rotary_angles_are_within_two_roundings_however_far_and_equal_on_every_instruction_set(isa: str) -> None:
    for pairs in (1, 16, 20, 64):
        turns = 100000.0 ** (-np.arange(pairs) / pairs) * 2 / np.pi
        for position in (0, 1, 2, 3, 8191, 1_000_003):
            out = _core.kernel_rotary(isa, turns, position, 0.75)
            angles = position * turns * (np.pi / 2)
            expected = 0.75 * np.stack([np.cos(angles), np.sin(angles)])
            assert np.all(np.abs(out - expected) <= 2 * U + 1e-15 * position)  # the angle's own rounding, far out
            np.testing.assert_array_equal(out, _core.kernel_rotary("scalar", turns, position, 0.75))


@over_isas
def test_add_is_exact_addition(isa: str) -> None:
    for width in (1, 16, 17, 100):
        x, y = random(1, width), random(2, width)
        np.testing.assert_array_equal(_core.kernel_add(isa, x, y), x + y)


@over_isas
def test_rotate_turns_pairs_and_leaves_the_rest(isa: str) -> None:
    for head_dim, pairs in ((16, 8), (64, 32), (64, 5), (80, 20), (128, 64)):
        x, angle = random(head_dim, 3, head_dim), random(pairs, pairs) * 100
        cosines, sines = np.cos(angle), np.sin(angle)
        out = _core.kernel_rotate(isa, x, cosines, sines)
        a, b = x[:, :pairs].astype(np.float64), x[:, pairs : 2 * pairs].astype(np.float64)
        bound = 2 * U * (np.abs(a) + np.abs(b))
        assert np.all(np.abs(out[:, :pairs] - (a * cosines - b * sines)) <= bound)
        assert np.all(np.abs(out[:, pairs : 2 * pairs] - (b * cosines + a * sines)) <= bound)
        np.testing.assert_array_equal(out[:, 2 * pairs :], x[:, 2 * pairs :])
        np.testing.assert_array_equal(_core.kernel_rotate(isa, x, cosines, sines, in_place=True), out)
        np.testing.assert_array_equal(out, _core.kernel_rotate("scalar", x, cosines, sines))


# Attention ----------------------------------------------------------------------------------------------------------

over_kv_types = pytest.mark.parametrize("kv_type", ["bf16", "f32"])


class Sequence:
    """Queries, keys and values of a sequence of `length` tokens, and scattered blocks to keep them in."""

    def __init__(self, length: int, num_kv_heads: int, heads_per_kv: int, head_dim: int) -> None:
        seed = length * 7919 + head_dim + heads_per_kv
        self.queries = random(seed, length, num_kv_heads * heads_per_kv, head_dim) * 2
        self.keys = random(seed + 1, length, num_kv_heads, head_dim)
        self.values = random(seed + 2, length, num_kv_heads, head_dim)
        self.blocks = np.random.default_rng(seed).permutation(-(-length // 16) + 3).astype(np.int32)
        self.scale = float(np.float32(head_dim**-0.5))

    def attend(self, isa: str, kv_type: str, first: int, end: int, *, stored: int | None = None, **options: Any) -> F32:
        """Attention of tokens [first, end), with the keys and values of the first `stored` tokens in their blocks."""
        stored = end if stored is None else stored
        blocks = options.pop("blocks", self.blocks)
        out: F32 = _core.kernel_attend(
            isa,
            kv_type,
            self.queries[first:end],
            self.keys[:stored],
            self.values[:stored],
            blocks,
            first,
            self.scale,
            **options,
        )
        return out.reshape(end - first, *self.queries.shape[1:])

    def expected(self, kv_type: str, first: int, end: int) -> tuple[F64, F64]:
        """Softmax attention in float64 on the rounded inputs, and its error bound."""
        rounded = [round_bf16(x) if kv_type == "bf16" else x for x in (self.queries, self.keys, self.values)]
        heads_per_kv = self.queries.shape[1] // self.keys.shape[1]
        q, k, v = (x.astype(np.float64) for x in rounded)
        k, v = (np.repeat(x[:end], heads_per_kv, axis=1) for x in (k, v))
        q, scale = q[first:end], np.float64(self.scale)
        scores = np.einsum("qhd,khd->hqk", q, k) * scale
        scores[:, np.arange(first, end)[:, None] < np.arange(end)[None]] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        # a score's error is a relative error of its probability; both the one and the sum of all carry it
        score_error = (q.shape[2] + 2) * U * (np.einsum("qhd,khd->hqk", np.abs(q), np.abs(k)) * scale).max()
        p_error = 2.0**-8 if kv_type == "bf16" else 0.0
        magnitude = np.einsum("hqk,khd->qhd", weights, np.abs(v))
        return np.einsum("hqk,khd->qhd", weights, v), (p_error + 2 * score_error + (2 * end + 16) * U) * magnitude


@over_kv_types
@over_isas
def test_attention_is_within_its_bound(isa: str, kv_type: str) -> None:
    shapes = [(1, 1, 1, 16), (17, 2, 3, 64), (64, 1, 4, 32), (65, 3, 3, 64), (130, 1, 5, 80), (100, 2, 2, 112)]
    shapes += [(70, 1, 16, 48), (513, 1, 2, 128), (90, 1, 1, 256), (1030, 1, 3, 64)]
    for shape in shapes:
        sequence = Sequence(*shape)
        length = shape[0]
        first = max(0, length - 70)
        expected, bound = sequence.expected(kv_type, first, length)
        error = np.abs(sequence.attend(isa, kv_type, first, length) - expected)
        assert np.all(error <= bound), (shape, (error / bound).max())


@over_kv_types
@over_isas
def test_a_query_has_the_same_bits_alone_and_among_others(isa: str, kv_type: str) -> None:
    for shape in ((140, 1, 3, 64), (90, 2, 1, 16), (75, 1, 9, 32), (530, 1, 4, 48)):
        sequence = Sequence(*shape)
        length = shape[0]
        first = max(0, length - 90)
        together = sequence.attend(isa, kv_type, first, length)
        for queries_per_call in (1, 2, 7, 64):
            apart = sequence.attend(isa, kv_type, first, length, queries_per_call=queries_per_call)
            np.testing.assert_array_equal(apart, together)


@over_kv_types
@over_isas
def test_a_context_of_many_segments_ends_anywhere(isa: str, kv_type: str) -> None:
    sequence = Sequence(4200, 1, 3, 16)
    for end in (255, 256, 257, 512, 513, 4096, 4097, 4200):
        first = max(0, end - 3)
        expected, bound = sequence.expected(kv_type, first, end)
        together = sequence.attend(isa, kv_type, first, end)
        assert np.all(np.abs(together - expected) <= bound), end
        np.testing.assert_array_equal(sequence.attend(isa, kv_type, first, end, queries_per_call=1), together)


@over_kv_types
@over_isas
def test_tokens_after_a_query_and_unused_slots_do_not_matter(isa: str, kv_type: str) -> None:
    sequence = Sequence(131, 1, 3, 64)
    later = sequence.attend(isa, kv_type, 0, 131)
    for end in (1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 130):
        for garbage in (0xFF, 0x7F, 0x00):  # NaN, huge, zero
            alone = sequence.attend(isa, kv_type, end - 1, end, garbage=garbage)
            np.testing.assert_array_equal(alone[0], later[end - 1])


@over_kv_types
@over_isas
def test_damaged_keys_of_later_tokens_do_not_reach_earlier_queries(isa: str, kv_type: str) -> None:
    sequence = Sequence(40, 1, 2, 32)
    clean = sequence.attend(isa, kv_type, 0, 40)
    sequence.keys[21:], sequence.values[21:] = np.nan, np.inf
    np.testing.assert_array_equal(sequence.attend(isa, kv_type, 0, 40)[:21], clean[:21])


@over_kv_types
@over_isas
def test_where_the_blocks_lie_does_not_matter(isa: str, kv_type: str) -> None:
    sequence = Sequence(100, 2, 2, 64)
    scattered = sequence.attend(isa, kv_type, 60, 100)
    in_order = sequence.attend(isa, kv_type, 60, 100, blocks=np.arange(7, dtype=np.int32))
    np.testing.assert_array_equal(in_order, scattered)


def test_f32_attention_has_the_same_bits_on_every_instruction_set() -> None:
    for shape in ((140, 1, 3, 64), (75, 2, 5, 80), (530, 1, 1, 16)):
        sequence = Sequence(*shape)
        reference = sequence.attend("scalar", "f32", shape[0] - 70, shape[0])
        for isa in ISAS:
            np.testing.assert_array_equal(sequence.attend(isa, "f32", shape[0] - 70, shape[0]), reference)


@over_isas
def test_large_scores_do_not_overflow(isa: str) -> None:
    sequence = Sequence(200, 1, 2, 64)
    sequence.queries *= 1000
    out = sequence.attend(isa, "f32", 0, 200)
    expected, _ = sequence.expected("f32", 0, 200)
    # scores near 10^4 are off by 10^4 * U * 66: each probability by up to 4 %, and all but one are near 0
    np.testing.assert_allclose(out, expected, atol=0.1)


@over_kv_types
@over_isas
@pytest.mark.parametrize("size", [1e4, 3e9, 1e16, -1e16])
def test_scores_of_any_size_that_are_equal_weigh_the_same(isa: str, kv_type: str, size: float) -> None:
    sequence = Sequence(130, 1, 2, 64)
    sequence.keys[:] = 1
    sequence.queries[:] = size
    means, _ = sequence.expected(kv_type, 60, 130)
    np.testing.assert_allclose(sequence.attend(isa, kv_type, 60, 130), means, atol=2.0**-8)


@over_isas
def test_shapes_are_checked_at_the_border(isa: str) -> None:
    weight = from_f32(random(1, 4, 64), FORMATS["q8_0"])
    with pytest.raises(ValueError, match="data must hold"):
        _core.kernel_gemm(isa, "q8_0", 5, weight.data, random(1, 1, 64))
    with pytest.raises(ValueError, match="whole blocks"):
        _core.kernel_gemm(isa, "q8_0", 4, weight.data, random(1, 1, 48))
    with pytest.raises(ValueError, match="q5_0"):
        _core.kernel_gemm(isa, "q5_0", 4, weight.data, random(1, 1, 64))
    with pytest.raises(ValueError, match="head_dim"):
        Sequence(4, 1, 1, 24).attend(isa, "f32", 0, 4)
