"""Roofs beside measured speeds, and the plots of both."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from bench.goals import Offline
from bench.growth import Point, figure_of, growth_chart, growth_table
from bench.offline_command import flat, output_speed
from bench.plots import Axis, Line, chart

SVG = "{http://www.w3.org/2000/svg}"


def row(batch: float, decode: float, bytes_per_s: float, flops_per_s: float) -> dict[str, float]:
    return {
        "batch": batch,
        "decode_tokens_per_s": decode,
        "decode_bytes_per_s": bytes_per_s,
        "decode_flops_per_s": flops_per_s,
        "read_bandwidth": 4e10,
        "prefill_tokens_per_s": 3000.0,
        "prefill_flops_per_s": 0.75e12,
    }


def test_a_step_of_one_is_bound_by_its_bytes_and_a_large_one_by_its_operations() -> None:
    small = Point("1", row(1, decode=200, bytes_per_s=2e10, flops_per_s=5e10), peak_ops=2e12)
    assert small.step_ms == pytest.approx(5) and small.bytes_ms == pytest.approx(2.5)
    assert small.decode_roof == pytest.approx(400)
    large = Point("64", row(64, decode=2000, bytes_per_s=4e9, flops_per_s=5e11), peak_ops=2e12)
    assert large.operations_ms == pytest.approx(8) and large.decode_roof == pytest.approx(8000)


def test_prefill_is_bound_by_its_operations() -> None:
    assert Point("1", row(1, 200, 1, 1), peak_ops=1.5e12).prefill_roof == pytest.approx(6000)


def test_the_table_has_each_speed_beside_its_roof() -> None:
    text = growth_table("sequences", [Point("1", row(1, 200, 2e10, 5e10), peak_ops=1.5e12)])
    assert "| 1 | 200 | 400 | 50% | 5 | 2.5 | 0.167 | 3,000 | 6,000 | 50% |" in text


def test_the_plot_is_svg_with_measured_points_and_dashed_roofs() -> None:
    points = [Point(str(n), row(n, 150 * n, 2e10, 5e10 * n), peak_ops=2e12) for n in (1, 2, 4)]
    picture = ElementTree.fromstring(growth_chart("t", "x", figure_of("batch"), points))
    lines = picture.findall(f"{SVG}polyline")
    assert len(lines) == 4 and sum("stroke-dasharray" in line.attrib for line in lines) == 2
    assert len(picture.findall(f"{SVG}circle")) == 2 * len(points)


def test_models_are_drawn_by_what_a_step_streams_smallest_first() -> None:
    points = [Point(name, row(1, speed, 2e10, 5e10), peak_ops=2e12) for name, speed in (("large", 20), ("small", 200))]
    assert [point.step_mb for point in points] == [1000, 100]
    picture = ElementTree.fromstring(growth_chart("t", "x", lambda point: point.step_mb, points))
    xs = [float(dot.attrib["cx"]) for dot in picture.findall(f"{SVG}circle")]  # of prefill, then of decode
    assert xs[0] < xs[1] and xs[2:] == xs[:2]


def test_double_is_as_far_anywhere_on_an_axis() -> None:
    axis = Axis.over([128, 8192], length=600)
    assert axis.at(128) == 0 and axis.at(8192) == pytest.approx(600)
    assert axis.at(512) - axis.at(256) == pytest.approx(100)
    assert axis.ticks() == [200, 500, 1000, 2000, 5000]


def test_a_logarithmic_axis_refuses_zero() -> None:
    with pytest.raises(ValueError, match="above 0"):
        chart("t", "x", "y", [Line("a", [(0, 1)])])


def test_names_are_escaped() -> None:
    assert "a &lt; b" in chart("a < b", "x", "y", [Line("l", [(1, 1)])])


def test_inner_figures_get_dotted_names() -> None:
    document = {"model": "m", "batch": 1, "verify_cost": {"4": 1.25}}
    assert flat(document) == {"batch": 1.0, "verify_cost.4": 1.25}


def test_output_speed_counts_the_time_of_the_prompts() -> None:
    # 64 prompts of 128 at 4,096 tok/s: 2 s; then 64 x 128 tokens at 2,048 tok/s: 4 s
    figures = {"prefill_tokens_per_s": 4096.0, "decode_tokens_per_s": 2048.0}
    assert output_speed(Offline(64, 128, 128), figures) == pytest.approx(64 * 128 / 6)
