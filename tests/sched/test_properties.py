"""Whatever happens in whatever order, every request is answered as if it were alone, and no invariant ever breaks."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import astuple, dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from fake_executor import VOCAB_SIZE, draw, kept_tokens, solo_answer
from headrace.sched import FCFS, Order, Priority, Static
from headrace.types import FinishReason, KVGroup, Limits, Request, SamplingParams, StepPlan
from sched_driver import FULL, Driver, slice_ids, window_group

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


ACTIONS = ("add", "add four", "step", "step", "step", "cancel", "rollback", "add in step", "cancel in step")


@st.composite
def scenarios(draw_value: st.DrawFn) -> Scenario:
    """Sizes are drawn so that blocks, seats and the budget all run short, most often more than one of them."""
    groups = draw_value(st.sampled_from(GROUPS))
    block_size = draw_value(st.sampled_from((4, 1, 2, 3)))
    max_len = draw_value(st.integers(8, 40))
    rng = random.Random(draw_value(st.integers(0, 2**32 - 1)))
    num_slots = [int(max_len * rng.uniform(0.6, 2.5)) for _ in groups]
    limits = Limits(
        max_seqs=draw_value(st.sampled_from((4, 3, 8, 1, 2))),
        max_step_tokens=draw_value(st.sampled_from((16, 8, 32, 5, 3, 2, 1))),
        max_len=max_len,
        block_size=block_size,
        num_blocks=tuple(max(1, count // block_size) for count in num_slots),
        num_eager=draw_value(st.sampled_from((None, tuple(count // block_size // 4 for count in num_slots)))),
        lookahead=draw_value(st.integers(0, 3)),
        max_chunk_tokens=draw_value(st.sampled_from((None, 1, 3, 8))),
    )
    num_requests = draw_value(st.integers(2, 12))
    max_prompt = max(1, int(max_len * draw_value(st.sampled_from((0.5, 0.25, 0.8, 1.0)))))
    return Scenario(
        limits=limits,
        groups=groups,
        order=draw_value(st.sampled_from(ORDERS)),
        has_prefix_cache=draw_value(st.sampled_from((True, True, True, False))),
        requests=tuple(_random_request(rng, index, max_prompt) for index in range(num_requests)),
        actions=tuple(draw_value(st.lists(st.sampled_from(ACTIONS), min_size=4, max_size=40))),
        seed=rng.getrandbits(32),
    )


def _random_request(rng: random.Random, index: int, max_prompt: int) -> Request:
    """One of two texts up to some length, then a tail of its own: prefixes are shared, wholly or in part."""
    family = rng.randrange(2)
    length = rng.choice([max_prompt, rng.randint(0, max_prompt)])
    shared = [(family + position * 7) % VOCAB_SIZE for position in range(length)]
    prompt = (shared + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 3))])[:max_prompt] or [family]
    max_tokens = rng.choice([None, None, 0, 1, 4, 12])
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
        stop_ids=frozenset(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 3]))),
        priority=rng.randint(0, 2),
        cache_salt=rng.choice([b"", b"", b"", b"tenant"]),
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


def run(
    scenario: Scenario,
    check_plan: Callable[[Driver, StepPlan], None] = lambda driver, plan: None,
    *,
    is_foreseeing: bool = True,
) -> Driver:
    driver = Driver(
        scenario.limits,
        scenario.groups,
        scenario.order,
        has_prefix_cache=scenario.has_prefix_cache,
        is_foreseeing=is_foreseeing,
    )
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
        elif action == "add four":
            for _ in range(4):
                add()
        elif action == "cancel":
            if rng.random() < 0.3:
                cancel()
        elif (plan := driver.plan(_random_drafts(rng, driver, scenario))) is not None:
            check_plan(driver, plan)
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
        check_plan(driver, plan)
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
            assert len(request.prompt) + (request.params.max_tokens != 0) > context
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


@settings(max_examples=200, deadline=None, derandomize=True)
@given(scenarios())
def test_foreseeing_changes_no_plan(scenario: Scenario) -> None:
    foreseeing, surprised = run(scenario), run(scenario, is_foreseeing=False)
    assert [columns(plan) for plan in foreseeing.plans] == [columns(plan) for plan in surprised.plans]
    assert foreseeing.finished == surprised.finished


@settings(max_examples=60, deadline=None, derandomize=True)
@given(scenarios())
def test_a_sequence_is_preempted_only_for_one_before_it_in_the_order(scenario: Scenario) -> None:
    """So the first in order always gets on, and every sequence ends."""
    driver = run(scenario)
    for plan, event in driver.preempted:
        rank = {request.id: scenario.order.rank(request, request.id) for request in scenario.requests}
        assert min(rank[other] for other in slice_ids(plan)) < rank[event.request_id]


def _check_that_no_token_is_wasted(driver: Driver, plan: StepPlan) -> None:
    """If neither the step nor its chunk is full, who runs lacks nothing or a block, and who waits lacks a seat or
    blocks, or is led, or comes behind as many who are led as could run.
    """
    scheduler, tables = driver.scheduler, driver.scheduler._tables
    if plan.num_tokens == driver.limits.max_step_tokens:
        return
    running = scheduler._running
    chunk = [seq.num_in_flight for seq in running if seq.num_remaining > 1]
    max_chunk = driver.limits.max_chunk_tokens
    if max_chunk is not None and len(chunk) < plan.num_slices and sum(chunk) >= max_chunk:
        return
    for seq in running:
        lacks_block = seq.num_computed + seq.num_in_flight == seq.num_slots and not tables.min_free()
        assert seq.num_in_flight >= seq.num_wanted or lacks_block
    if len(running) == driver.limits.max_seqs:
        return
    leaders = [seq for seq in running if seq.num_in_flight and seq.num_computed < seq.num_prompt]
    is_led = [tables.is_led(seq, leaders) for seq in scheduler._waiting]
    if False not in is_led or (num_led := is_led.index(False)) >= driver.limits.max_seqs:
        return
    first = scheduler._waiting[num_led]
    if not (scheduler._order.is_batched and first.rank > scheduler._batch_end):
        assert not tables.has_room(first, tables.longest_hit(first), len(running), running)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(scenarios())
def test_no_token_of_a_step_is_left_unused_while_someone_could_use_it(scenario: Scenario) -> None:
    run(scenario, _check_that_no_token_is_wasted)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(scenarios())
def test_a_running_sequence_is_left_out_of_a_step_only_for_want_of_a_block(scenario: Scenario) -> None:
    """So every prompt that was let in gets on in every step, however long those before it are."""

    def check(driver: Driver, plan: StepPlan) -> None:
        left_out = [seq for seq in driver.scheduler._running if not seq.num_in_flight]
        assert not left_out or not driver.scheduler._tables.min_free()

    run(scenario, check)
