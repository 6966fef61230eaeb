"""Draws against the exact distribution, and noise against what noise must be. Seeds are fixed, nothing is flaky."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from sampling_columns import ISAS, draw_many, draw_natively, pack_mask, sampling_rows

from headrace.run.sampler import NOISE_DOMAIN, gumbel, philox

NUM_DRAWS = 40_000
P = (0.3, 0.1, 0.4, 0.15, 0.05)


def critical_chi_square(freedom: int) -> float:
    """Exceeded with probability 1e-4 (Wilson and Hilferty 1931)."""
    quantile, variance = 3.719, 2 / (9 * freedom)
    return freedom * (1 - variance + quantile * math.sqrt(variance)) ** 3


def check_distribution(tokens: npt.NDArray[np.int32], probabilities: npt.ArrayLike) -> None:
    p = np.asarray(probabilities, float) / np.sum(probabilities)
    counts = np.bincount(tokens, minlength=len(p))
    assert len(counts) == len(p)
    assert not counts[p == 0].any()
    expected = len(tokens) * p[p > 0]
    assert expected.min() > 5  # below, chi-square is no approximation
    assert ((counts[p > 0] - expected) ** 2 / expected).sum() < critical_chi_square(len(expected) - 1)


@pytest.mark.parametrize("varied", ["seeds", "positions", "choices"])
def test_draws_follow_the_softmax_whichever_part_of_the_key_varies(varied: str) -> None:
    columns = {"seeds": 7, "positions": 7, "choices": 7} | {varied: np.arange(NUM_DRAWS)}
    check_distribution(draw_many(np.log(P), NUM_DRAWS, **columns), P)


@pytest.mark.parametrize(
    ("columns", "probabilities"),
    [
        ({"temperature": 0.5}, np.square(P)),
        ({"temperature": 2}, np.sqrt(P)),
        ({"top_k": 3}, (0.3, 0, 0.4, 0.15, 0)),
        ({"top_p": 0.69}, (0.3, 0, 0.4, 0, 0)),
        ({"min_p": 0.2}, (0.3, 0.1, 0.4, 0.15, 0)),
        ({"top_k": 4, "top_p": 0.8, "min_p": 0.3}, (0.3, 0, 0.4, 0.15, 0)),
        ({"temperature": 0.5, "top_p": 0.9}, (0.09, 0, 0.16, 0.0225, 0)),  # top_p is of the tempered distribution
        ({"bias": [[(1, math.log(3))]]}, (0.3, 0.3, 0.4, 0.15, 0.05)),
        ({"presence_penalty": math.log(2), "history": [[2, 0, 0]], "num_prompt": 1}, (0.15, 0.1, 0.4, 0.15, 0.05)),
        ({"frequency_penalty": math.log(2), "history": [[2, 0, 0]]}, (0.075, 0.1, 0.2, 0.15, 0.05)),
        ({"repetition_penalty": 2, "history": [[1]], "num_prompt": 1}, (0.3, 0.01, 0.4, 0.15, 0.05)),  # log p < 0
    ],
)
def test_draws_follow_the_exact_distribution_of_each_parameter(
    columns: dict[str, float], probabilities: npt.ArrayLike
) -> None:
    check_distribution(draw_many(np.log(P), NUM_DRAWS, **columns), probabilities)


def test_every_token_of_a_flat_vocabulary_is_as_likely() -> None:
    check_distribution(draw_many(np.zeros(300), NUM_DRAWS), np.ones(300))


def test_tokens_of_small_probability_get_their_share() -> None:
    rare = np.full(2000, 1e-5)  # together as likely as 1 in 51
    tokens = draw_many(np.log([1.0, *rare]), NUM_DRAWS)
    check_distribution((tokens > 0).astype(np.int32), (1, rare.sum()))


@pytest.mark.parametrize("isa", ISAS)
def test_forbidding_tokens_that_were_not_drawn_changes_no_draw(isa: str) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (2000, 150)).astype(np.float32)
    rows = sampling_rows(2000, seeds=rng.integers(0, 2**63, 2000), positions=np.arange(2000))
    drawn = np.array(draw_natively(isa, logits, rows).tokens)
    allowed = rng.random(logits.shape) < 0.3
    allowed[np.arange(2000), drawn] = True
    assert draw_natively(isa, logits, rows, pack_mask(allowed)).tokens == drawn.tolist()


@pytest.mark.parametrize("isa", ISAS)
def test_narrowing_the_survivors_changes_a_draw_only_if_it_is_dropped(isa: str) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 1, (2000, 150)).astype(np.float32)
    drawn = np.array(draw_natively(isa, logits, sampling_rows(2000, seeds=np.arange(2000))).tokens)
    narrowed = np.array(draw_natively(isa, logits, sampling_rows(2000, seeds=np.arange(2000), top_k=20)).tokens)
    rank = (logits > logits[np.arange(2000), drawn][:, None]).sum(1)
    assert (narrowed[rank < 20] == drawn[rank < 20]).all()
    assert (narrowed[rank >= 20] != drawn[rank >= 20]).all()
    assert 200 < (rank < 20).sum() < 1800


def test_a_row_is_drawn_alike_wherever_it_stands_in_the_batch() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 3, (50, 500)).astype(np.float32)
    columns = {"seeds": rng.integers(0, 2**63, 50), "positions": rng.integers(0, 2**31 - 1, 50)}
    together = draw_natively(ISAS[0], logits, sampling_rows(50, **columns)).tokens
    alone = [
        draw_natively(ISAS[0], logits[r : r + 1], sampling_rows(1, **{k: v[r] for k, v in columns.items()})).tokens[0]
        for r in range(50)
    ]
    assert list(together) == alone


# The noise itself


def test_noise_is_the_word_that_the_docstring_names() -> None:
    seed, choice, position, token = 0x0123456789ABCDEF, 3, 1000, 64 * 5 + 16 * 2 + 7
    counter = np.array([position, 5 * 16 + 7, choice, NOISE_DOMAIN], np.uint32)
    u = 1 - (int(philox(counter, seed)[2]) + 0.5) / 2**32
    np.testing.assert_allclose(gumbel(seed, choice, position, [token]), [-math.log(-math.log(u))], rtol=1e-9)


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    noise = gumbel(1, 0, 0, np.arange(100_000))
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - 0.577216) < 0.02
    assert abs(noise.var() - math.pi**2 / 6) < 0.05


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 2},
        {"seed": 1 + 2**32},
        {"choice": 1},
        {"position": 1},
        {"first": 1},
        {"first": 16},
        {"first": 64},
    ],
    ids=str,
)
def test_noise_of_another_key_position_or_token_is_independent(other: dict[str, int]) -> None:
    count = 50_000

    def noise(seed: int = 1, choice: int = 0, position: int = 0, first: int = 0) -> npt.NDArray[np.float64]:
        return gumbel(seed, choice, position, np.arange(first, first + count))

    one, two = noise(), noise(**other)
    assert abs(np.corrcoef(one, two)[0, 1]) < 4 / math.sqrt(count)
    assert abs(np.corrcoef(one**2, two**2)[0, 1]) < 4 / math.sqrt(count)
