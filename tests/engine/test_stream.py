"""Streams on an event loop: who hears what, and when the engine's threads spare a core for what is told."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from fake_executor import FakeExecutor
from headrace.engine.engine import Engine
from headrace.engine.stream import LENDING_EVENTS, AsyncEngine
from headrace.sched import FCFS, Scheduler
from headrace.types import (
    Event,
    Finished,
    FinishReason,
    KVGroup,
    KVKind,
    Limits,
    Request,
    RequestError,
    SamplingParams,
    Usage,
)

GROUPS = (KVGroup(KVKind.FULL, (0,), 1, 1),)
LIMITS = Limits(max_seqs=64, max_step_tokens=256, max_len=64, block_size=4, num_blocks=(1024,))


@dataclass
class Lender:
    """Notes what it is asked, among what clients were told."""

    notes: list[str] = field(default_factory=list)

    def lend_core(self) -> None:
        self.notes.append("lend")

    def take_core_back(self) -> None:
        self.notes.append("back")


class Sender:
    """A client: what it is told it sends on a turn of the loop later."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        self.done = asyncio.Event()

    def take(self, event: Event, now_us: int) -> None:
        asyncio.get_running_loop().call_soon(self.notes.append, "sent")
        if isinstance(event, Finished):
            self.done.set()

    def fail(self, error: RequestError) -> None:
        raise AssertionError(error)


async def tell(num_clients: int, notes: list[str], lender: Lender | None) -> None:
    """Every client is told all of an answer."""
    executor = FakeExecutor(GROUPS, LIMITS.num_blocks, LIMITS.block_size)
    engine = AsyncEngine(Engine(Scheduler(LIMITS, GROUPS, FCFS()), executor), lender)

    async def client() -> None:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        request = Request(engine.next_id(), array("i", [1, 2, 3]), params, seed=0)
        listener = Sender(notes)
        with engine.stream(request, listener):
            await listener.done.wait()

    clients = [asyncio.ensure_future(client()) for _ in range(num_clients)]
    await asyncio.sleep(0)  # all have asked before the first step
    engine.start()
    await asyncio.gather(*clients)
    await asyncio.sleep(0.05)
    await engine.stop()


def test_a_core_is_lent_until_every_client_has_been_told() -> None:
    lender = Lender()
    asyncio.run(tell(2 * LENDING_EVENTS, lender.notes, lender))
    assert lender.notes.count("lend") == 5  # the fifth delivery tells the ends, too
    last = len(lender.notes) - 1 - lender.notes[::-1].index("lend")
    assert lender.notes[-1] == "back"  # and not before: one that was lent again since is kept
    assert lender.notes[last:].count("sent") >= 2 * LENDING_EVENTS


def test_no_core_is_lent_to_tell_a_few() -> None:
    lender = Lender()
    asyncio.run(tell(LENDING_EVENTS // 4, lender.notes, lender))
    assert "lend" not in lender.notes
    assert lender.notes.count("sent") >= LENDING_EVENTS // 4 * 5


def test_an_engine_without_a_core_to_lend_tells_as_well() -> None:
    notes: list[str] = []
    asyncio.run(tell(2 * LENDING_EVENTS, notes, None))
    assert notes.count("sent") >= 2 * LENDING_EVENTS * 5


class Diary:
    """A listener that takes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[Event | RequestError] = []
        self.changed = asyncio.Event()

    def take(self, event: Event, now_us: int) -> None:
        self.heard.append(event)
        self.changed.set()

    def fail(self, error: RequestError) -> None:
        self.heard.append(error)
        self.changed.set()


def new_request(engine: AsyncEngine, num_prompt: int = 3) -> Request:
    return Request(engine.next_id(), array("i", [1] * num_prompt), SamplingParams(max_tokens=40), seed=0)


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[AsyncEngine]:
    executor = FakeExecutor(GROUPS, LIMITS.num_blocks, LIMITS.block_size)
    engine = AsyncEngine(Engine(Scheduler(LIMITS, GROUPS, FCFS()), executor))
    engine.start()
    yield engine
    await engine.stop()


async def until_idle(engine: AsyncEngine) -> None:
    while not engine.is_idle:
        await asyncio.sleep(0.001)


async def test_a_request_that_is_refused_hears_why_and_nothing_else() -> None:
    async with running() as engine:
        diary = Diary()
        with engine.stream(new_request(engine, LIMITS.max_len + 1), diary) as stream:
            await diary.changed.wait()
            assert stream.has_ended
        await until_idle(engine)
    (refusal,) = diary.heard
    assert isinstance(refusal, RequestError) and str(LIMITS.max_len) in str(refusal)


async def test_whoever_leaves_early_ends_the_request_and_hears_no_more() -> None:
    async with running() as engine:
        diary = Diary()
        with engine.stream(new_request(engine), diary) as stream:
            await diary.changed.wait()
            num_heard = len(diary.heard)
        await until_idle(engine)
        await asyncio.sleep(0)
    assert len(diary.heard) == num_heard
    assert not stream.has_ended


async def test_nothing_is_heard_after_the_last_event() -> None:
    async with running() as engine:
        diary = Diary()
        with engine.stream(new_request(engine), diary) as stream:
            last = Finished(stream.request.id, FinishReason.LENGTH, Usage(3, 0, 0, 0, None))
            while not stream.has_ended:
                await diary.changed.wait()
                diary.changed.clear()
            stream.put(last, 1)
    assert sum(isinstance(event, Finished) for event in diary.heard) == 1
