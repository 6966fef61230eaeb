"""Whatever happens in whatever order, every request is answered as if it were alone, and no invariant ever breaks."""

from __future__ import annotations

import random
from array import array
from dataclasses import astuple, dataclass

from driver import FULL, Driver, window_group
from fake_executor import VOCAB_SIZE, draw, kept_tokens, solo_answer
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sched import FCFS, Order, Priority, Static
from headrace.types import FinishReason, KVGroup, Limits, Request, SamplingParams, StepPlan

GROUPS = (
    (FULL,),
    (FULL, window_group(5)),
    (window_group(3), FULL, window_group(8)),
    (window_group(6),),
)
ORDERS: tuple[Order, ...] = (FCFS(), Priority(), Static())


@dataclass(frozen=True)
class Scenario:
    """Everything that happens, so that the same thing can happen twice."""

    limits: Limits
    groups: tuple[KVGroup, ...]
    order: Order
    has_prefix_cache: bool
    requests: tuple[Request, ...]
    actions: tuple[str, ...]
    seed: int


ACTIONS = ("add", "add", "step", "step", "step", "step", "cancel", "rollback", "add in step", "cancel in step")


@st.composite
def scenarios(draw_value: st.DrawFn) -> Scenario:
    groups = draw_value(st.sampled_from(GROUPS))
    block_size = draw_value(st.integers(1, 5))
    max_len = draw_value(st.integers(4, 40))
    num_blocks = tuple(draw_value(st.integers(2, 24)) for _ in groups)
    limits = Limits(
        max_seqs=draw_value(st.integers(1, 6)),
        max_step_tokens=draw_value(st.integers(1, 20)),
        max_len=max_len,
        block_size=block_size,
        num_blocks=num_blocks,
        lookahead=draw_value(st.integers(0, 3)),
    )
    rng = random.Random(draw_value(st.integers(0, 2**32 - 1)))
    requests = tuple(_random_request(rng, index, max_len) for index in range(draw_value(st.integers(1, 10))))
    actions = draw_value(st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=60))
    return Scenario(
        limits=limits,
        groups=groups,
        order=draw_value(st.sampled_from(ORDERS)),
        has_prefix_cache=draw_value(st.sampled_from((True, True, True, False))),
        requests=requests,
        actions=tuple(actions),
        seed=rng.getrandbits(32),
    )


def _random_request(rng: random.Random, index: int, max_len: int) -> Request:
    """One of three texts, up to some length, then its own tail: prefixes are shared, wholly or in part."""
    family = rng.randrange(3)
    shared = [(family + position * 7) % VOCAB_SIZE for position in range(rng.randint(0, max_len))]
    prompt = (shared + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 3))])[:max_len] or [family]
    max_tokens = rng.choice([None, 0, 1, 4, 12])
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(rng.randint(0, 3), max_tokens or 0),
        logprobs=rng.choice([None, None, 0]),
        prompt_logprobs=rng.choice([None, None, None, 0]),
        presence_penalty=rng.choice([0.0, 0.0, 1.0]),
    )
    return Request(
        id=index,
        prompt=array("i", prompt),
        params=params,
        seed=rng.randrange(2),
        stop_ids=frozenset(rng.sample(range(VOCAB_SIZE), rng.randint(0, 6))),
        priority=rng.randint(0, 2),
        cache_salt=rng.choice([b"", b"", b"tenant"]),
    )


def _random_drafts(rng: random.Random, driver: Driver, scenario: Scenario) -> dict[int, list[int]]:
    """Drafts that are right, wrong after a while, or nonsense; for some, also for requests that cannot take any."""
    drafts = {}
    for request in scenario.requests:
        if request.id not in driver.answers or rng.random() < 0.3:
            continue
        tokens = [*request.prompt, *driver.tokens_of(request.id)]
        drafts[request.id] = []
        for _ in range(rng.randint(0, 5)):
            token = draw([kept_tokens(group, tokens) for group in scenario.groups], request.seed)
            if token < 0 or rng.random() < 0.25:
                token = rng.randrange(VOCAB_SIZE)
            drafts[request.id].append(token)
            tokens.append(token)
    return drafts


def run(scenario: Scenario) -> Driver:
    driver = Driver(scenario.limits, scenario.groups, scenario.order, has_prefix_cache=scenario.has_prefix_cache)
    rng = random.Random(scenario.seed)
    waiting = list(scenario.requests)

    def add() -> None:
        if waiting:
            driver.add(waiting.pop(0))

    def cancel() -> None:
        driver.cancel(rng.randrange(len(scenario.requests)))

    for action in scenario.actions:
        if action == "add":
            add()
        elif action == "cancel":
            if rng.random() < 0.3:
                cancel()
        elif (plan := driver.plan(_random_drafts(rng, driver, scenario))) is not None:
            if action == "add in step":
                add()
            if action == "cancel in step":
                driver.cancel(rng.choice(plan.requests).id)
            if action == "rollback":
                driver.rollback(plan)
            else:
                driver.commit(plan)
    while waiting:
        add()
    while (plan := driver.plan(_random_drafts(rng, driver, scenario))) is not None:
        driver.commit(plan)
        assert len(driver.plans) < 5000, "no progress"
    return driver


def columns(plan: StepPlan) -> tuple[object, ...]:
    ids = tuple(request.id for request in plan.requests)
    return (ids, *(column for column in astuple(plan)[2:]))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(scenarios())
def test_every_answer_equals_the_one_given_alone(scenario: Scenario) -> None:
    driver = run(scenario)
    context = driver.scheduler._context
    assert driver.finished.keys() == driver.answers.keys()
    for request in scenario.requests:
        if request.id not in driver.answers:
            assert len(request.prompt) + 1 > context
            continue
        answer, alone = driver.answers[request.id], solo_answer(request, scenario.groups, context)
        if request.params.logprobs is None:
            alone.logprobs.clear()
        usage = driver.finished[request.id].usage
        assert usage.prompt_tokens == len(request.prompt)
        assert usage.completion_tokens == len(answer.tokens)
        if answer.reason is FinishReason.CANCELLED:
            assert answer.tokens == alone.tokens[: len(answer.tokens)]
            assert answer.logprobs == alone.logprobs[: len(answer.logprobs)]
            assert answer.prompt_logprobs == alone.prompt_logprobs[: len(answer.prompt_logprobs)]
        else:
            assert answer == alone
    assert driver.scheduler.num_free_blocks == scenario.limits.num_blocks
    assert not driver.scheduler.num_running and not driver.scheduler.num_waiting


@settings(max_examples=60, deadline=None, derandomize=True)
@given(scenarios())
def test_the_same_inputs_give_the_same_plans(scenario: Scenario) -> None:
    first, second = run(scenario), run(scenario)
    assert [columns(plan) for plan in first.plans] == [columns(plan) for plan in second.plans]
    assert first.finished == second.finished
    assert first.preempted == second.preempted


@settings(max_examples=60, deadline=None, derandomize=True)
@given(scenarios())
def test_the_first_in_order_always_gets_on(scenario: Scenario) -> None:
    """Of what runs, the first in order is never preempted by those behind it."""
    driver = run(scenario)
    ranks = {request.id: scenario.order.rank(request, request.id) for request in scenario.requests}
    for event in driver.preempted:
        assert any(ranks[other.id] < ranks[event.request_id] for other in scenario.requests)
