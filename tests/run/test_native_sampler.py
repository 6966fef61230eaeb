"""The native sampler draws what the definition draws, on every instruction set, for any logits and parameters."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_columns import ISAS, draw_natively, pack_mask, sampling_rows

from headrace import _core
from headrace.ops import F32, RowResults, SamplingRows
from headrace.run.sampler import sample_rows
from headrace.types import MAX_LOGPROBS

SPECIAL = np.array([0, -0.0, 1e-40, -1e-40, 1e-38, 1, -1, 3e38, -3e38, math.nan, math.inf, -math.inf], np.float32)


def random_logits(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> F32:
    kinds = {
        "wide": lambda: rng.normal(0, 5, shape),
        "model-like": lambda: rng.normal(10, 2.5, shape),
        "flat": lambda: rng.normal(0, 0.01, shape),
        "equal": lambda: np.zeros(shape),
        "ties": lambda: rng.integers(-4, 4, shape),
        "sparse": lambda: np.where(rng.random(shape) < 0.95, -math.inf, rng.normal(0, 1, shape)),
        "special": lambda: rng.choice(SPECIAL, shape),
    }
    return kinds[kind]().astype(np.float32)


def random_rows(rng: np.random.Generator, num_rows: int, vocab: int) -> SamplingRows:
    def one_of(*values: float) -> np.ndarray:
        return rng.choice(values, num_rows)

    histories = [list(rng.integers(0, vocab, n)) for n in one_of(0, 0, 1, 10, 500)]
    biases = [
        list(zip(rng.integers(0, vocab, n), rng.choice([1, -1, 5.5, 100, -100, -math.inf], n), strict=True))
        for n in one_of(0, 0, 1, 5, 100)
    ]
    return sampling_rows(
        num_rows,
        targets=np.where(rng.random(num_rows) < 0.1, rng.integers(0, vocab, num_rows), -1),
        positions=rng.integers(0, 2**31 - 1, num_rows),
        seeds=rng.integers(0, 2**64, num_rows, np.uint64),
        choices=rng.integers(0, 100, num_rows),
        temperature=one_of(0, 1e-40, 1e-5, 1e-3, 0.1, 0.7, 1, 1, 1.5, 100),
        top_k=one_of(0, 0, 1, 2, 5, 40, 1000, 2**31 - 1),
        top_p=one_of(1, 1, 0.9, 0.5, 0.1, 1e-30, 0.99, 0.9999999),
        min_p=one_of(0, 0, 0.05, 1e-30, 0.5, 1),
        repetition_penalty=one_of(1, 1, 1.1, 0.5, 100, 1e-40),
        presence_penalty=one_of(0, 0, 0.5, -2, 2),
        frequency_penalty=one_of(0, 0, 0.5, -2, 2),
        num_top=one_of(-1, -1, 0, 1, 5, MAX_LOGPROBS),  # also more than a small vocabulary has
        history=histories,
        bias=biases,
        num_prompt=[rng.integers(0, len(history) + 1) for history in histories],
    )


def check_equal(native: RowResults, definition: RowResults) -> None:
    """The same tokens; logprobs to a part in a million (sums of f32 exponentials against f64)."""
    assert native.tokens == definition.tokens
    assert (native.scores is None) == (definition.scores is None)
    if native.scores is not None:
        np.testing.assert_array_equal(native.scores.top_ids, definition.scores.top_ids)
        for name in ("logprobs", "top_logprobs"):
            ours, theirs = getattr(native.scores, name), getattr(definition.scores, name)
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["wide", "model-like", "flat", "equal", "ties", "sparse", "special"])
def test_native_draws_are_the_definitions_on_every_instruction_set(kind: str) -> None:
    # Scores nearer to each other than f32 resolves may be drawn otherwise: about one row in a million, none of these.
    rng = np.random.default_rng(0)
    for vocab in (1, 15, 64, 65, 100, 257, 1000, 1023):
        logits, rows = random_logits(rng, kind, (60, vocab)), random_rows(rng, 60, vocab)
        mask = pack_mask(rng.random((60, vocab)) < 0.7) if vocab % 2 else None
        definition = sample_rows(logits, rows, mask)
        for isa in ISAS:
            check_equal(draw_natively(isa, logits, rows, mask), definition)


@pytest.mark.parametrize("kind", ["wide", "model-like", "flat", "equal", "ties"])
@pytest.mark.parametrize(
    "columns", [{"top_p": [0.1, 0.9, 0.999]}, {"top_k": [1, 50, 40_000]}, {"min_p": 0.01}], ids=str
)
def test_native_survivors_are_the_definitions_in_a_large_vocabulary(kind: str, columns: dict[str, float]) -> None:
    rng = np.random.default_rng(1)
    logits = random_logits(rng, kind, (3, 49_152))
    rows = sampling_rows(3, seeds=rng.integers(0, 2**63, 3), num_top=20, **columns)
    check_equal(draw_natively(ISAS[0], logits, rows), sample_rows(logits, rows))


def test_every_instruction_set_gives_the_same_bits() -> None:
    rng = np.random.default_rng(2)
    for kind in ("wide", "special"):
        logits, rows = random_logits(rng, kind, (100, 777)), random_rows(rng, 100, 777)
        results = [draw_natively(isa, logits, rows) for isa in ISAS]
        assert all(result.tokens == results[0].tokens for result in results)
        for columns in zip(*(result.scores for result in results), strict=True):
            assert len({column.tobytes() for column in columns}) == 1


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.floats(0, 100, width=32) | st.sampled_from([1e-5, 1e-40]),
        "top_k": st.integers(0, 2**31 - 1) | st.integers(0, 70),
        "top_p": st.floats(2.0**-149, 1, width=32),
        "min_p": st.floats(0, 1, width=32),
        "repetition_penalty": st.floats(2.0**-149, 100, width=32),
        "presence_penalty": st.floats(-2, 2, width=32),
        "frequency_penalty": st.floats(-2, 2, width=32),
        "seeds": st.integers(0, 2**64 - 1),
        "positions": st.integers(0, 2**31 - 2),
        "choices": st.integers(0, 2**31 - 2),
        "num_top": st.integers(-1, 1),
    }
)
LOGITS = st.lists(st.floats(-50, 50, width=32) | st.floats(width=32), min_size=1, max_size=70)


@settings(max_examples=300, deadline=None, derandomize=True)  # so that no near tie is ever met by chance
@given(params=PARAMS, logits=LOGITS, data=st.data())
def test_native_draws_are_the_definitions_for_any_parameters(params: dict, logits: list[float], data) -> None:
    tokens = st.integers(0, len(logits) - 1)
    history = data.draw(st.lists(tokens, max_size=20))
    bias = data.draw(st.lists(st.tuples(tokens, st.floats(-100, 100, width=32)), max_size=5))
    num_prompt = data.draw(st.integers(0, len(history)))
    rows = sampling_rows(1, history=[history], bias=[bias], num_prompt=num_prompt, **params)
    raw = np.array([logits], np.float32)
    for isa in ISAS:
        check_equal(draw_natively(isa, raw, rows), sample_rows(raw, rows))


# The border


def test_arrays_of_the_wrong_shape_are_refused() -> None:
    logits, rows = np.zeros((2, 40), np.float32), sampling_rows(2)
    columns = tuple(rows)
    with pytest.raises(ValueError, match="differ in rows"):
        _core.sample(ISAS[0], logits[:1], columns, None)
    with pytest.raises(ValueError, match="18 columns"):
        _core.sample(ISAS[0], logits, columns[:-1], None)
    with pytest.raises(ValueError, match="mask must have a bit for every logit"):
        _core.sample(ISAS[0], logits, columns, np.zeros((2, 1), np.uint32))
    with pytest.raises(ValueError, match="contiguous"):
        _core.sample(ISAS[0], np.zeros((40, 2), np.float32).T, columns, None)
    with pytest.raises(ValueError, match="no kernels for"):
        _core.sample("abacus", logits, columns, None)
    with pytest.raises(ValueError, match="4 words"):
        _core.philox(np.zeros(3, np.uint32), 0)


@pytest.mark.parametrize("name", ["targets", "bias_ids", "history"])
@pytest.mark.parametrize("token", [40, -2])
def test_tokens_outside_of_the_vocabulary_are_refused(name: str, token: int) -> None:
    rows = sampling_rows(1, bias=[[(0, 1)]], history=[[0]])._replace(**{name: np.array([token], np.int32)})
    with pytest.raises(ValueError, match=name):
        draw_natively(ISAS[0], np.zeros((1, 40), np.float32), rows)
