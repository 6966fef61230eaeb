"""What each sampling parameter means, worked by hand, for the definition and for every native sampler alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sampling_columns import ISAS, SAMPLERS, Sampler, draw_natively, pack_mask, sampling_rows

from headrace import _core
from headrace.run.sampler import philox, surviving

INF = math.inf


@pytest.fixture(params=SAMPLERS)
def sample(request: pytest.FixtureRequest) -> Sampler:
    return SAMPLERS[request.param]


def row(*logits: float) -> np.ndarray:
    return np.array([logits], np.float32)


def greedy(sample: Sampler, *logits: float, **columns) -> int:
    return int(sample(row(*logits), sampling_rows(1, temperature=0, **columns), None).tokens[0])


# The generator


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [  # of Random123 1.14.0, tests/kat_vectors, "philox4x32 10"
        ([0] * 4, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ([2**32 - 1] * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_known_answers(counter: list[int], key: int, answer: tuple[int, ...]) -> None:
    words = np.array(counter, np.uint32)
    assert tuple(philox(words, key)) == answer
    assert _core.philox(words, key) == answer


# Greedy and what cannot be drawn


def test_temperature_zero_takes_the_argmax_and_of_equals_the_lowest_id(sample: Sampler) -> None:
    assert greedy(sample, 1, 3, 2, 3) == 1
    assert greedy(sample, *[0.0] * 100) == 0
    assert greedy(sample, *[-5.0] * 70, 1, *[-5.0] * 20, 1) == 70


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-20, 9e-6])
def test_a_temperature_too_small_to_divide_by_is_greedy(sample: Sampler, temperature: float) -> None:
    logits = np.tile(row(1, 2 - 1e-6, 2, 2), (50, 1))
    rows = sampling_rows(50, temperature=temperature, seeds=np.arange(50))
    assert sample(logits, rows, None).tokens == [2] * 50


def test_nan_is_never_drawn(sample: Sampler) -> None:
    assert greedy(sample, math.nan, -3, math.nan) == 1
    rows = sampling_rows(50, seeds=np.arange(50))
    assert sample(np.tile(row(math.nan, -1e30, math.nan), (50, 1)), rows, None).tokens == [1] * 50


def test_infinity_beats_every_other_logit(sample: Sampler) -> None:
    assert greedy(sample, 1e38, INF, 3, INF) == 1
    rows = sampling_rows(50, seeds=np.arange(50), num_top=2)
    results = sample(np.tile(row(1e38, INF, 3, INF), (50, 1)), rows, None)
    assert set(results.tokens) == {1, 3}
    np.testing.assert_allclose(results.scores.logprobs, math.log(0.5), rtol=1e-6)


@pytest.mark.parametrize("logits", [[math.nan] * 3, [-INF] * 3, [-INF, math.nan, -INF]])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_with_nothing_to_draw_says_so(sample: Sampler, logits: list[float], temperature: float) -> None:
    results = sample(row(*logits), sampling_rows(1, temperature=temperature, num_top=2), None)
    assert results.tokens[0] == -1
    assert results.scores.logprobs[0] == 0
    assert list(results.scores.top_ids[0]) == [0, 1]
    assert list(results.scores.top_logprobs[0]) == [-INF, -INF]


def test_a_vocabulary_of_one_token_leaves_no_choice(sample: Sampler) -> None:
    results = sample(row(-7), sampling_rows(1, top_k=1, top_p=0.1, min_p=1, num_top=1), None)
    assert results.tokens[0] == 0
    assert results.scores.logprobs[0] == 0


# Bias and masks


def test_a_bias_of_a_hundred_forces_and_of_minus_a_hundred_bans(sample: Sampler) -> None:
    logits = np.tile(row(5, 4, 3), (200, 1))
    forced = sample(logits, sampling_rows(200, seeds=np.arange(200), bias=[[(2, 100)]]), None).tokens
    banned = sample(logits, sampling_rows(200, seeds=np.arange(200), bias=[[(0, -100)]]), None).tokens
    assert set(forced) == {2}
    assert set(banned) == {1, 2}


def test_biases_of_the_same_token_add_up(sample: Sampler) -> None:
    assert greedy(sample, 5, 4, bias=[[(1, 0.75), (1, 0.75)]]) == 1


def test_a_forbidden_token_stays_forbidden_whatever_else_is_asked(sample: Sampler) -> None:
    assert greedy(sample, 5, 4, bias=[[(0, -INF), (0, 100)]]) == 1
    assert greedy(sample, 5, bias=[[(0, -INF)]]) == -1
    penalties = {"repetition_penalty": 0.1, "presence_penalty": -2, "frequency_penalty": -2}
    assert greedy(sample, 5, 4, bias=[[(0, -INF)]], history=[[0]], **penalties) == 1


def test_a_mask_leaves_only_the_tokens_whose_bits_are_set(sample: Sampler) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, (40, 75)).astype(np.float32)
    allowed = rng.random((40, 75)) < 0.2
    tokens = sample(logits, sampling_rows(40, temperature=0), pack_mask(allowed)).tokens
    assert tokens == np.where(allowed, logits, -INF).argmax(1).tolist()


def test_a_mask_that_allows_nothing_leaves_nothing_to_draw(sample: Sampler) -> None:
    assert sample(row(1, 2), sampling_rows(1), np.zeros((1, 1), np.uint32)).tokens[0] == -1


# Penalties


@pytest.mark.parametrize(
    ("logits", "history", "winner"),
    [
        ((4, 3), [], 0),
        ((4, 3), [0], 1),  # 4 / 2
        ((4, 1.5), [0, 0], 0),  # once, however often it was there
        ((-1, -1.5), [0], 1),  # -1 * 2: a penalty also where the logit is negative
        ((4, 3), [1], 0),
    ],
)
@pytest.mark.parametrize("num_prompt", [0, 1])
def test_repetition_penalizes_each_token_of_prompt_and_output_once(
    sample: Sampler, logits: tuple[float, ...], history: list[int], winner: int, num_prompt: int
) -> None:
    columns = {"repetition_penalty": 2, "history": [history], "num_prompt": min(num_prompt, len(history))}
    assert greedy(sample, *logits, **columns) == winner


@pytest.mark.parametrize(
    ("history", "num_prompt", "winner"), [([0], 0, 1), ([0], 1, 0), ([0, 0, 0], 0, 1), ([0, 1], 0, 0), ([0, 0], 1, 1)]
)
def test_presence_counts_that_a_token_was_in_the_output(
    sample: Sampler, history: list[int], num_prompt: int, winner: int
) -> None:
    assert greedy(sample, 2, 1.25, presence_penalty=1, history=[history], num_prompt=num_prompt) == winner


def test_presence_does_not_grow_with_the_count(sample: Sampler) -> None:
    assert greedy(sample, 3, 1.75, presence_penalty=1, history=[[0] * 9]) == 0


@pytest.mark.parametrize(
    ("history", "num_prompt", "winner"), [([0, 0], 0, 0), ([0, 0, 0], 0, 1), ([0, 0, 0], 1, 0), ([0] * 9, 6, 1)]
)
def test_frequency_counts_how_often_a_token_was_in_the_output(
    sample: Sampler, history: list[int], num_prompt: int, winner: int
) -> None:
    assert greedy(sample, 3, 1.75, frequency_penalty=0.5, history=[history], num_prompt=num_prompt) == winner


def test_negative_penalties_encourage(sample: Sampler) -> None:
    assert greedy(sample, 3, 1.75, frequency_penalty=-0.5, history=[[1, 1, 1]]) == 1
    assert greedy(sample, 3, 1.75, presence_penalty=-2, history=[[1]]) == 1
    assert greedy(sample, 3, 1.75, repetition_penalty=0.5, history=[[1]]) == 1


def test_bias_comes_before_repetition_and_repetition_before_presence(sample: Sampler) -> None:
    assert greedy(sample, 1, 2, bias=[[(0, 2)]], repetition_penalty=2, history=[[0]]) == 1  # (1 + 2) / 2
    assert greedy(sample, 4, 1.625, repetition_penalty=2, presence_penalty=0.5, history=[[0]]) == 1  # 4 / 2 - 0.5


def test_a_history_weighs_on_its_own_row_alone(sample: Sampler) -> None:
    logits = np.tile(row(4, 3), (3, 1))
    rows = sampling_rows(3, temperature=0, repetition_penalty=2, history=[[0] * 50, [], [0]])
    assert list(sample(logits, rows, None).tokens) == [1, 0, 1]


# Which tokens survive


def z_of(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities) / max(probabilities)).astype(np.float32)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "survivors"),
    [
        (0, 1, 0, [2, 0, 3, 1, 4]),
        (3, 1, 0, [2, 0, 3]),
        (9, 1, 0, [2, 0, 3, 1, 4]),
        (0, 0.39, 0, [2]),
        (0, 0.41, 0, [2, 0]),
        (0, 0.73, 0, [2, 0, 3]),
        (4, 0.73, 0, [2, 0]),  # of what top_k left: 0.4 / 0.95 + 0.3 / 0.95 is above it
        (0, 1e-30, 0, [2]),
        (0, 1, 0.3, [2, 0, 3]),  # 0.3 of the greatest, 0.4
        (0, 1, 0.3751, [2, 0]),
        (0, 1, 1, [2]),
        (2, 0.9, 0.3, [2, 0]),
    ],
)
def test_survivors_are_the_shortest_prefix_that_is_asked_for(
    top_k: int, top_p: float, min_p: float, survivors: list[int]
) -> None:
    z = z_of(0.3, 0.1, 0.4, 0.15, 0.05)
    assert list(surviving(z, top_k, top_p, min_p)) == survivors
    logits = np.tile(z, (500, 1))
    columns = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "seeds": np.arange(500)}
    for isa in ISAS:
        assert set(draw_natively(isa, logits, sampling_rows(500, **columns)).tokens) == set(survivors)


@pytest.mark.parametrize("columns", [{"top_k": 4}, {"top_p": 0.75}])  # three hold 0.68 of the mass, four 0.79
def test_equal_tokens_at_the_border_survive_by_lower_id(sample: Sampler, columns: dict[str, float]) -> None:
    logits = np.tile(row(0, 1, 0, 0, 1, 0), (200, 1))
    tokens = sample(logits, sampling_rows(200, seeds=np.arange(200), **columns), None).tokens
    assert set(tokens) == {0, 1, 2, 4}


def test_half_of_a_flat_distribution_is_its_lower_half(sample: Sampler) -> None:
    tokens = sample(np.zeros((300, 64), np.float32), sampling_rows(300, seeds=np.arange(300), top_p=0.5), None).tokens
    assert set(tokens) == set(range(32))


# Logprobs


def test_logprobs_are_of_the_raw_logits_whatever_is_drawn_from(sample: Sampler) -> None:
    logits = row(1, 2, 3, 4)
    columns = {"temperature": 0.5, "top_k": 2, "bias": [[(0, 100)]], "repetition_penalty": 3, "history": [[3]]}
    results = sample(logits, sampling_rows(1, num_top=4, **columns), pack_mask(np.array([[True, True, False, False]])))
    expected = logits[0] - math.log(sum(math.exp(x) for x in logits[0]))
    assert results.tokens[0] == 0
    np.testing.assert_allclose(results.scores.logprobs, expected[0], rtol=1e-6)
    assert list(results.scores.top_ids[0]) == [3, 2, 1, 0]
    np.testing.assert_allclose(results.scores.top_logprobs[0], expected[::-1], rtol=1e-6)


def test_the_most_likely_tokens_come_best_first_and_equals_by_lower_id(sample: Sampler) -> None:
    logits = np.random.default_rng(0).integers(-3, 3, (30, 300)).astype(np.float32)
    results = sample(logits, sampling_rows(30, num_top=64), None)
    assert (results.scores.top_ids == np.argsort(-logits, axis=1, kind="stable")[:, :64]).all()
    assert (np.diff(results.scores.top_logprobs, axis=1) <= 0).all()


def test_rows_get_as_many_alternatives_as_each_asked_for(sample: Sampler) -> None:
    logits = np.tile(row(1, 2, 3, 4), (4, 1))
    results = sample(logits, sampling_rows(4, temperature=0, num_top=[-1, 0, 1, 3]), None)
    assert results.scores.top_ids.tolist() == [[-1, -1, -1], [-1, -1, -1], [3, -1, -1], [3, 2, 1]]
    assert results.scores.logprobs[0] == 0
    assert (results.scores.logprobs[1:] == results.scores.top_logprobs[2, 0]).all()


def test_a_target_is_scored_and_nothing_drawn(sample: Sampler) -> None:
    results = sample(row(1, 2, 3, 4), sampling_rows(1, targets=0, num_top=1, bias=[[(0, -INF)]]), None)
    assert results.tokens[0] == 0
    np.testing.assert_allclose(results.scores.logprobs[0], results.scores.top_logprobs[0, 0] - 3, rtol=1e-6)
    assert results.scores.top_ids[0, 0] == 3
