"""Streams: what a request gave, on the event loop's side of the engine's thread.

Owns the way from the engine's deliveries to whoever listens to a request: one call into the loop per step, and from
there one to each listener. Leaving a stream early cancels its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from headrace.engine.engine import Delivery, Engine, EngineThread, Rejected
from headrace.types import Event, Finished, Request, RequestError

# Events of a delivery that are worth a core while they are told: beside fewer, no difference was measured.
LENDING_EVENTS = 16
TELLING_TURNS = 3  # of the loop: listeners hand on what they heard, their connections send it, and it is done


class CoreLender(Protocol):
    """Threads that use every core and can spare one for a moment. Both calls may come from any thread."""

    def lend_core(self) -> None: ...
    def take_core_back(self) -> None: ...


class Listener(Protocol):
    """Hears what a request gave, on the event loop, in order. Must not raise: others wait for their turn."""

    def take(self, event: Event, now_us: int) -> None:
        """`now_us`: when the step that gave it ended. The last event is Finished."""

    def fail(self, error: RequestError) -> None:
        """The engine refused the request, or a server that stops cuts it off. Nothing comes after a refusal."""


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """The engine's state at the moment of asking."""

    num_running: int
    num_waiting: int
    kv_usage: float  # of the fullest KV group, 0 to 1
    steps: int
    failed_steps: int
    fed_tokens: int
    busy_s: float


class Stream:
    """One request on its way: submitted when entered, cancelled when left before its last event."""

    def __init__(self, owner: AsyncEngine, request: Request, listener: Listener) -> None:
        self.request = request
        self.has_ended = False
        self._owner = owner
        self._listener = listener

    def cancel(self) -> None:
        """Ask the engine to end the request. Its last event still comes: Finished, with the usage so far."""
        self._owner.cancel(self.request.id)

    def fail(self, error: RequestError) -> None:
        self._listener.fail(error)

    def put(self, event: Event | Rejected, now_us: int) -> None:
        """What the engine gave. Nothing is heard after the last event."""
        if self.has_ended:
            return
        if isinstance(event, Rejected):
            reason = event.rejection
            self.has_ended = True
            self._listener.fail(RequestError(reason.message, reason.param, reason.code))
        else:
            self.has_ended = isinstance(event, Finished)
            self._listener.take(event, now_us)

    def __enter__(self) -> Stream:
        self._owner.open(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner.close(self, is_cancelled=not self.has_ended)


class AsyncEngine:
    """An engine on its thread, for callers on one asyncio event loop."""

    def __init__(self, engine: Engine, lender: CoreLender | None = None) -> None:
        """`lender`: the engine's threads, where telling events would take a core from them anyway."""
        self._engine = engine
        self._lender = lender
        self._lent_for: Delivery | None = None  # the last for which a core was lent
        self._ids = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._thread = EngineThread(engine, self._deliver)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Must be called on the event loop on which listeners are to hear."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self._thread.stop)

    def next_id(self) -> int:
        return next(self._ids)

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """Have an idle engine wait a little for a request whose prompt is made in the context."""
        self._thread.expect(1)
        try:
            yield
        finally:
            # Once the caller has had its turn, by whose end it has submitted what it made; and a turn later, in which
            # the requests of others are read that were sent at the same time.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._thread.expect, -1)

    def stream(self, request: Request, listener: Listener) -> Stream:
        """The request's way; it is submitted when the stream is entered, and what it gives goes to the listener."""
        return Stream(self, request, listener)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive

    @property
    def is_idle(self) -> bool:
        return self._thread.is_idle()

    @property
    def last_step_us(self) -> int:
        """When the last step ended; 0: none yet."""
        return self._engine.counts.last_step_us

    def now_us(self) -> int:
        return self._engine.clock()

    def gauges(self, num_blocks: Sequence[int]) -> EngineGauges:
        """What the engine has and does, `num_blocks` being the KV blocks of each group, free or not."""
        scheduler, counts = self._engine.scheduler, self._engine.counts
        used = [1 - free / total for free, total in zip(scheduler.num_free_blocks, num_blocks, strict=True)]
        return EngineGauges(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_usage=max(used),
            steps=counts.steps,
            failed_steps=counts.failed_steps,
            fed_tokens=counts.fed_tokens,
            busy_s=counts.busy_us / 1e6,
        )

    def open(self, stream: Stream) -> None:
        self._streams[stream.request.id] = stream
        self._thread.submit(stream.request)

    def cancel(self, request_id: int) -> None:
        self._thread.cancel(request_id)

    def close(self, stream: Stream, *, is_cancelled: bool) -> None:
        self._streams.pop(stream.request.id, None)
        if is_cancelled:
            self._thread.cancel(stream.request.id)

    def _deliver(self, delivery: Delivery) -> None:
        """On the engine's thread: hand the step's events to the loop, in one call."""
        if self._loop is not None and not self._loop.is_closed():
            if self._lender is not None and len(delivery.events) >= LENDING_EVENTS:
                self._lent_for = delivery
                self._lender.lend_core()
            self._loop.call_soon_threadsafe(self._dispatch, delivery)

    def _dispatch(self, delivery: Delivery) -> None:
        if self._lender is not None and delivery is self._lent_for:
            self._take_core_back(self._lender, delivery, TELLING_TURNS)
        for event in delivery.events:
            stream = self._streams.get(event.request_id)
            if stream is not None:  # else the client left
                stream.put(event, delivery.now_us)

    def _take_core_back(self, lender: CoreLender, delivery: Delivery, turns: int) -> None:
        """After so many turns of the loop, unless it has been lent for another delivery since."""
        if turns > 0:
            asyncio.get_running_loop().call_soon(self._take_core_back, lender, delivery, turns - 1)
        elif delivery is self._lent_for:
            lender.take_core_back()
