"""Rows of figures: complete, and consistent with each other."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path

import pytest

from headrace.backend.cpu import CpuBackend
from headrace.bench import offline
from headrace.bench.offline import Load, Plan, Row, measure
from headrace.types import RequestError
from tiny import write_tiny_llama_gguf


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    path = tmp_path_factory.mktemp("offline") / "tiny.gguf"
    write_tiny_llama_gguf(path)
    plan = Plan(path, [Load(1, 16, 8), Load(2, 40, 8)], threads=[1, 2], verify=[2], repeats=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline, "ROOF_BYTES", 1 << 22)
        return list(measure(plan, lambda loaded: None))


def test_each_load_with_each_number_of_threads_is_a_row(rows: list[Row]) -> None:
    assert [(row.threads, row.batch, row.prompt_tokens) for row in rows] == [
        (1, 1, 16),
        (1, 2, 40),
        (2, 1, 16),
        (2, 2, 40),
    ]


def test_figures_agree_with_each_other(rows: list[Row]) -> None:
    for row in rows:
        figures = asdict(row)
        assert all(value > 0 for value in figures.values() if isinstance(value, int | float))
        assert 0 < row.host_share < 1 and sum(row.phase_shares.values()) + row.host_share < 1.05
        assert set(row.verify_cost) == {"2"}


def test_the_roof_is_what_memory_gave_right_before_and_right_after_the_decode_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_llama_gguf(tmp_path / "tiny.gguf")
    speeds = itertools.cycle([1e9, 3e9])
    monkeypatch.setattr(CpuBackend, "read_bandwidth", lambda *_: [next(speeds)])
    (row,) = measure(Plan(tmp_path / "tiny.gguf", [Load(1, 16, 8)], [1], [], repeats=3), lambda loaded: None)
    assert row.read_bandwidth == 2e9
    assert row.roof_share_decode == pytest.approx(row.decode_bytes_per_s / 2e9)
    assert row.roof_share_attention == pytest.approx(row.attention_bytes_per_s / 2e9)


@pytest.mark.parametrize("sizes", [(0, 1, 4), (1, 0, 4), (1, 1, 3)])
def test_a_load_that_measures_nothing_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(RequestError, match="it must be at least"):
        Load(*sizes)


@pytest.mark.parametrize(("repeats", "verify"), [(0, []), (1, [1])])
def test_a_plan_that_measures_nothing_is_refused(repeats: int, verify: list[int]) -> None:
    with pytest.raises(RequestError, match="it must be at least"):
        Plan(Path("any"), [], [], verify, repeats)


def test_a_batch_that_no_step_has_room_for_is_refused_by_what_was_asked() -> None:
    plan = Plan(Path("any"), [Load(500, 1, 4)], [], [], 1, max_step_tokens=512)
    with pytest.raises(RequestError, match=r"--max-step-tokens is 512; it must be at least 3167 for --batch 500"):
        plan.config(None)


def test_a_batch_that_no_step_can_have_is_refused_as_too_large() -> None:
    plan = Plan(Path("any"), [Load(1 << 20, 1, 4)], [], [], 1, max_step_tokens=1 << 16)
    with pytest.raises(RequestError, match="--batch 1048576 is more than a step can have, 65536"):
        plan.config(None)
