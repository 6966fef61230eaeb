"""How do speeds grow with threads, batch, context and model size, and where is the roof? Without HTTP, without peers.

    python -m bench.growth [--peers FOLDER] [--model NAME] [--threads N] [--repeats 3] [--series batch context ...]

A step takes at least its bytes at the read bandwidth measured beside it, and at least its operations at the arithmetic
peak: the longer of the two is its roof. Tables go to standard output, plots to bench/results/; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from bench.checked_flags import positive, positive_number
from bench.client import LoadError
from bench.engines import DEFAULT_FORMAT, DEFAULT_SHAPE, OURS, Engine, PeersError, read_engines
from bench.offline_command import offline_rows
from bench.plots import Line, chart
from bench.tables import number, table

RESULTS = Path(__file__).with_name("results")
# Zen 5: two vpdpbusd a cycle, each 64 products of 8 bits and their sums, at 4.1 GHz. bf16 has half as many a vector.
PEAK_OPS_PER_THREAD = 2 * 64 * 2 * 4.1e9
BF16_PEAK_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Series:
    """One figure that varies, and the flags of `headrace bench offline` that vary it."""

    title: str
    x_name: str
    key: str  # of the row: the value that varies
    flags: tuple[str, ...]


def _powers(first: int, last: int) -> tuple[str, ...]:
    return tuple(str(1 << power) for power in range(first.bit_length() - 1, last.bit_length()))


SERIES: Mapping[str, Series] = MappingProxyType(
    {
        "batch": Series(
            "tokens/s against batch, 128 tokens of context",
            "sequences",
            "batch",
            ("--batch", *_powers(1, 64), "--prompt-tokens", "128", "--output-tokens", "64"),
        ),
        "context": Series(
            "tokens/s against context, one sequence",
            "tokens before",
            "prompt_tokens",
            ("--prompt-tokens", *_powers(128, 4096), "8128", "--output-tokens", "32"),  # 8,192 with the answer
        ),
        "threads": Series(
            "tokens/s against threads, one sequence",
            "threads",
            "threads",
            ("--prompt-tokens", "512", "--output-tokens", "64"),
        ),
    }
)
SIZE_FLAGS = ("--prompt-tokens", "512", "--output-tokens", "32")
SIZE_TITLE = "tokens/s against model size, 512 tokens of context"


@dataclass(frozen=True, slots=True)
class Point:
    """One row of `headrace bench offline` beside its roofs."""

    x: str
    figures: Mapping[str, float]
    peak_ops: float  # per second, of the threads that ran

    @property
    def step_ms(self) -> float:
        """The mean of decode steps, as the speeds are."""
        return 1e3 * self.figures["batch"] / self.figures["decode_tokens_per_s"]

    @property
    def step_mb(self) -> int:
        """Megabytes that a decode step streams."""
        return round(self.step_ms * self.figures["decode_bytes_per_s"] / 1e9)

    @property
    def bytes_ms(self) -> float:
        return self.step_ms * self.figures["decode_bytes_per_s"] / self.figures["read_bandwidth"]

    @property
    def operations_ms(self) -> float:
        return self.step_ms * self.figures["decode_flops_per_s"] / self.peak_ops

    @property
    def decode_roof(self) -> float:
        return 1e3 * self.figures["batch"] / max(self.bytes_ms, self.operations_ms)

    @property
    def prefill_roof(self) -> float:
        return self.figures["prefill_tokens_per_s"] * self.peak_ops / self.figures["prefill_flops_per_s"]

    def cells(self) -> list[str]:
        decode, prefill = self.figures["decode_tokens_per_s"], self.figures["prefill_tokens_per_s"]
        return [
            self.x,
            number(decode),
            number(self.decode_roof),
            f"{decode / self.decode_roof:.0%}",
            *map(number, (self.step_ms, self.bytes_ms, self.operations_ms)),
            number(prefill),
            number(self.prefill_roof),
            f"{prefill / self.prefill_roof:.0%}",
        ]


def growth_table(x_name: str, points: Sequence[Point]) -> str:
    decode = ["decode tok/s", "roof", "of roof", "step ms", "its bytes ms", "its operations ms"]
    return table([x_name, *decode, "prefill tok/s", "roof", "of roof"], [point.cells() for point in points])


def figure_of(key: str) -> Callable[[Point], float]:
    return lambda point: point.figures[key]


def growth_chart(title: str, x_name: str, x: Callable[[Point], float], points: Sequence[Point]) -> str:
    def curve(y: Callable[[Point], float]) -> list[tuple[float, float]]:
        return sorted((x(point), y(point)) for point in points)

    lines = [
        Line("prefill", curve(lambda point: point.figures["prefill_tokens_per_s"])),
        Line("prefill roof", curve(lambda point: point.prefill_roof), is_roof=True),
        Line("decode", curve(lambda point: point.figures["decode_tokens_per_s"]), color=1),
        Line("decode roof", curve(lambda point: point.decode_roof), color=1, is_roof=True),
    ]
    return chart(title, x_name, "tokens/s", lines)


def points_of(
    engine: Engine, flags: Sequence[str], key: str, peak_ops: float, is_model_named: bool = False
) -> list[Point]:
    share = BF16_PEAK_SHARE if engine.format == "bf16" else 1.0
    return [
        Point(
            f"{engine.shape} {engine.format}" if is_model_named else f"{row[key]:,.0f}",
            row,
            peak_ops * share * row["threads"],
        )
        for row in offline_rows(engine, flags)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="its peers.toml names files of other sizes")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--series", nargs="+", choices=[*SERIES, "size"], default=[*SERIES, "size"])
    parser.add_argument(
        "--peak-ops", type=positive_number, default=PEAK_OPS_PER_THREAD, help="8-bit operations per second and thread"
    )
    options = parser.parse_args(arguments)
    try:
        engines = [engine for engine in read_engines(options.peers, options.model) if engine.family == OURS]
        plain = next(e for e in engines if (e.shape, e.format, e.isa) == (DEFAULT_SHAPE, DEFAULT_FORMAT, ""))
        found = measure_all(engines, plain, options)
    except (PeersError, LoadError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(json.dumps({name: [{"x": p.x, **p.figures} for p in points] for name, points in found.items()}))
    return 0


def measure_all(engines: Sequence[Engine], plain: Engine, options: argparse.Namespace) -> dict[str, list[Point]]:
    """Each series measured, printed and drawn before the next."""
    RESULTS.mkdir(exist_ok=True)
    found: dict[str, list[Point]] = {}
    repeats = ("--repeats", str(options.repeats))
    threads = tuple(str(count) for count in range(1, options.threads + 1))
    for name, series in SERIES.items():
        if name in options.series:
            counts = threads if name == "threads" else threads[-1:]
            flags = (*series.flags, *repeats, "--threads", *counts)
            found[name] = points_of(plain, flags, series.key, options.peak_ops)
            print(f"### {series.title}\n\n{growth_table(series.x_name, found[name])}\n", flush=True)
            drawn = growth_chart(series.title, series.x_name, figure_of(series.key), found[name])
            (RESULTS / f"growth-{name}.svg").write_text(drawn, "utf-8")
    if "size" in options.series:
        flags = (*SIZE_FLAGS, *repeats, "--threads", threads[-1])
        found["size"] = [
            point
            for e in engines
            if not e.isa
            for point in points_of(e, flags, "", options.peak_ops, is_model_named=True)
        ]
        print(f"### {SIZE_TITLE}\n\n{growth_table('model', found['size'])}\n", flush=True)
        drawn = growth_chart(SIZE_TITLE, "MB a decode step streams", lambda point: point.step_mb, found["size"])
        (RESULTS / "growth-size.svg").write_text(drawn, "utf-8")
    return found


if __name__ == "__main__":
    sys.exit(main())
