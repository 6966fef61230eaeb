"""The engine: drives scheduler and executor step by step, and the thread that does so while a server runs.

`Engine` is the loop's body, synchronous and without threads: the offline API and the tests call it directly.
`EngineThread` owns the one thread that may touch an engine once it runs: requests and cancellations come in through
an inbox, what each step gave goes out in one delivery. Knows nothing of text, HTTP or files.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.run.executor import Executor
from headrace.run.isolate import run_isolated
from headrace.sched import Scheduler
from headrace.types import Event, Finished, FinishReason, Rejection, Request, StepPlan, StepResult

log = logging.getLogger(__name__)

Clock = Callable[[], int]  # microseconds, monotonic


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


@dataclass(frozen=True, slots=True)
class Rejected:
    """The scheduler refused a request when it was added: it could never run."""

    request_id: int
    rejection: Rejection


@dataclass(frozen=True, slots=True)
class Delivery:
    """All that one step gave, stamped when it ended. Sent once per step, whatever the number of requests."""

    now_us: int
    events: tuple[Event | Rejected, ...]


@dataclass(slots=True)
class StepCounts:
    """What the engine has done since it started; read by /metrics, written by the engine's thread alone."""

    steps: int = 0
    fed_tokens: int = 0  # prompt, recomputed and output tokens that went through the model
    failed_steps: int = 0
    busy_us: int = 0
    last_step_us: int = 0  # when the last step ended; 0: none yet


@dataclass(slots=True)
class Engine:
    """Scheduler and executor in step. Not thread-safe: one caller."""

    scheduler: Scheduler
    executor: Executor
    clock: Clock = monotonic_us
    counts: StepCounts = field(default_factory=StepCounts)

    def add(self, request: Request) -> Rejection | None:
        return self.scheduler.add(request)

    def cancel(self, request_id: int) -> list[Event]:
        return self.scheduler.cancel(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Event]:
        """Plan, run and commit one step; returns what it gave. Does nothing where there is nothing to do."""
        began = self.clock()
        plan = self.scheduler.plan(began)
        if plan is None:
            return []
        try:
            result = self.executor.run(plan)
            failures: list[Event] = []
        except Exception:
            log.exception("step %d failed; running its %d requests one by one", plan.step, plan.num_slices)
            result, failures = self._recover(plan)
        events = self.scheduler.commit(result)
        ended = self.clock()
        self.counts.steps += 1
        self.counts.fed_tokens += plan.num_tokens
        self.counts.busy_us += ended - began
        self.counts.last_step_us = ended
        return failures + events

    def _recover(self, plan: StepPlan) -> tuple[StepResult, list[Event]]:
        """A step failed: find the requests that make it fail, end those, and keep the others' work."""
        self.counts.failed_steps += 1
        outcome = run_isolated(self.executor, plan)
        ended = [event for request_id in outcome.failed for event in self.scheduler.cancel(request_id)]
        return outcome.result, [_as_error(event) for event in ended]


def _as_error(event: Event) -> Event:
    if isinstance(event, Finished):
        return Finished(event.request_id, FinishReason.ERROR, event.usage, "the engine failed on this request")
    return event


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: int


class EngineThread:
    """Runs an engine on a thread of its own. Every method may be called from any thread.

    `deliver` is called on the engine's thread, once per step that gave something; it must not block.
    """

    def __init__(self, engine: Engine, deliver: Callable[[Delivery], None]) -> None:
        self._engine = engine
        self._deliver = deliver
        self._inbox: deque[_Submit | _Cancel] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._loop, name="headrace-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        self._post(_Submit(request))

    def cancel(self, request_id: int) -> None:
        self._post(_Cancel(request_id))

    def stop(self) -> None:
        """End the thread after the step that is running. Requests still there are ended as cancelled."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def is_idle(self) -> bool:
        return not self._inbox and not self._engine.has_work

    def _post(self, message: _Submit | _Cancel) -> None:
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    def _loop(self) -> None:
        requests: set[int] = set()
        while self._wait_for_work():
            events = self._take_inbox(requests)
            events += self._engine.step()
            requests.difference_update(e.request_id for e in events if isinstance(e, Finished | Rejected))
            if events:
                self._deliver(Delivery(self._engine.clock(), tuple(events)))
        last = [event for request_id in sorted(requests) for event in self._engine.cancel(request_id)]
        if last:
            self._deliver(Delivery(self._engine.clock(), tuple(last)))

    def _wait_for_work(self) -> bool:
        """Sleep while there is nothing to do; False when the thread shall end."""
        if self._engine.has_work or self._inbox:
            return not self._is_stopping
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._is_stopping)
        return not self._is_stopping

    def _take_inbox(self, requests: set[int]) -> list[Event | Rejected]:
        events: list[Event | Rejected] = []
        while self._inbox:
            match self._inbox.popleft():
                case _Submit(request):
                    if (rejection := self._engine.add(request)) is not None:
                        events.append(Rejected(request.id, rejection))
                    else:
                        requests.add(request.id)
                case _Cancel(request_id):
                    events += self._engine.cancel(request_id)
        return events
