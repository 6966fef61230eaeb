"""What is planned, what comes of it, and how requests end: one rule per test."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest

from fake_executor import solo_answer
from headrace.sched import FCFS, Scheduler
from headrace.types import (
    FAILED_TOKEN,
    FinishReason,
    InvariantError,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Tokens,
    Usage,
)
from sched_driver import FULL, ONE_GROUP, Driver, fed, limits, request, slice_ids, window_group


def result(plan: StepPlan, *drawn: list[int]) -> StepResult:
    """A result with `drawn` tokens per slice."""
    offsets = array("i", [0])
    for tokens in drawn:
        offsets.append(offsets[-1] + len(tokens))
    nothing = (None,) * len(drawn)
    return StepResult(plan.step, array("i", [token for tokens in drawn for token in tokens]), offsets, nothing, nothing)


# One kind of work -------------------------------------------------------------------------------------------------


def test_a_prompt_is_computed_in_one_step_where_it_fits_and_draws_a_token() -> None:
    driver = Driver(limits())
    driver.add(request(1, 10))
    plan = driver.step()
    assert plan is not None and fed(plan) == {1: 10}
    assert list(plan.targets) == [-1] and list(plan.starts) == [0]
    assert len(driver.tokens_of(1)) == 1


def test_a_decode_feeds_the_token_drawn_last_at_the_next_position() -> None:
    driver = Driver(limits())
    driver.add(request(1, 10))
    driver.step()
    (part,) = list(driver.step().slices())
    assert part.start == 10 and list(part.tokens) == driver.tokens_of(1)[:1]
    assert part.num_logits == 1 and list(part.targets) == [-1]


def test_a_long_prompt_is_computed_in_chunks_and_only_the_last_draws() -> None:
    driver = Driver(limits(max_step_tokens=4))
    driver.add(request(1, 10))
    plans = [driver.step() for _ in range(3)]
    assert [fed(plan)[1] for plan in plans] == [4, 4, 2]
    assert [plan.num_rows for plan in plans] == [0, 0, 1]
    assert len(driver.tokens_of(1)) == 1


def test_decodes_come_first_then_running_prompts_then_who_waits() -> None:
    driver = Driver(limits(max_step_tokens=6))
    driver.add(request(1, 3))
    driver.step()
    driver.add(request(2, 12))
    assert fed(driver.step()) == {1: 1, 2: 5}
    driver.add(request(3, 3))
    assert list(fed(driver.step()).items()) == [(1, 1), (2, 3), (3, 2)]


def test_a_decode_behind_a_long_prompt_in_the_order_still_gets_its_token() -> None:
    driver = Driver(limits(max_step_tokens=4))
    driver.add(request(1, 30), request(2, 1))
    driver.step()
    assert list(fed(driver.step()).items()) == [(2, 1), (1, 3)]


def test_beside_sequences_that_decode_prompts_take_only_a_chunk_of_the_step() -> None:
    driver = Driver(limits(max_step_tokens=12, max_chunk_tokens=3, max_len=60))
    driver.add(request(1, 2, max_tokens=4), request(2, 40))
    assert fed(driver.step()) == {1: 2, 2: 10}  # nobody decodes yet
    assert [fed(driver.step()) for _ in range(3)] == [{1: 1, 2: 3}] * 3
    assert fed(driver.step()) == {2: 12}


def test_a_chunk_has_a_token_for_each_prompt_that_runs() -> None:
    driver = Driver(limits(max_seqs=4, max_step_tokens=16, max_chunk_tokens=1))
    driver.add(request(1, 1, max_tokens=9), request(2, 20), request(3, 20), request(4, 20))
    driver.step()
    assert fed(driver.step()) == {1: 1, 2: 1, 3: 1, 4: 1}


def test_no_more_sequences_run_than_a_step_has_tokens() -> None:
    driver = Driver(limits(max_seqs=8, max_step_tokens=2))
    driver.add(*(request(i, 1, max_tokens=3) for i in range(5)))
    driver.finish()
    assert max(plan.num_slices for plan in driver.plans) == 2
    assert all(len(driver.tokens_of(i)) == 3 for i in range(5))


def test_no_more_sequences_run_than_there_are_seats() -> None:
    driver = Driver(limits(max_seqs=2))
    driver.add(*(request(i, 2, max_tokens=2) for i in range(3)))
    assert slice_ids(driver.step()) == [0, 1]
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (2, 1)
    driver.step()
    assert slice_ids(driver.step()) == [2]


def test_with_nothing_to_do_there_is_no_plan() -> None:
    driver = Driver(limits())
    assert driver.plan() is None and not driver.scheduler.has_work
    driver.add(request(1, 2, max_tokens=1))
    assert driver.scheduler.has_work
    driver.finish()
    assert driver.plan() is None and not driver.scheduler.has_work


def test_a_plan_carries_every_block_that_its_slices_need() -> None:
    driver = Driver(limits(block_size=4, num_blocks=(32, 32)), (FULL, window_group(4)))
    driver.add(request(1, 10), request(2, 3))
    plan = driver.plan()
    for offsets, ids in zip(plan.block_offsets, plan.blocks, strict=True):
        assert list(offsets) == [0, 3, 4] and len(set(ids)) == 4


def test_history_is_there_only_for_requests_whose_penalties_need_it() -> None:
    driver = Driver(limits(lookahead=2))
    driver.add(request(1, [5, 6, 7], presence_penalty=1.0), request(2, 2))
    driver.step()
    plan = driver.plan({1: [8, 9]})
    assert plan.histories == (array("i", [5, 6, 7, *driver.tokens_of(1), 8, 9]), None)


def test_the_same_request_cannot_be_added_twice() -> None:
    driver = Driver(limits())
    driver.add(request(1, 2))
    with pytest.raises(InvariantError, match="added twice"):
        driver.add(request(1, 2))


# Rows for prompt logprobs -----------------------------------------------------------------------------------------


def test_prompt_logprobs_give_every_prompt_position_but_the_last_a_row_with_its_next_token() -> None:
    driver = Driver(limits(max_step_tokens=3))
    driver.add(request(1, [5, 6, 7, 8, 9], prompt_logprobs=0))
    first, second = driver.step(), driver.step()
    assert list(first.targets) == [6, 7, 8]
    assert list(second.targets) == [9, -1]
    assert driver.answers[1].prompt_logprobs == solo_answer(driver.plans[0].requests[0], ONE_GROUP, 64).prompt_logprobs


def test_a_prompt_that_is_only_scored_ends_when_it_is_computed_and_draws_nothing() -> None:
    driver = Driver(limits())
    scored = request(1, [5, 6, 7, 8], prompt_logprobs=0, max_tokens=0)
    driver.add(scored)
    driver.finish()
    assert [list(plan.targets) for plan in driver.plans] == [[6, 7, 8], []]
    assert driver.answers[1] == solo_answer(scored, ONE_GROUP, 64)
    assert driver.finished[1].usage == Usage(4, 0, 0, 0, 10)


@pytest.mark.parametrize("fields", [{}, {"prompt_logprobs": 0}])
def test_a_prompt_of_one_token_with_no_answer_wanted_is_computed_without_a_row(fields: dict[str, int]) -> None:
    driver = Driver(limits(lookahead=2))
    driver.add(request(1, [5], max_tokens=0, **fields))
    plan = driver.plan({1: [1, 2]})
    assert plan.num_rows == 0 and plan.num_tokens == 1
    driver.commit(plan)
    assert driver.finished[1].reason is FinishReason.LENGTH and driver.tokens_of(1) == []


def test_a_prompt_without_answer_or_scores_is_computed_in_one_step() -> None:
    driver = Driver(limits())
    driver.add(request(1, 8, max_tokens=0))
    assert driver.finish() == 1 and driver.plans[0].num_rows == 0
    assert driver.scheduler.num_cached_blocks == (2,)


# Drafts -----------------------------------------------------------------------------------------------------------


def decoding(lookahead: int = 3, **fields: int) -> tuple[Driver, list[int]]:
    """A driver whose request 1 decodes, and the tokens that come next."""
    driver = Driver(limits(lookahead=lookahead))
    decoded = request(1, 5, **fields)
    driver.add(decoded)
    driver.step()
    return driver, solo_answer(decoded, ONE_GROUP, 64).tokens[1:]


def test_right_drafts_are_accepted_with_one_token_drawn_behind_them() -> None:
    driver, expected = decoding()
    plan = driver.plan({1: expected[:3]})
    assert list(plan.num_drafts) == [3] and list(plan.targets) == [-1] * 4
    assert list(plan.tokens[1:]) == expected[:3]
    driver.commit(plan)
    assert driver.tokens_of(1)[1:] == expected[:4]
    assert list(driver.step().starts) == [9]


def test_after_the_first_wrong_draft_the_rest_is_computed_again() -> None:
    driver, expected = decoding()
    driver.step({1: [expected[0], expected[1] ^ 1, expected[2]]})
    assert driver.tokens_of(1)[1:] == expected[:2]
    assert list(driver.step().starts) == [7]
    assert driver.tokens_of(1)[1:] == expected[:3]


@pytest.mark.parametrize(
    ("lookahead", "fields", "num_drafts"), [(2, {}, 2), (8, {}, 6), (8, {"max_tokens": 4}, 2), (0, {}, 0)]
)
def test_drafts_stay_within_lookahead_budget_and_answer(
    lookahead: int, fields: dict[str, int], num_drafts: int
) -> None:
    driver = Driver(limits(lookahead=lookahead, max_step_tokens=7))
    driver.add(request(1, 5, **fields))
    driver.step()
    assert list(driver.step({1: [1] * 9}).num_drafts) == [num_drafts]


def test_drafts_stay_within_the_context() -> None:
    driver = Driver(limits(lookahead=8, max_len=8))
    driver.add(request(1, 5))
    driver.step()
    assert list(driver.step({1: [1] * 8}).num_drafts) == [1]


def test_drafts_leave_every_decode_its_own_token() -> None:
    driver = Driver(limits(lookahead=8, max_step_tokens=4))
    driver.add(request(1, 1), request(2, 1))
    driver.step()
    assert fed(driver.step({1: [1] * 8, 2: [1] * 8})) == {1: 3, 2: 1}


def test_drafts_leave_every_running_prompt_a_token() -> None:
    driver = Driver(limits(lookahead=8, max_step_tokens=6))
    driver.add(request(1, 1), request(2, 9), request(3, 9))
    driver.step()
    assert fed(driver.step({1: [1] * 8})) == {1: 4, 2: 1, 3: 1}


def test_drafts_take_only_blocks_that_are_free_once_every_decode_has_its_own() -> None:
    driver = Driver(limits(lookahead=8, block_size=4, num_blocks=(5,)))
    driver.add(request(1, 4), request(2, 4))
    driver.step()
    assert fed(driver.step({1: [1] * 8, 2: [1] * 8})) == {1: 8, 2: 4}
    assert not driver.preempted


def test_drafts_ride_only_behind_the_last_known_token() -> None:
    driver = Driver(limits(lookahead=4, max_step_tokens=4))
    driver.add(request(1, 10))
    assert all(sum(driver.step({1: [1, 2]}).num_drafts) == 0 for _ in range(3))


def test_an_accepted_draft_that_ends_the_answer_drops_what_comes_after_it() -> None:
    driver, expected = decoding()
    driver.cancel(1)
    driver.add(request(2, driver.plans[0].requests[0].prompt.tolist(), stop_ids=frozenset([expected[1]])))
    driver.step()
    driver.step({2: expected[:3]})
    assert driver.tokens_of(2)[1:] == expected[:2]
    assert driver.finished[2].reason is FinishReason.STOP
    assert driver.finished[2].usage.completion_tokens == 3


# How requests end -------------------------------------------------------------------------------------------------


def drawing(**fields: object) -> tuple[Scheduler, StepPlan]:
    """A scheduler whose request 1 draws its first token in the plan that is out."""
    scheduler = Scheduler(limits(max_len=8, lookahead=3), ONE_GROUP, FCFS())
    scheduler.add(request(1, 5, **fields))
    return scheduler, scheduler.plan(7)


def finish_of(scheduler: Scheduler, plan: StepPlan, tokens: list[int]) -> tuple[list[int], FinishReason]:
    told, finished = scheduler.commit(result(plan, tokens))
    return list(told.tokens), finished.reason


def test_a_stop_token_ends_the_answer_and_is_its_last_token() -> None:
    scheduler, plan = drawing(stop_ids=frozenset([9]))
    told, finished = scheduler.commit(result(plan, [9]))
    assert told == Tokens(1, array("i", [9]))
    assert finished.reason is FinishReason.STOP and finished.usage == Usage(5, 1, 0, 0, 7)


def test_a_stop_token_ends_nothing_before_min_tokens() -> None:
    scheduler, plan = drawing(stop_ids=frozenset([9]), min_tokens=2)
    assert scheduler.commit(result(plan, [9])) == [Tokens(1, array("i", [9]))]
    assert finish_of(scheduler, scheduler.plan(0), [9]) == ([9], FinishReason.STOP)


def test_max_tokens_ends_the_answer() -> None:
    scheduler, plan = drawing(max_tokens=1)
    assert finish_of(scheduler, plan, [3]) == ([3], FinishReason.LENGTH)


def test_a_stop_token_that_is_also_the_last_allowed_is_a_stop() -> None:
    scheduler, plan = drawing(max_tokens=1, stop_ids=frozenset([3]))
    assert finish_of(scheduler, plan, [3]) == ([3], FinishReason.STOP)


def test_a_full_context_ends_the_answer() -> None:
    scheduler, plan = drawing(max_tokens=100)
    scheduler.commit(result(plan, [3]))
    scheduler.commit(result(scheduler.plan(0), [4]))
    assert finish_of(scheduler, scheduler.plan(0), [5]) == ([5], FinishReason.LENGTH)


def test_a_row_that_cannot_be_drawn_ends_the_request_with_an_error_and_no_tokens() -> None:
    scheduler, plan = drawing()
    (finished,) = scheduler.commit(result(plan, [FAILED_TOKEN]))
    assert finished.reason is FinishReason.ERROR and "position 5" in finished.message
    assert scheduler.num_free_blocks == (32,)


def test_drafts_accepted_before_a_row_that_cannot_be_drawn_are_told() -> None:
    scheduler, plan = drawing()
    scheduler.commit(result(plan, [3]))
    plan = scheduler.plan(0, {1: [4, 5]})
    assert finish_of(scheduler, plan, [4, FAILED_TOKEN]) == ([4], FinishReason.ERROR)


def test_what_led_to_no_token_is_not_cached() -> None:
    scheduler, plan = drawing()
    scheduler.commit(result(plan, [FAILED_TOKEN]))
    assert scheduler.num_cached_blocks == (0,)


def test_logprobs_are_cut_with_the_tokens() -> None:
    scheduler, plan = drawing(stop_ids=frozenset([4]), logprobs=0)
    scheduler.commit(result(plan, [3]))
    plan = scheduler.plan(0, {1: [4]})
    scores = tuple(TokenLogprobs(-float(i)) for i in range(2))
    told, _ = scheduler.commit(replace(result(plan, [4, 5]), logprobs=(scores,)))
    assert told.logprobs == scores[:1]


# Cancelling -------------------------------------------------------------------------------------------------------


def test_a_waiting_request_can_be_cancelled() -> None:
    driver = Driver(limits(max_seqs=1))
    driver.add(request(1, 2), request(2, 2))
    driver.step()
    driver.cancel(2)
    assert driver.finished[2].reason is FinishReason.CANCELLED
    assert driver.finished[2].usage == Usage(2, 0, 0, 0, None)
    assert driver.scheduler.num_waiting == 0


def test_cancelling_a_running_request_frees_its_blocks_at_once() -> None:
    driver = Driver(limits())
    driver.add(request(1, 10))
    driver.step()
    driver.cancel(1)
    assert driver.scheduler.num_free_blocks == (32,) and not driver.scheduler.has_work


def test_a_slice_in_flight_keeps_its_blocks_until_its_step_is_back_and_its_result_is_dropped() -> None:
    driver = Driver(limits())
    driver.add(request(1, 10), request(2, 2))
    plan = driver.plan()
    driver.cancel(1)
    assert driver.scheduler.num_free_blocks == (28,)
    driver.commit(plan)
    assert driver.scheduler.num_free_blocks == (31,)
    assert driver.tokens_of(1) == [] and len(driver.tokens_of(2)) == 1


def test_of_a_request_that_was_cancelled_any_result_will_do() -> None:
    driver = Driver(limits())
    driver.add(request(1, 2), request(2, 2))
    plan = driver.plan()
    driver.cancel(1)
    (told,) = driver.scheduler.commit(result(plan, [], [4]))
    assert told.request_id == 2


def test_cancelling_twice_or_what_never_was_says_nothing() -> None:
    driver = Driver(limits())
    driver.add(request(1, 2))
    assert len(driver.scheduler.cancel(1)) == 1
    assert driver.scheduler.cancel(1) == [] and driver.scheduler.cancel(99) == []


# A step that fails ------------------------------------------------------------------------------------------------


def test_after_a_rollback_the_same_step_is_planned_again_and_nothing_is_sealed() -> None:
    driver = Driver(limits(lookahead=2))
    driver.add(request(1, 8), request(2, 9, max_tokens=3))
    plan = driver.plan()
    driver.rollback(plan)
    assert driver.scheduler.num_cached_blocks == (0,)
    again = driver.plan()
    assert again.step == plan.step + 1 and replace(again, step=plan.step) == plan
    driver.commit(again)
    expected = solo_answer(plan.requests[0], ONE_GROUP, 64).tokens
    driver.rollback(driver.plan({1: [expected[1] ^ 1]}))
    driver.step({1: expected[1:3]})
    assert driver.tokens_of(1) == expected[:4]


def test_what_was_cancelled_in_a_step_that_fails_is_freed() -> None:
    driver = Driver(limits())
    driver.add(request(1, 8))
    plan = driver.plan()
    driver.cancel(1)
    driver.rollback(plan)
    assert driver.scheduler.num_free_blocks == (32,) and driver.plan() is None


def test_one_step_is_out_at_a_time_and_only_its_own_result_is_taken() -> None:
    driver = Driver(limits())
    driver.add(request(1, 2))
    plan = driver.plan()
    with pytest.raises(InvariantError, match="step 1 is still out"):
        driver.scheduler.plan(0)
    with pytest.raises(InvariantError, match="step 2 is not out"):
        driver.scheduler.commit(replace(result(plan, [3]), step=2))
    with pytest.raises(InvariantError, match="step 7 is not out"):
        driver.scheduler.rollback(7)
    driver.commit(plan)
    with pytest.raises(InvariantError, match="step 1 is not out"):
        driver.scheduler.rollback(1)


SCORE = TokenLogprobs(-1.0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda good: replace(good, logprobs=()), "has not 2 slices"),
        (lambda good: replace(good, prompt_logprobs=(None,)), "has not 2 slices"),
        (lambda good: replace(good, token_offsets=array("i", [0, 1])), "has not 2 slices"),
        (lambda good: replace(good, token_offsets=array("i", [1, 2, 2])), "do not cover"),
        (lambda good: replace(good, token_offsets=array("i", [0, 1, 1])), "do not cover"),
        (lambda good: replace(good, token_offsets=array("i", [0, 0, 2])), "request 1 drew 0 tokens"),
        (lambda good: replace(good, token_offsets=array("i", [0, 1, 4]), tokens=array("i", [1] * 4)), "drew 3 tokens"),
        (lambda good: replace(good, token_offsets=array("i", [0, 1, 3]), tokens=array("i", [1, 4, 1])), "not drafted"),
        (lambda good: replace(good, logprobs=((SCORE, SCORE), None)), "not one logprob per token"),
        (lambda good: replace(good, prompt_logprobs=((SCORE,), None)), "not one prompt logprob per row"),
    ],
)
def test_a_result_of_the_wrong_shape_is_refused_and_changes_nothing(
    damage: Callable[[StepResult], StepResult], message: str
) -> None:
    scheduler = Scheduler(limits(lookahead=1), ONE_GROUP, FCFS())
    scheduler.add(request(1, 2))
    scheduler.add(request(2, 2))
    scheduler.commit(result(scheduler.plan(0), [1], [2]))
    plan = scheduler.plan(0, {2: [3]})
    good = result(plan, [1], [2])
    with pytest.raises(InvariantError, match=message):
        scheduler.commit(damage(good))
    scheduler.check()
    assert len(scheduler.commit(good)) == 2


def test_a_chunk_that_draws_nothing_may_not_bring_a_token() -> None:
    scheduler = Scheduler(limits(max_step_tokens=4), ONE_GROUP, FCFS())
    scheduler.add(request(1, 9))
    with pytest.raises(InvariantError, match="drew 1 tokens"):
        scheduler.commit(result(scheduler.plan(0), [1]))
