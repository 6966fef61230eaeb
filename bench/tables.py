"""Markdown of what was measured. Pure: records in, text out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from bench.goals import GOALS, LIMITS, START, Goal, Limit
from bench.verdicts import Record, Verdict, figure, keeps, limit_value, verdict

MISSABLE = 0.85  # a row that misses still has this much of its floor


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], num_text_columns: int = 1) -> str:
    lines = [titles, ["---" if i < num_text_columns else "---:" for i in range(len(titles))], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None) -> str:
    """Three digits or more: 0.054, 1.35, 87.2, 3,593."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def judged(attained: float | None) -> str:
    if attained is None:
        return "–"
    return f"met ({attained:.2f})" if attained >= 1 else f"missed ({attained:.2f})"


def goals_table(records: Sequence[Record], goals: Sequence[Goal] = GOALS) -> str:
    """Each goal with a peer: our figure, the best peer's, the ratio, and how much of floor and stretch that is."""
    rows = []
    for goal in goals:
        found = verdict(goal, records)
        if found is None:
            alone = [value for value, _ in figure(records, goal.ours, goal.load, goal.metric)]
            value = number(statistics.median(alone) if alone else None)
            rows.append([goal.title, value, "–", "–", f"{goal.floor:g} ×", "not run", "–", "0"])
            continue
        floor = f"{goal.floor:g} ×" + (f", capped at {number(found.target)}" if found.is_capped else "")
        rows.append(
            [
                goal.title,
                number(found.value),
                f"{found.best_name} {number(found.best)}",
                f"{found.ratio:.2f} ×",
                floor,
                judged(found.attained),
                judged(found.stretch_attained),
                str(found.num_passes),
            ]
        )
    titles = [
        "against the best peer of the row",
        "headrace",
        "best peer",
        "ratio",
        "floor",
        "verdict",
        "stretch",
        "passes",
    ]
    return table(titles, rows)


def limits_table(records: Sequence[Record]) -> str:
    rows = []
    for limit in LIMITS:
        value = limit_value(limit, records)
        bound = f"{'≤' if limit.is_upper else '≥'} {number(limit.bound / limit.unit)}"
        if value is None:
            rows.append([limit.title, "–", bound, "not run"])
        else:
            rows.append([limit.title, number(value / limit.unit), bound, "met" if keeps(limit, value) else "missed"])
    return table(["without a peer", "headrace", "bound", "verdict"], rows)


COLUMNS = (  # title, figure, what it is divided by
    ("output tok/s", "output_tokens_per_s", 1),
    ("prefill tok/s", "prefill_tokens_per_s", 1),
    ("decode tok/s", "decode_tokens_per_s", 1),
    ("TTFT ms", "ttft_ms", 1),
    ("ITL p50 ms", "itl_p50_ms", 1),
    ("ITL p99 ms", "itl_p99_ms", 1),
    ("client's share of a core", "client_cpu_share", 1),
)
START_COLUMNS = (("first token s", "start_s", 1), ("memory MB", "resident_bytes", 1_000_000))


def load_table(load: str, records: Sequence[Record]) -> str:
    """Every engine that ran the load: medians, and the spread of its first figure over the passes."""
    columns = START_COLUMNS if load == START else COLUMNS
    rows = []
    for engine in {(r.engine.shape, r.engine.name): r.engine for r in records if r.load == load}.values():
        runs = [r for r in records if r.load == load and r.engine == engine]
        good = [r.figures for r in runs if not r.error]
        cells = [number(statistics.median(f[key] / by for f in good) if good else None) for _, key, by in columns]
        first = [f[columns[0][1]] for f in good]
        spread = f"{max(first) / min(first) - 1:.0%}" if first else "–"
        rows.append([engine.shape, engine.name, *cells, spread, f"{len(good)} of {len(runs)}"])
    return table(["model", "engine", *(title for title, _, _ in columns), "spread", "runs"], rows, num_text_columns=2)


def summary(records: Sequence[Record], goals: Sequence[Goal] = GOALS) -> dict[str, object]:
    """What the last line says: how many goals were met, and which were not."""
    found = {goal.title: verdict(goal, records) for goal in goals}
    bounds = {limit.title: _kept(limit, records) for limit in LIMITS}
    missed = [title for title, one in found.items() if one and one.attained < 1]
    return {
        "floors_met": sum(one is not None and one.attained >= 1 for one in found.values()),
        "floors_missed": missed,
        "below_0.85": [title for title in missed if _attained(found[title]) < MISSABLE],
        "not_run": [title for title, one in (found | bounds).items() if one is None],
        "stretches_met": sum(bool(one and (one.stretch_attained or 0) >= 1) for one in found.values()),
        "limits_missed": [title for title, kept in bounds.items() if kept is False],
        "errors": sorted({f"{r.engine.name}, {r.load}: {r.error}" for r in records if r.error}),
    }


def _kept(limit: Limit, records: Sequence[Record]) -> bool | None:
    value = limit_value(limit, records)
    return None if value is None else keeps(limit, value)


def _attained(found: Verdict | None) -> float:
    return found.attained if found else 0.0
