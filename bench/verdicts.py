"""From records to verdicts: ratios of one pass, medians over passes, and what memory allows. Pure.

Engines are compared within a pass, since the same machine gives other speeds an hour later: medians are of ratios.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.engines import Engine
from bench.goals import CAP, STREAMED_IN, Goal, Limit, Offline


@dataclass(frozen=True, slots=True)
class Record:
    """What one engine did at one load in one pass; `error` instead of figures where it failed."""

    number: int  # of the pass
    engine: Engine
    load: str
    figures: Mapping[str, float] = field(default_factory=dict)
    read_bandwidth: float = 0.0  # bytes per second, measured just before; so is the next
    line_seconds: float = 0.0  # a cache line's way from one core to another
    error: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Medians over the passes that had both sides; ratios are ours to the best peer's."""

    value: float
    best: float
    best_name: str  # the peer that was best most often
    ratio: float
    target: float  # absolute: the floor times the best, or what the cap allows
    attained: float  # 1 or more: the floor is met
    stretch_attained: float | None
    is_capped: bool  # the cap, not the ratio, set most passes' targets
    num_passes: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One pass of one row."""

    value: float
    best: float
    best_name: str
    floor_target: float
    stretch_target: float | None
    is_capped: bool


def figure(
    records: Sequence[Record], chosen: Callable[[Engine], bool], load: str, metric: str
) -> list[tuple[float, str]]:
    """The metric of every chosen engine that ran the load, with its name."""
    return [
        (record.figures[metric], record.engine.name)
        for record in records
        if record.load == load and metric in record.figures and chosen(record.engine)
    ]


def roof_tokens_per_s(goal: Goal, records: Sequence[Record]) -> float | None:
    """What the pass's read bandwidth allows one stream: bandwidth over the bytes that a token streams."""
    source = STREAMED_IN.get(goal.load)
    runs = [r for r in records if source and r.load == source.name and goal.ours(r.engine) and r.figures]
    bandwidths = [r.read_bandwidth for r in records if r.read_bandwidth]
    if not runs or not bandwidths:
        return None
    streamed = runs[0].figures["decode_bytes_per_s"] / runs[0].figures["decode_tokens_per_s"]
    return statistics.median(bandwidths) / streamed


def compare(goal: Goal, records: Sequence[Record]) -> Comparison | None:
    """`records` are those of one pass. None where a side is missing."""
    ours = figure(records, goal.ours, goal.load, goal.metric)
    rivals = figure(records, goal.rivals, goal.rival_load or goal.load, goal.metric)
    if not ours or not rivals:
        return None
    best, name = min(rivals) if goal.is_lower_better else max(rivals)
    roof = roof_tokens_per_s(goal, records) if goal.is_capped else None
    cap = CAP * roof if roof else float("inf")
    wanted, stretch = goal.floor * best, goal.stretch * best if goal.stretch else None
    if stretch and not goal.is_lower_better:
        stretch = min(stretch, cap)
    if goal.stretch_of_roof and roof:
        stretch = goal.stretch_of_roof * roof
    return Comparison(ours[0][0], best, name, min(wanted, cap), stretch, is_capped=wanted > cap)


def by_pass(records: Sequence[Record]) -> list[list[Record]]:
    numbers = sorted({record.number for record in records})
    return [[record for record in records if record.number == number] for number in numbers]


def verdict(goal: Goal, records: Sequence[Record]) -> Verdict | None:
    found = [one for records_of_pass in by_pass(records) if (one := compare(goal, records_of_pass))]
    if not found:
        return None

    def attained(value: float, target: float) -> float:
        return target / value if goal.is_lower_better else value / target

    stretches = [attained(one.value, one.stretch_target) for one in found if one.stretch_target]
    return Verdict(
        value=statistics.median(one.value for one in found),
        best=statistics.median(one.best for one in found),
        best_name=Counter(one.best_name for one in found).most_common(1)[0][0],
        ratio=statistics.median(one.value / one.best for one in found),
        target=statistics.median(one.floor_target for one in found),
        attained=statistics.median(attained(one.value, one.floor_target) for one in found),
        stretch_attained=statistics.median(stretches) if stretches else None,
        is_capped=statistics.median(one.is_capped for one in found) > 0.5,
        num_passes=len(found),
    )


def limit_value(limit: Limit, records: Sequence[Record]) -> float | None:
    """The median over the passes, None where it was not run."""
    load = limit.source.name if isinstance(limit.source, Offline) else limit.source
    values = [value for value, _ in figure(records, limit.ours, load, limit.metric)]
    return statistics.median(values) if values else None


def keeps(limit: Limit, value: float) -> bool:
    return value <= limit.bound if limit.is_upper else value >= limit.bound
