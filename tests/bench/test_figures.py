"""Percentiles and speeds from moments of arrival."""

from __future__ import annotations

import pytest

from bench.figures import Answer, percentile, summarize


def test_a_percentile_is_a_value_that_was_seen() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile(values, 1.0) == 100
    assert percentile(values, 0.0) == 1
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_speeds_come_from_the_servers_token_counts_and_the_clients_clock() -> None:
    # 100 tokens in 0.5 s; then 10 more tokens, of which several came together, in 2 s
    answer = Answer(sent=1.0, arrivals=(1.5, 2.0, 3.5), prompt_tokens=100, output_tokens=11)
    figures = summarize([answer], wall_s=4.0)
    assert figures.prefill_tokens_per_s == pytest.approx(200)
    assert figures.decode_tokens_per_s == pytest.approx(5)
    assert figures.output_tokens_per_s == pytest.approx(11 / 4)
    assert figures.ttft_ms == pytest.approx(500)
    assert figures.itl_p50_ms == pytest.approx(500)
    assert figures.itl_p99_ms == pytest.approx(1500)


def test_gaps_of_all_requests_count_but_none_between_requests() -> None:
    first = Answer(0.0, (1.0, 1.1), 8, 2)
    second = Answer(5.0, (9.0, 9.3), 8, 2)
    assert summarize([first, second], wall_s=10).itl_p99_ms == pytest.approx(300)


def test_an_answer_in_one_piece_has_no_decode_speed() -> None:
    with pytest.raises(ValueError, match="fewer than two pieces"):
        summarize([Answer(0.0, (1.0,), 8, 4)], wall_s=1.0)
