"""Ratios within a pass, medians over passes, the cap, and what the tables say of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import records as recorded
from bench.engines import Engine, headrace
from bench.goals import GOALS, LIMITS, STREAMED_IN, Goal, Limit, Rivals, Subject
from bench.tables import goals_table, limits_table, number, summary, table
from bench.verdicts import Record, compare, keeps, limit_value, verdict

OURS = headrace("smollm2-135m", "q4_1", "m.gguf")
PEER = Engine("llama.cpp", "smollm2-135m", "q4_0", "p.gguf", ("serve",))
OTHER = Engine("vLLM", "smollm2-135m", "bf16", "p", ("serve",))
SPEED = "decode_tokens_per_s"
GOAL = Goal("decode", "conc1", SPEED, 2.0, 3.0)


def one_pass(number: int, ours: float, peer: float, other: float = 1.0, bandwidth: float = 0.0) -> list[Record]:
    pairs = [(OURS, ours), (PEER, peer), (OTHER, other)]
    return [Record(number, engine, "conc1", {SPEED: speed}, bandwidth) for engine, speed in pairs]


def test_the_best_peer_of_the_pass_is_what_counts() -> None:
    found = compare(GOAL, one_pass(0, ours=300, peer=100, other=120))
    assert found and (found.best, found.best_name) == (120, "vLLM bf16")
    assert found.floor_target == 240 and found.stretch_target == 360 and not found.is_capped


def test_the_verdict_is_the_median_of_ratios_not_the_ratio_of_medians() -> None:
    records = one_pass(0, 100, 100) + one_pass(1, 900, 300) + one_pass(2, 500, 200)
    found = verdict(GOAL, records)
    assert found and found.num_passes == 3
    assert found.ratio == pytest.approx(2.5)  # of 1, 3 and 2.5
    assert found.attained == pytest.approx(1.25)
    assert found.stretch_attained == pytest.approx(2.5 / 3)
    drifting = one_pass(0, 100, 40) + one_pass(1, 1000, 500) + one_pass(2, 110, 110)
    slow = verdict(GOAL, drifting)
    assert slow and slow.ratio == pytest.approx(2.0) and slow.value / slow.best == pytest.approx(1.0)


def test_a_pass_that_lacks_a_side_is_left_out() -> None:
    lonely = [record for record in one_pass(1, 500, 1) if record.engine is OURS]
    found = verdict(GOAL, one_pass(0, 200, 100) + lonely)
    assert found and found.num_passes == 1
    assert verdict(GOAL, lonely) is None


def test_no_ratio_asks_for_more_than_memory_gives() -> None:
    goal = replace(GOAL, is_capped=True, stretch_of_roof=0.95)
    streamed = Record(0, OURS, STREAMED_IN["conc1"].name, {"decode_bytes_per_s": 2e10, SPEED: 200.0}, 4e10)
    records = [*one_pass(0, ours=380, peer=250, bandwidth=4e10), streamed]  # 1e8 bytes a token: a roof of 400
    found = compare(goal, records)
    assert found and found.is_capped
    assert found.floor_target == pytest.approx(0.92 * 400)
    assert found.stretch_target == pytest.approx(0.95 * 400)
    low = compare(goal, [*one_pass(0, ours=380, peer=150, bandwidth=4e10), streamed])
    assert low and not low.is_capped and low.floor_target == 300


def test_lower_is_better_for_gaps() -> None:
    goal = Goal("ITL", "conc1", SPEED, 1 / 4, 1 / 8, is_lower_better=True)
    found = verdict(goal, one_pass(0, ours=20, peer=100, other=160))
    assert found and found.best == 100
    assert found.attained == pytest.approx(25 / 20)
    assert found.stretch_attained == pytest.approx(12.5 / 20)


def test_an_engine_held_to_an_instruction_set_is_no_rival_of_one_that_is_not() -> None:
    held = replace(PEER, isa="avx2")
    assert Rivals()(PEER) and not Rivals()(held) and not Rivals()(OURS)
    assert Rivals(isa="avx2")(held) and not Rivals(isa="avx2")(PEER)
    assert Subject()(OURS) and not Subject(isa="avx2")(OURS)


def test_limits_hold_in_their_direction() -> None:
    upper, lower = Limit("share", "start", "x", 0.05, is_upper=True), Limit("speed", "start", "x", 0.05)
    records = [Record(number, OURS, "start", {"x": value}) for number, value in enumerate([0.01, 0.04, 0.9])]
    value = limit_value(upper, records)
    assert value == 0.04 and keeps(upper, value) and not keeps(lower, value)
    assert limit_value(upper, []) is None


def test_tables_say_what_was_met_missed_and_not_run() -> None:
    name = "Q4_1 decode, one stream"
    text = goals_table(one_pass(0, 300, 100))
    row = next(line for line in text.splitlines() if line.startswith(f"| {name} "))
    assert "| met (1.50) |" in row and "llama.cpp q4_0 100" in row and "| 3.00 × |" in row
    assert text.count("not run") == len(GOALS) - 1
    assert limits_table([]).count("not run") == len(LIMITS)
    missed = summary(one_pass(0, 160, 100))
    assert missed["floors_missed"] == [name] and missed["below_0.85"] == [name] and missed["floors_met"] == 0
    assert summary(one_pass(0, 300, 100))["floors_met"] == 1


def test_our_figure_stands_in_its_row_even_without_a_peer() -> None:
    row = goals_table(one_pass(0, 300, 100)[:1]).splitlines()[2]
    assert row == "| Q4_1 decode, one stream | 300 | – | – | 2 × | not run | – | 0 |"


def test_a_failure_is_told_and_counts_for_nothing() -> None:
    broken = Record(0, PEER, "conc1", error="no token")
    said = summary([*one_pass(0, 300, 100)[:1], broken])
    assert said["errors"] == ["llama.cpp q4_0, conc1: no token"] and said["floors_met"] == 0


def test_numbers_have_three_digits() -> None:
    assert [number(value) for value in (0.0541, 1.352, 87.21, 3593.4, None)] == ["0.0541", "1.35", "87.2", "3,593", "–"]


def test_a_table_is_markdown() -> None:
    assert table(["a", "b"], [["x", "1"]]).splitlines() == ["| a | b |", "| --- | ---: |", "| x | 1 |"]


def test_records_survive_the_disk_and_passes_of_two_files_stay_apart(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for record in one_pass(0, 1, 2):
        recorded.append(first, record)
        recorded.append(second, record)
    assert recorded.read([first]) == one_pass(0, 1, 2)
    assert {record.number for record in recorded.read([first, second])} == {0, 1}
