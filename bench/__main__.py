"""How does headrace compare with the engines that people run on CPUs? Measured side by side, in interleaved passes.

    python -m bench [--peers FOLDER] [--passes 5] [--quick] [--rows WORD ...] [--from RESULTS ...]

In each pass every engine is started, warmed up, asked the loads that some row wants of it, and stopped; each pass
begins with another engine. Tables go to standard output, records to bench/results/; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from bench import records as recorded
from bench.checked_flags import existing_file, positive
from bench.client import LoadError
from bench.engines import DEFAULT_FORMAT, DEFAULT_SHAPE, Engine, PeersError, read_engines
from bench.goals import GOALS, START, Goal, Offline, loads_of, offline_runs_of
from bench.machine import Minute, alone, look_at, resident_bytes
from bench.offline_command import run_offline
from bench.running import prepared, running
from bench.tables import goals_table, limits_table, load_table, summary
from bench.verdicts import Record
from bench.workloads import LOADS

RESULTS = Path(__file__).with_name("results")
QUICK_LOADS = frozenset({"conc1", "single512", "conc16", "shared_cold", "shared_warm"})
QUICK_OFFLINE_TOKENS = 512  # quick passes leave out what computes more
SLOW_TO_START = frozenset({"vLLM"})  # a minute: not in quick passes
OFFLINE_REPEATS = 1  # the passes repeat it
NOT_LOOKED = Minute()


@dataclass(frozen=True, slots=True)
class Session:
    """What holds for all passes of a run."""

    threads: int
    goals: tuple[Goal, ...]
    is_quick: bool
    lock: Path | None
    log: Path

    def loads(self, engine: Engine) -> list[str]:
        """In LOADS' order, those of one process together."""
        wanted = loads_of(engine, self.goals) & (QUICK_LOADS if self.is_quick else LOADS.keys())
        names = [name for name in LOADS if name in wanted]
        return sorted(names, key=lambda name: LOADS[name].key) if engine.restarts else names

    def offline_runs(self, engine: Engine) -> list[Offline]:
        runs = offline_runs_of(engine, self.goals)
        return [run for run in runs if not self.is_quick or run.batch * run.prompt_tokens <= QUICK_OFFLINE_TOKENS]


def measure(engine: Engine, number: int, session: Session) -> Iterator[Record]:
    """All that one pass asks of one engine, each record as soon as there is one."""

    def record(load: str, figures: Mapping[str, float], now: Minute = NOT_LOOKED, error: str = "") -> Record:
        return Record(number, engine, load, dict(figures), now.read_bandwidth, now.line_seconds, error)

    for _, group in groupby(session.loads(engine), lambda name: LOADS[name].key if engine.restarts else None):
        names = list(group)
        try:
            with session.log.open("ab") as log, running(engine, session.threads, LOADS[names[0]], log) as process:
                for name in names:
                    with alone(session.lock):
                        now = look_at(session.threads)
                        figures = process.ask(name, LOADS[name], seed=number)
                    yield record(name, asdict(figures), now)
                    if name == names[0] and LOADS[name].clients == 1:
                        memory = resident_bytes(process.process.pid)
                        yield record(START, {"start_s": process.start_s, "resident_bytes": memory})
        except LoadError as error:
            yield record(names[0], {}, error=str(error))
    for run in session.offline_runs(engine):
        try:
            with alone(session.lock):
                now = look_at(session.threads)
                figures_offline = run_offline(engine, run, session.threads, OFFLINE_REPEATS)
            yield record(run.name, figures_offline, now)
        except LoadError as error:
            yield record(run.name, {}, error=str(error))


def run_passes(engines: Sequence[Engine], num_passes: int, session: Session, file: Path) -> list[Record]:
    """Every pass begins with another engine, far along the list: a drift within passes favours each in turn."""
    records: list[Record] = []
    began = time.monotonic()
    for number in range(num_passes):
        turn = number * max(1, len(engines) // num_passes) % len(engines)
        for engine in [*engines[turn:], *engines[:turn]]:
            for record in measure(engine, number, session):
                recorded.append(file, record)
                records.append(record)
                told = record.error or ", ".join(f"{key} {value:.4g}" for key, value in record.figures.items())
                where = f"pass {number + 1}, {engine.shape}, {engine.name}, {record.load}"
                print(f"[{time.monotonic() - began:5.0f} s] {where}: {told}", file=sys.stderr)
    return records


def spread(values: Sequence[float]) -> str:
    return f"median {statistics.median(values):.1f}, from {min(values):.1f} to {max(values):.1f} over the run"


def print_tables(records: Sequence[Record], goals: Sequence[Goal]) -> None:
    bandwidths = [record.read_bandwidth / 1e9 for record in records if record.read_bandwidth]
    if bandwidths:
        print(f"Read bandwidth, GB/s: {spread(bandwidths)}.")
    lines = [record.line_seconds * 1e9 for record in records if record.line_seconds]
    if lines:
        print(f"A cache line's way from one core to another, ns: {spread(lines)}.")
    print()
    print(f"## What to reach\n\n{goals_table(records, goals)}\n\n{limits_table(records)}")
    for load in (START, *LOADS):
        if any(record.load == load for record in records):
            print(f"\n### {load}\n\n{load_table(load, records)}")
    print(json.dumps(summary(records, goals)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="has a peers.toml (docs/benchmarks.md)")
    parser.add_argument("--model", default="smollm2-135m", help="the default model, as shipped")
    parser.add_argument("--passes", type=positive, default=5)
    parser.add_argument("--quick", action="store_true", help="one pass of the short loads, for checks")
    parser.add_argument("--rows", nargs="+", metavar="WORD", help="only rows whose title has one of these")
    parser.add_argument(
        "--engines", nargs="+", metavar="WORD", help="only engines whose model or name has one of these"
    )
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--lock", type=Path, metavar="FILE", help="hold this file's lock (flock) during each load")
    parser.add_argument(
        "--from", dest="results", type=existing_file, nargs="+", metavar="FILE", help="measure nothing, print these"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which stops what was started
    goals = tuple(g for g in GOALS if not options.rows or any(word in g.title for word in options.rows))
    if options.results:
        print_tables(recorded.read(options.results), goals)
        return 0
    try:
        engines = read_engines(options.peers, options.model)
    except PeersError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / time.strftime("%Y%m%d-%H%M%S.jsonl")
    session = Session(options.threads, goals, options.quick, options.lock, file.with_suffix(".log"))
    chosen = [
        engine
        for engine in engines
        if session.loads(engine)
        and (not options.engines or any(word in f"{engine.shape} {engine.name}" for word in options.engines))
        and not (options.quick and engine.family in SLOW_TO_START)
    ]
    if not chosen:
        print("bench: no engine fits these rows and engines", file=sys.stderr)
        return 2
    try:
        chosen = [prepared(engine) for engine in chosen]
    except LoadError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(f"{DEFAULT_SHAPE} {DEFAULT_FORMAT} is {options.model}; {options.threads} threads; records in {file}\n")
    print_tables(run_passes(chosen, 1 if options.quick else options.passes, session, file), goals)
    return 0


if __name__ == "__main__":
    sys.exit(main())
