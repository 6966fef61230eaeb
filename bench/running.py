"""Engines as running processes: started, asked loads, stopped with all that they started.

A server is asked over HTTP, an engine without one through a driver that runs in its own Python; both give `Figures`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Protocol

import msgspec

import bench.client
from bench.client import LoadError
from bench.engines import Engine, Kind
from bench.figures import Answer, Figures, summarize
from bench.machine import map_into_cache, process_tree, read_into_cache
from bench.workloads import WARM_UP, Load, prompts

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.01


class Running(Protocol):
    """An engine that has given its first token."""

    process: subprocess.Popen[bytes]
    start_s: float  # from the command to that token

    def ask(self, name: str, load: Load, seed: int) -> Figures: ...


class Served:
    def __init__(self, engine: Engine, process: subprocess.Popen[bytes], port: int, began: float) -> None:
        self.engine, self.process, self.port = engine, process, port
        while not self._has_answered():
            if process.poll() is not None or time.perf_counter() - began > START_TIMEOUT_S:
                raise LoadError(f"{engine.name}: no token from {process.args!r} (exit status {process.poll()})")
            time.sleep(POLL_S)
        self.start_s = time.perf_counter() - began

    def _has_answered(self) -> bool:
        body = {"model": self.engine.served_name, "prompt": "Hello there", "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            msgspec.json.encode(body),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as reply:
                return bool(reply.read())
        except (OSError, urllib.error.URLError):
            return False  # nobody listens yet, or answers 503 while it loads

    def ask(self, name: str, load: Load, seed: int) -> Figures:
        return bench.client.run_load(self.port, self.engine.served_name, name, load, seed)


class DriverResult(msgspec.Struct):
    answers: list[Answer]
    wall_s: float


class Driven:
    """Its driver reads a load a line and writes a result a line."""

    def __init__(self, engine: Engine, process: subprocess.Popen[bytes], began: float) -> None:
        self.engine, self.process = engine, process
        self.ask("first token", Load(1, 1, 8, 2), seed=0)
        self.start_s = time.perf_counter() - began

    def ask(self, name: str, load: Load, seed: int) -> Figures:
        stdin, stdout = self.process.stdin, self.process.stdout
        if stdin is None or stdout is None:
            raise LoadError(f"{self.engine.name}: its driver has no pipes")
        texts = list(prompts(name, load, seed))
        question = {"prompts": texts, "clients": load.clients, "output_tokens": load.output_tokens}
        try:
            stdin.write(msgspec.json.encode(question) + b"\n")
            stdin.flush()
            result = msgspec.json.decode(stdout.readline(), type=DriverResult)
            return summarize(result.answers, result.wall_s)
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            status = self.process.poll()
            raise LoadError(f"{self.engine.name}: its driver gave no result ({error}; exit {status})") from error


def prepared(engine: Engine) -> Engine:
    """The engine, once what it needs done before its first start is done."""
    if not engine.prepare:
        return engine
    environment = {**os.environ, **engine.environment}
    done = subprocess.run(engine.prepare, capture_output=True, text=True, env=environment)
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        reason = done.stderr.strip() or f"it ended with {done.returncode} and named no file"
        raise LoadError(f"{engine.name} could not be prepared: {reason}")
    return replace(engine, reads=lines[-1])


@contextlib.contextmanager
def running(engine: Engine, threads: int, load: Load, log: IO[bytes]) -> Iterator[Running]:
    """The engine, warm, with room for `load` and for others of its key; what it says goes into `log`."""
    read_into_cache(Path(engine.path))
    if engine.reads:
        map_into_cache(Path(engine.reads))
    port, began = free_port(), time.perf_counter()
    pipe = subprocess.PIPE if engine.kind is Kind.OPENVINO else None
    process = subprocess.Popen(
        engine.arguments(port, threads, load),
        stdin=pipe or subprocess.DEVNULL,
        stdout=pipe or log,
        stderr=log,
        env={**os.environ, **engine.environment},
    )
    try:
        engine_now = Driven(engine, process, began) if pipe else Served(engine, process, port, began)
        engine_now.ask("warm up", WARM_UP, seed=0)
        yield engine_now
    finally:
        stop(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and those that it started, gently first."""
    members = process_tree(process.pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        for member in members:
            with contextlib.suppress(OSError):
                os.kill(member, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
            if not any(Path(f"/proc/{member}").exists() for member in members[1:]):
                return
