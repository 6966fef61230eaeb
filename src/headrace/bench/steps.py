"""Steps of a real engine, one by one, each with what it fed, what it attended to and how long it took.

Owns the loop and the prompts. Refuses to know bytes and operations (work.py).
"""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from headrace.backend.cpu import CpuBackend, Profile
from headrace.engine.engine import Engine, monotonic_us
from headrace.engine.load import Loaded
from headrace.sched import FCFS, Scheduler
from headrace.types import (
    CapacityError,
    Finished,
    FinishReason,
    InvariantError,
    Request,
    RequestError,
    SamplingParams,
    Tokens,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One step, as the engine made it."""

    seconds: float
    core: Profile  # what the core took of them
    num_tokens: int  # fed
    num_attended: int  # tokens whose keys and values were read, if the step was steady
    is_steady: bool  # every sequence decoded


def random_prompts(vocab_size: int, count: int, length: int, seed: str) -> list[array[int]]:
    """Token ids, no prompt like another: nothing of them is in a prefix cache."""
    draw = random.Random(seed)
    return [array("i", draw.choices(range(vocab_size), k=length)) for _ in range(count)]


@dataclass(slots=True)
class Driver:
    """Asks an engine of its own and times its steps."""

    engine: Engine
    backend: CpuBackend
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @classmethod
    def of(cls, loaded: Loaded, *, lookahead: int = 0) -> Driver:
        """An engine that knows nothing of earlier ones, over the loaded model's memory; one at a time may be in use."""
        backend = cpu_backend(loaded)
        scheduler = Scheduler(replace(loaded.limits, lookahead=lookahead), backend.kv_groups, FCFS())
        backend.start_profile()
        return cls(Engine(scheduler, loaded.engine.executor, monotonic_us), backend)

    def run(self, prompts: Sequence[array[int]], max_tokens: int) -> list[Step]:
        """Answer all prompts, greedily and to the end; a step is steady while all of them decode."""
        num_known = {request.id: len(request.prompt) for request in self._ask(prompts, max_tokens)}
        are_decoding: set[int] = set()
        steps: list[Step] = []
        is_any_done = False
        while self.engine.has_work:
            is_steady = len(are_decoding) == len(prompts) and not is_any_done
            num_attended = sum(num_known.values())
            fed, core, began = self.engine.counts.fed_tokens, self.backend.profile, time.perf_counter()
            events = self.engine.step()
            seconds = time.perf_counter() - began
            num_tokens = self.engine.counts.fed_tokens - fed
            steps.append(Step(seconds, self.backend.profile.since(core), num_tokens, num_attended, is_steady))
            for event in events:
                if isinstance(event, Tokens):
                    num_known[event.request_id] += len(event.tokens)
                    are_decoding.add(event.request_id)
                elif isinstance(event, Finished):
                    is_any_done = True
                    _check_complete(event)
        return steps

    def verify(self, prompt: array[int], count: int, num_steps: int) -> tuple[list[float], list[float]]:
        """Seconds of steps that feed one token, and of ones that check `count - 1` drafts behind it, taking turns."""
        (request,) = self._ask([prompt], num_steps * (count + 1))
        draw, scheduler = random.Random(request.id), self.engine.scheduler
        while not any(isinstance(event, Tokens) for event in self.engine.step()):
            continue
        seconds: tuple[list[float], list[float]] = ([], [])
        for i in range(2 * num_steps):
            drafts = {request.id: draw.choices(prompt, k=count - 1)} if i % 2 else {}
            began = time.perf_counter()
            plan = scheduler.plan(self.engine.clock(), drafts)
            if plan is None or plan.num_rows != (count if drafts else 1):
                raise InvariantError(f"a step was to have {count if drafts else 1} rows: {plan}")
            scheduler.commit(self.engine.executor.run(plan))
            seconds[i % 2].append(time.perf_counter() - began)
        self.engine.cancel(request.id)
        return seconds

    def _ask(self, prompts: Sequence[array[int]], max_tokens: int) -> list[Request]:
        requests = [greedy(next(self.ids), prompt, max_tokens) for prompt in prompts]
        for request in requests:
            if (rejection := self.engine.add(request)) is not None:
                raise CapacityError(rejection.message)
        return requests


def cpu_backend(loaded: Loaded) -> CpuBackend:
    """The backend whose work is known; RequestError for another."""
    if not isinstance(loaded.backend, CpuBackend):
        raise RequestError(f"only the cpu backend can be measured, not {loaded.device}", "backend")
    return loaded.backend


def greedy(request_id: int, prompt: array[int], max_tokens: int) -> Request:
    return Request(request_id, prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), seed=0)


def _check_complete(event: Finished) -> None:
    if event.reason is not FinishReason.LENGTH:
        raise CapacityError(f"a request ended early ({event.reason.value}): {event.message or 'no reason given'}")
