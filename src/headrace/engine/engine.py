"""The engine: drives scheduler and executor step by step, and the thread that does so while a server runs.

`Engine` is the loop's body, synchronous and without threads: the offline API and the tests call it directly.
`EngineThread` owns the one thread that may touch an engine once it runs: requests and cancellations come in through
an inbox, what each step gave goes out in one delivery. Knows nothing of text, HTTP or files.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from headrace.run.executor import Executor
from headrace.run.isolate import run_isolated
from headrace.sched import Scheduler
from headrace.types import (
    Event,
    Finished,
    FinishReason,
    InvariantError,
    Rejection,
    Request,
    StepPlan,
    StepResult,
    Usage,
)

log = logging.getLogger(__name__)

Clock = Callable[[], int]  # microseconds, monotonic

GATHER_S = 0.008  # the most that an engine without work waits for requests that are on their way


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
    failed_steps: int = 0  # that raised, whatever became of their requests
    busy_us: int = 0
    last_step_us: int = 0  # when the last step ended; 0: none yet


@dataclass(slots=True)
class Engine:
    """Scheduler and executor in step. Not thread-safe: one caller."""

    scheduler: Scheduler
    executor: Executor
    clock: Clock = monotonic_us
    counts: StepCounts = field(default_factory=StepCounts)
    is_closed: bool = False  # set by whoever takes the executor's threads and memory away

    def add(self, request: Request) -> Rejection | None:
        if self.is_closed:
            return Rejection("the engine is closed: load the model again to go on", "model", "engine_closed")
        return self.scheduler.add(request)

    def cancel(self, request_id: int) -> list[Event]:
        return self.scheduler.cancel(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Event]:
        """Plan, run and commit one step; returns what it gave. Does nothing where there is nothing to do.

        Raises what no single request is to blame for (a result that is not the plan's, Ctrl-C); nothing of the step
        counts then, and all of it can be planned again.
        """
        began = self.clock()
        plan = self.scheduler.plan(began)
        if plan is None:
            return []
        try:
            result, failures = self._run(plan)
            events = self.scheduler.commit(result)
        except BaseException:
            self.counts.failed_steps += 1
            with contextlib.suppress(InvariantError):  # it was committed already: there is nothing to take back
                self.scheduler.rollback(plan.step)
            raise
        ended = self.clock()
        self.counts.steps += 1
        self.counts.fed_tokens += plan.num_tokens
        self.counts.busy_us += ended - began
        self.counts.last_step_us = ended
        return failures + events

    def _run(self, plan: StepPlan) -> tuple[StepResult, list[Event]]:
        """The plan's result, and the ends of requests that make it fail: the others' work is kept."""
        try:
            return self.executor.run(plan, foresee=self.scheduler.foresee), []
        except Exception:
            log.exception("step %d failed; running its %d requests one by one", plan.step, plan.num_slices)
        self.counts.failed_steps += 1
        outcome = run_isolated(self.executor, plan)
        ended = [event for request_id in outcome.failed for event in self.scheduler.cancel(request_id)]
        return outcome.result, [_as_error(event) for event in ended]


def _as_error(event: Event) -> Event:
    if isinstance(event, Finished):
        return Finished(event.request_id, FinishReason.ERROR, event.usage, "the engine failed on this request")
    return event


def _unknown_end(request: Request, reason: FinishReason, message: str = "") -> Finished:
    """The end of a request that no scheduler has counted for."""
    return Finished(request.id, reason, Usage(len(request.prompt), 0, 0, 0, None), message)


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: int


class EngineThread:
    """Runs an engine on a thread of its own. Every method may be called from any thread.

    Every request that is submitted comes to an end that is delivered, whatever fails. `deliver` is called once per
    step that gave something, on the engine's thread, and for what comes after its end, on the caller's; it must not
    block.
    """

    def __init__(self, engine: Engine, deliver: Callable[[Delivery], None]) -> None:
        self._engine = engine
        self._deliver = deliver
        self._inbox: deque[_Submit | _Cancel] = deque()
        self._open: dict[int, Request] = {}  # the engine's thread has taken them in, and told no end yet
        self._wake = threading.Condition()
        self._num_coming = 0
        self._is_stopping = False
        self._has_ended = False  # nothing enters the inbox any more
        self._thread = threading.Thread(target=self._loop, name="headrace-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()
        # A thread that comes back from the core into an interpreter which is going away would abort the process.
        atexit.register(self.stop)

    def submit(self, request: Request) -> None:
        if not self._post(_Submit(request)):
            self._tell([_unknown_end(request, FinishReason.CANCELLED)])

    def cancel(self, request_id: int) -> None:
        self._post(_Cancel(request_id))

    def expect(self, change: int) -> None:
        """So many requests more (or, negative, fewer) are about to be submitted: their prompts are being made.

        Clients that ask at the same moment, as those do that share a prefix or ask again when answered, then share
        their first step; else the first has one to itself and all others wait for that.
        """
        with self._wake:
            self._num_coming += change
            if self._num_coming <= 0:  # else it would wake up to wait on
                self._wake.notify()

    def stop(self) -> None:
        """End the thread after the step that is running. Requests still there are ended as cancelled."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join()
        atexit.unregister(self.stop)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def is_idle(self) -> bool:
        return not self._inbox and not self._open

    def _post(self, message: _Submit | _Cancel) -> bool:
        """Hand a message to the thread; False if it has ended."""
        with self._wake:
            if self._has_ended:
                return False
            self._inbox.append(message)
            if len(self._inbox) == 1:  # else it is awake already, or waits for those that are expected
                self._wake.notify()
            return True

    def _loop(self) -> None:
        try:
            while self._wait_for_work():
                self._turn()
        finally:
            with self._wake:
                self._has_ended = True
            self._open |= {it.request.id: it.request for it in self._inbox if isinstance(it, _Submit)}
            self._inbox.clear()
            self._tell(self._end_all(FinishReason.CANCELLED))

    def _wait_for_work(self) -> bool:
        """Sleep while there is nothing to do; False when the thread shall end."""
        if self._open:
            return not self._is_stopping
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._is_stopping)
            self._wake.wait_for(lambda: self._num_coming <= 0 or self._is_stopping, timeout=GATHER_S)
        return not self._is_stopping

    def _turn(self) -> None:
        """One step, and its delivery. If the engine fails in a way that is nobody's, all requests end, new ones may
        come: a client that waits forever is worse than one that is told to ask again.
        """
        events: list[Event | Rejected] = []
        try:
            self._take_inbox(events)
            events += self._engine.step()
        except Exception:
            self._tell(events)
            log.exception("the engine failed; ending its %d requests", len(self._open))
            events = self._end_all(FinishReason.ERROR, "the engine failed; it was not this request's fault")
        self._tell(events)

    def _take_inbox(self, events: list[Event | Rejected]) -> None:
        while self._inbox:
            match self._inbox.popleft():
                case _Submit(request):
                    self._open[request.id] = request
                    if (rejection := self._engine.add(request)) is not None:
                        events.append(Rejected(request.id, rejection))
                case _Cancel(request_id):
                    events += self._engine.cancel(request_id)

    def _end_all(self, reason: FinishReason, message: str = "") -> list[Event | Rejected]:
        """Take every open request from the engine, as far as it can still do that."""
        events: list[Event | Rejected] = []
        for request_id, request in self._open.items():
            usage = None
            with contextlib.suppress(Exception):  # it has failed already, and its failure has been logged
                usage = next((e.usage for e in self._engine.cancel(request_id) if isinstance(e, Finished)), None)
            end = _unknown_end(request, reason, message)
            events.append(end if usage is None else replace(end, usage=usage))
        return events

    def _tell(self, events: Sequence[Event | Rejected]) -> None:
        for event in events:
            if isinstance(event, Finished | Rejected):
                self._open.pop(event.request_id, None)
        if not events:
            return
        try:
            self._deliver(Delivery(self._engine.clock(), tuple(events)))
        except Exception:
            log.exception("%d events could not be delivered", len(events))
