"""The engine's loop and its thread: what one request suffers never reaches another, and nothing is lost at the end."""

from __future__ import annotations

import threading
import time
from array import array
from dataclasses import dataclass, field, replace

import pytest

from fake_executor import FakeExecutor, solo_answer
from headrace.engine.engine import Delivery, Engine, EngineThread, Rejected
from headrace.run.executor import Foresee
from headrace.run.isolate import run_isolated
from headrace.sched import FCFS, Scheduler
from headrace.types import (
    Event,
    Finished,
    FinishReason,
    InvariantError,
    KVGroup,
    KVKind,
    Limits,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
    Tokens,
)

GROUPS = (KVGroup(KVKind.FULL, (0,), 1, 1),)
LIMITS = Limits(max_seqs=8, max_step_tokens=16, max_len=64, block_size=4, num_blocks=(64,))


class PoisonError(RuntimeError):
    pass


@dataclass
class PoisonExecutor:
    """Fails whenever the plan holds one of the poisoned requests."""

    inner: FakeExecutor = field(default_factory=lambda: FakeExecutor(GROUPS, LIMITS.num_blocks, LIMITS.block_size))
    poisoned: set[int] = field(default_factory=set)
    fails_next: int = 0  # steps that fail whatever is in them
    raises_next: type[BaseException] | None = None
    distorts_next: bool = False  # the next result has a token too many
    blocks: threading.Event | None = None  # steps wait for it
    is_running: threading.Event = field(default_factory=threading.Event)
    plans: list[StepPlan] = field(default_factory=list)

    def run(self, plan: StepPlan, masks: object = None, foresee: Foresee | None = None) -> StepResult:
        self.plans.append(plan)
        self.is_running.set()
        if self.blocks is not None:
            assert self.blocks.wait(10)
        if (error := self.raises_next) is not None:
            self.raises_next = None
            raise error
        if self.distorts_next:
            self.distorts_next = False
            result = self.inner.run(plan)
            return replace(result, tokens=result.tokens + array("i", [0]))
        if self.fails_next:
            self.fails_next -= 1
            raise PoisonError("a passing fault")
        if self.poisoned & {request.id for request in plan.requests}:
            raise PoisonError("a lasting fault")
        return self.inner.run(plan, masks, foresee)


def make_engine(executor: PoisonExecutor) -> Engine:
    return Engine(Scheduler(LIMITS, GROUPS, FCFS()), executor)


def make_request(request_id: int, num_prompt: int = 5, max_tokens: int = 6) -> Request:
    prompt = array("i", [(request_id * 7 + i) % 40 for i in range(num_prompt)])
    return Request(request_id, prompt, SamplingParams(max_tokens=max_tokens, logprobs=0), seed=request_id)


def run_out(engine: Engine) -> list[Event]:
    events: list[Event] = []
    for _ in range(200):
        if not engine.has_work:
            return events
        events += engine.step()
    raise AssertionError("the engine does not come to an end")


def answer_of(events: list[Event], request_id: int) -> list[int]:
    return [token for e in events if isinstance(e, Tokens) and e.request_id == request_id for token in e.tokens]


def end_of(events: list[Event], request_id: int) -> Finished:
    (end,) = [e for e in events if isinstance(e, Finished) and e.request_id == request_id]
    return end


def expected(request: Request) -> list[int]:
    return solo_answer(request, GROUPS, LIMITS.max_len).tokens


@pytest.fixture
def executor() -> PoisonExecutor:
    return PoisonExecutor()


def test_the_next_step_of_decodes_is_planned_while_one_runs(executor: PoisonExecutor) -> None:
    engine = make_engine(executor)
    engine.add(make_request(1))
    while not any(isinstance(event, Tokens) for event in engine.step()):
        continue
    engine.step()
    foreseen = engine.scheduler._foresight._next
    assert foreseen is not None
    engine.step()
    assert executor.plans[-1] is foreseen


def test_a_request_that_makes_steps_fail_fails_alone(executor: PoisonExecutor) -> None:
    executor.poisoned = {2}
    engine = make_engine(executor)
    requests = [make_request(i) for i in (1, 2, 3)]
    for request in requests:
        assert engine.add(request) is None
    events = run_out(engine)
    assert end_of(events, 2).reason is FinishReason.ERROR
    assert "failed" in end_of(events, 2).message
    for request in (requests[0], requests[2]):
        assert answer_of(events, request.id) == expected(request)
        assert end_of(events, request.id).reason is FinishReason.LENGTH
    assert engine.counts.failed_steps == 1
    assert engine.scheduler.num_free_blocks == LIMITS.num_blocks


def test_a_passing_fault_costs_nobody_an_answer(executor: PoisonExecutor) -> None:
    engine = make_engine(executor)
    requests = [make_request(i, num_prompt=9) for i in (1, 2)]
    for request in requests:
        engine.add(request)
    engine.step()
    executor.fails_next = 1
    events = run_out(engine)
    for request in requests:
        assert answer_of(events, request.id)[-3:] == expected(request)[-3:]
        assert end_of(events, request.id).reason is FinishReason.LENGTH


def test_when_every_request_of_a_step_fails_the_engine_goes_on(executor: PoisonExecutor) -> None:
    executor.poisoned = {1, 2}
    engine = make_engine(executor)
    engine.add(make_request(1))
    engine.add(make_request(2, num_prompt=30))  # a middle chunk of a prompt fails too
    events = run_out(engine)
    assert {end_of(events, i).reason for i in (1, 2)} == {FinishReason.ERROR}
    engine.add(make_request(3))
    assert answer_of(run_out(engine), 3) == expected(make_request(3))


def test_running_slices_one_by_one_gives_what_the_step_gives(executor: PoisonExecutor) -> None:
    scheduler = Scheduler(LIMITS, GROUPS, FCFS())
    for i in (1, 2, 3):
        scheduler.add(make_request(i, num_prompt=4 + i))
    plan = scheduler.plan(0)
    assert plan is not None and plan.num_slices == 3
    outcome = run_isolated(executor, plan)
    assert outcome.failed == ()
    assert outcome.result == executor.run(plan)


def test_a_step_with_nothing_to_do_gives_nothing(executor: PoisonExecutor) -> None:
    engine = make_engine(executor)
    assert engine.step() == []
    assert engine.counts.steps == 0


def test_a_step_that_ctrl_c_ends_is_taken_back_and_can_be_run_again(executor: PoisonExecutor) -> None:
    engine, request = make_engine(executor), make_request(1)
    engine.add(request)
    events = engine.step()
    executor.raises_next = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    events += run_out(engine)
    assert answer_of(events, 1) == expected(request)


def test_a_result_that_is_not_the_plans_is_taken_back_too(executor: PoisonExecutor) -> None:
    engine, request = make_engine(executor), make_request(1)
    engine.add(request)
    executor.distorts_next = True
    with pytest.raises(InvariantError):
        engine.step()
    assert answer_of(run_out(engine), 1) == expected(request)
    assert engine.counts.failed_steps == 1


def test_a_closed_engine_takes_no_request(executor: PoisonExecutor) -> None:
    engine = make_engine(executor)
    engine.is_closed = True
    rejection = engine.add(make_request(1))
    assert rejection is not None and "closed" in rejection.message


# The thread ---------------------------------------------------------------------------------------------------


class Deliveries:
    """What the engine's thread delivered, and a way to wait for it."""

    def __init__(self) -> None:
        self.all: list[Delivery] = []
        self._changed = threading.Condition()

    def __call__(self, delivery: Delivery) -> None:
        with self._changed:
            self.all.append(delivery)
            self._changed.notify_all()

    def events(self) -> list[Event | Rejected]:
        return [event for delivery in self.all for event in delivery.events]

    def wait_for_ends(self, count: int) -> None:
        def has_ended() -> bool:
            return sum(isinstance(event, Finished | Rejected) for event in self.events()) >= count

        with self._changed:
            assert self._changed.wait_for(has_ended, timeout=10)


def wait_for_stop(thread: EngineThread) -> None:
    """Until stop() was called, on whatever thread."""
    deadline = time.monotonic() + 10
    while not thread._is_stopping:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_requests_from_many_threads_are_all_answered(executor: PoisonExecutor) -> None:
    deliveries = Deliveries()
    thread = EngineThread(make_engine(executor), deliveries)
    thread.start()
    requests = [make_request(i) for i in range(1, 25)]
    senders = [
        threading.Thread(target=lambda part=part: [thread.submit(request) for request in part])
        for part in (requests[::3], requests[1::3], requests[2::3])
    ]
    for sender in senders:
        sender.start()
    deliveries.wait_for_ends(len(requests))
    thread.stop()
    for request in requests:
        assert answer_of(deliveries.events(), request.id) == expected(request)


def test_an_idle_engine_waits_for_requests_on_their_way_and_runs_them_in_one_step(
    executor: PoisonExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engine.engine.GATHER_S", 10.0)
    deliveries = Deliveries()
    thread = EngineThread(make_engine(executor), deliveries)
    thread.expect(2)
    thread.submit(make_request(1))
    thread.start()
    thread.submit(make_request(2))
    thread.expect(-2)
    deliveries.wait_for_ends(2)
    thread.stop()
    assert {event.request_id for event in deliveries.all[0].events} == {1, 2}


def test_a_request_that_never_comes_does_not_hold_up_the_others(executor: PoisonExecutor) -> None:
    deliveries = Deliveries()
    thread = EngineThread(make_engine(executor), deliveries)
    thread.start()
    thread.expect(1)
    thread.submit(make_request(1))
    deliveries.wait_for_ends(1)
    thread.stop()
    assert answer_of(deliveries.events(), 1) == expected(make_request(1))


def test_what_can_never_run_is_told_so(executor: PoisonExecutor) -> None:
    deliveries = Deliveries()
    thread = EngineThread(make_engine(executor), deliveries)
    thread.start()
    thread.submit(make_request(1, num_prompt=100))
    deliveries.wait_for_ends(1)
    thread.stop()
    (rejected,) = deliveries.events()
    assert isinstance(rejected, Rejected)
    assert "100 tokens" in rejected.rejection.message


def test_what_is_unfinished_when_the_thread_stops_is_told_so(executor: PoisonExecutor) -> None:
    blocked, go = threading.Event(), threading.Event()
    deliveries = Deliveries()
    engine = make_engine(executor)

    def slow_step(plan: StepPlan, masks: object = None) -> StepResult:
        blocked.set()
        go.wait(10)
        return PoisonExecutor.run(executor, plan)

    engine.executor = type("Slow", (), {"run": staticmethod(slow_step)})()
    thread = EngineThread(engine, deliveries)
    thread.start()
    thread.submit(make_request(1, max_tokens=50))
    assert blocked.wait(10)
    stopper = threading.Thread(target=thread.stop)
    stopper.start()
    wait_for_stop(thread)  # it is asked for while the step runs
    go.set()
    stopper.join(10)
    assert not thread.is_alive
    assert end_of(deliveries.events(), 1).reason is FinishReason.CANCELLED
    assert engine.scheduler.num_free_blocks == LIMITS.num_blocks


def test_an_idle_thread_uses_no_processor_time(executor: PoisonExecutor) -> None:
    thread = EngineThread(make_engine(executor), Deliveries())
    thread.start()
    assert thread.is_idle()
    before = time.process_time()
    time.sleep(0.3)
    used = time.process_time() - before
    thread.stop()
    assert used < 0.05


def test_when_the_engine_itself_fails_every_request_is_told_and_new_ones_are_answered(
    executor: PoisonExecutor,
) -> None:
    deliveries, engine = Deliveries(), make_engine(executor)
    executor.distorts_next = True
    thread = EngineThread(engine, deliveries)
    for i in (1, 2):
        thread.submit(make_request(i))
    thread.submit(make_request(3, num_prompt=100))  # refused in the same turn: that must not be lost either
    thread.start()
    deliveries.wait_for_ends(3)
    assert {end_of(deliveries.events(), i).reason for i in (1, 2)} == {FinishReason.ERROR}
    assert any(isinstance(event, Rejected) and event.request_id == 3 for event in deliveries.events())
    thread.submit(make_request(4))
    deliveries.wait_for_ends(4)
    thread.stop()
    assert answer_of(deliveries.events(), 4) == expected(make_request(4))
    assert engine.scheduler.num_free_blocks == LIMITS.num_blocks


def test_an_engine_that_never_works_again_still_answers_everybody(executor: PoisonExecutor) -> None:
    class Broken(Scheduler):
        def plan(self, now_us: int, drafts: object = None) -> StepPlan:
            raise InvariantError("plan")

        def cancel(self, request_id: int) -> list[Event]:
            raise InvariantError("cancel")

    deliveries = Deliveries()
    thread = EngineThread(Engine(Broken(LIMITS, GROUPS, FCFS()), executor), deliveries)
    thread.start()
    for i in (1, 2, 3):
        thread.submit(make_request(i))
        deliveries.wait_for_ends(i)
    thread.stop()
    assert {end_of(deliveries.events(), i).reason for i in (1, 2, 3)} == {FinishReason.ERROR}


def test_a_delivery_that_fails_does_not_end_the_thread(executor: PoisonExecutor) -> None:
    deliveries = Deliveries()
    failures = iter([True])

    def deliver(delivery: Delivery) -> None:
        deliveries(delivery)
        if next(failures, False):
            raise RuntimeError("the loop is closed")

    thread = EngineThread(make_engine(executor), deliver)
    thread.start()
    thread.submit(make_request(1))
    deliveries.wait_for_ends(1)
    thread.stop()
    assert end_of(deliveries.events(), 1).reason is FinishReason.LENGTH


def test_requests_that_nobody_took_in_before_the_stop_are_told_so(executor: PoisonExecutor) -> None:
    deliveries = Deliveries()
    thread = EngineThread(make_engine(executor), deliveries)
    executor.blocks = threading.Event()
    thread.start()
    thread.submit(make_request(1))
    assert executor.is_running.wait(10)
    stopper = threading.Thread(target=thread.stop)
    stopper.start()
    thread.submit(make_request(2, num_prompt=7))  # into the inbox of a thread that is about to end
    wait_for_stop(thread)
    executor.blocks.set()
    stopper.join(10)
    thread.submit(make_request(3))  # after its end
    deliveries.wait_for_ends(3)
    assert {end_of(deliveries.events(), i).reason for i in (1, 2, 3)} == {FinishReason.CANCELLED}
    assert end_of(deliveries.events(), 2).usage.prompt_tokens == 7


def test_no_request_is_lost_when_many_are_submitted_while_the_thread_stops(executor: PoisonExecutor) -> None:
    deliveries = Deliveries()
    thread = EngineThread(make_engine(executor), deliveries)
    thread.start()
    senders = [
        threading.Thread(target=lambda part=part: [thread.submit(make_request(i)) for i in part])
        for part in (range(1, 100), range(100, 200))
    ]
    for sender in senders:
        sender.start()
    thread.stop()
    for sender in senders:
        sender.join(10)
    deliveries.wait_for_ends(199)
    assert len([e for e in deliveries.events() if isinstance(e, Finished)]) == 199
