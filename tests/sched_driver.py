"""Drives a scheduler with the fake executor, checks its invariants after every operation and collects the answers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from fake_executor import VOCAB_SIZE, Answer, FakeExecutor
from headrace.sched import FCFS, Order, Scheduler
from headrace.types import (
    Event,
    Finished,
    KVGroup,
    KVKind,
    Limits,
    Preempted,
    Rejection,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
    Tokens,
)

FULL = KVGroup(KVKind.FULL, (0,), 1, 1)
ONE_GROUP = (FULL,)


def window_group(window: int) -> KVGroup:
    return KVGroup(KVKind.WINDOW, (1,), 1, 1, window)


def limits(
    max_seqs: int = 4,
    max_step_tokens: int = 16,
    max_len: int = 64,
    block_size: int = 4,
    num_blocks: tuple[int, ...] = (32,),
    lookahead: int = 0,
    max_chunk_tokens: int | None = None,
    num_eager: tuple[int, ...] | None = None,
) -> Limits:
    return Limits(max_seqs, max_step_tokens, max_len, block_size, num_blocks, lookahead, max_chunk_tokens, num_eager)


def request(request_id: int, prompt: Sequence[int] | int, **fields: object) -> Request:
    """A request whose prompt is given, or is that many tokens which no other request has. Draws never stop it."""
    if isinstance(prompt, int):
        prompt = [VOCAB_SIZE + 1 + request_id, *(position % VOCAB_SIZE for position in range(1, prompt))][:prompt]
    names = SamplingParams.__dataclass_fields__
    params = SamplingParams(**{name: value for name, value in fields.items() if name in names and name != "seed"})
    others = {name: value for name, value in fields.items() if name not in names or name == "seed"}
    return Request(**{"id": request_id, "prompt": array("i", prompt), "params": params, "seed": 0, **others})


class Driver:
    """A scheduler, the executor of its plans and the answers so far."""

    def __init__(
        self,
        limits: Limits,
        groups: tuple[KVGroup, ...] = ONE_GROUP,
        order: Order | None = None,
        *,
        has_prefix_cache: bool = True,
        is_foreseeing: bool = True,
    ) -> None:
        self.is_foreseeing = is_foreseeing
        self.limits = limits
        self.scheduler = Scheduler(limits, groups, order or FCFS(), has_prefix_cache=has_prefix_cache)
        self.executor = FakeExecutor(groups, limits.num_blocks, limits.block_size)
        self.answers: dict[int, Answer] = {}
        self.finished: dict[int, Finished] = {}
        self.preempted: list[tuple[StepPlan, Preempted]] = []  # with the plan that decided it
        self.plans: list[StepPlan] = []
        self.foreseen: list[StepPlan | None] = []  # beside each of them, of the next one
        self.now_us = 0

    def add(self, *requests: Request) -> list[Rejection | None]:
        rejections = [self.scheduler.add(request) for request in requests]
        for request, rejection in zip(requests, rejections, strict=True):
            if rejection is None:
                self.answers[request.id] = Answer()
        self.scheduler.check()
        return rejections

    def cancel(self, request_id: int) -> None:
        self._collect(self.scheduler.cancel(request_id))

    def plan(self, drafts: Mapping[int, Sequence[int]] | None = None) -> StepPlan | None:
        self.now_us += 10
        has_work = self.scheduler.has_work
        plan = self.scheduler.plan(self.now_us, drafts)
        self.scheduler.check()
        assert (plan is not None) == has_work
        if plan is not None:
            if self.is_foreseeing:
                self.foreseen.append(self.scheduler.foresee())
            self.plans.append(plan)
            assert 0 < plan.num_tokens <= self.limits.max_step_tokens
            assert plan.num_slices <= self.limits.max_seqs
            assert all(count <= self.limits.lookahead for count in plan.num_drafts)
            assert len({request.id for request in plan.requests}) == plan.num_slices
        return plan

    def commit(self, plan: StepPlan) -> StepResult:
        result = self.executor.run(plan)
        self._collect(self.scheduler.commit(result))
        return result

    def rollback(self, plan: StepPlan) -> None:
        """The step wrote all that it was to write, and failed then."""
        self.executor.run(plan)
        self.scheduler.rollback(plan.step)
        self.scheduler.check()

    def step(self, drafts: Mapping[int, Sequence[int]] | None = None) -> StepPlan | None:
        plan = self.plan(drafts)
        if plan is not None:
            self.commit(plan)
        return plan

    def finish(self, max_steps: int = 1000) -> int:
        """Step until nothing is left to do; returns the number of steps. Fails if that takes more than `max_steps`."""
        for count in range(max_steps):
            if self.step() is None:
                return count
        raise AssertionError(f"there is work left after {max_steps} steps")

    def step_until_preempted(self) -> StepPlan:
        """Step until a request is preempted; returns the plan that decided it."""
        for _ in range(100):
            plan = self.step()
            if self.preempted and plan is not None:
                return plan
        raise AssertionError("nobody is preempted")

    def tokens_of(self, request_id: int) -> list[int]:
        return self.answers[request_id].tokens

    def _collect(self, events: list[Event]) -> None:
        for event in events:
            assert event.request_id not in self.finished, "something is said of a request that has ended"
            match event:
                case Tokens():
                    answer = self.answers[event.request_id]
                    assert event.tokens or event.prompt_logprobs
                    assert event.logprobs is None or len(event.logprobs) == len(event.tokens)
                    answer.tokens.extend(event.tokens)
                    answer.logprobs.extend(event.logprobs or ())
                    answer.prompt_logprobs.extend(event.prompt_logprobs or ())
                case Finished():
                    self.finished[event.request_id] = event
                    self.answers[event.request_id].reason = event.reason
                case Preempted():
                    self.preempted.append((self.plans[-1], event))
        self.scheduler.check()


def slice_ids(plan: StepPlan | None) -> list[int]:
    """Request ids in a plan, in the order of its slices."""
    return [] if plan is None else [request.id for request in plan.requests]


def fed(plan: StepPlan | None) -> dict[int, int]:
    """Tokens fed, by request id."""
    return {} if plan is None else {part.request.id: len(part.tokens) for part in plan.slices()}
