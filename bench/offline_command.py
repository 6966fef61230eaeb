"""`headrace bench offline` as a subprocess: what the engine does without HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from bench.client import LoadError
from bench.engines import Engine
from bench.goals import Offline

TIMEOUT_S = 1800.0


def run_offline(engine: Engine, run: Offline, threads: int, repeats: int) -> Mapping[str, float]:
    """The figures of one row, and the output speed that follows from them."""
    (row,) = offline_rows(engine, [*run.arguments, "--threads", str(threads), "--repeats", str(repeats)])
    return {**row, "output_tokens_per_s": output_speed(run, row)}


def offline_rows(engine: Engine, flags: Sequence[str]) -> list[dict[str, float]]:
    """A row for each combination of the flags' values, read from its last line."""
    held = ("--isa", engine.isa) if engine.isa else ()
    command = [sys.executable, "-m", "headrace", "bench", "offline", "--model", engine.path, *held, *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        document = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        raise LoadError(f"{' '.join(command)}: {error.stderr.strip()[-300:]}") from error
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise LoadError(f"{' '.join(command)}: {error}") from error
    return [flat(row) for row in document.get("rows", [document])]


def flat(figures: Mapping[str, object]) -> dict[str, float]:
    """Numbers by name; those of inner tables as table.name."""
    numbers: dict[str, float] = {}
    for key, value in figures.items():
        if isinstance(value, int | float):
            numbers[key] = float(value)
        elif isinstance(value, dict):
            numbers |= {f"{key}.{inner}": number for inner, number in flat(value).items()}
    return numbers


def output_speed(run: Offline, figures: Mapping[str, float]) -> float:
    """Output tokens over the whole time, prefill included: what a server's figure is to be compared with."""
    prefill_s = run.prompt_tokens / figures["prefill_tokens_per_s"]
    decode_s = run.output_tokens / figures["decode_tokens_per_s"]
    return run.output_tokens / (prefill_s + decode_s)
