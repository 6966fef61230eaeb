"""Who may run at all, and who joins whom: limits, rejections and the three orders at work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fake_executor import solo_answer
from headrace.sched import FCFS, Order, Priority, Scheduler, Static
from headrace.types import CapacityError, FinishReason, InvariantError, Limits
from sched_driver import FULL, ONE_GROUP, Driver, limits, request, slice_ids, window_group

# Rejections -------------------------------------------------------------------------------------------------------


def test_a_prompt_must_leave_room_for_one_token() -> None:
    driver = Driver(limits(max_len=8))
    (rejection, none) = driver.add(request(1, 8), request(2, 7))
    assert rejection is not None and none is None
    assert rejection.param == "prompt" and rejection.code == "context_length_exceeded"
    assert rejection.message == (
        "prompt has 8 tokens, which with an answer are at least 9; at most 8 are allowed: shorten the prompt or raise "
        "max_len"
    )
    driver.finish()
    assert len(driver.tokens_of(2)) == 1


def test_a_prompt_with_no_answer_may_fill_the_context() -> None:
    driver = Driver(limits(max_len=8))
    assert driver.add(request(1, 8, max_tokens=0), request(2, 9, max_tokens=0))[0] is None
    driver.finish()
    assert list(driver.finished) == [1]


def test_a_prompt_that_no_empty_pool_could_hold_is_refused_with_numbers() -> None:
    driver = Driver(limits(max_len=64, block_size=4, num_blocks=(8, 3)), (FULL, FULL))
    (rejection,) = driver.add(request(1, 12))
    assert rejection is not None
    assert rejection.message == (
        "prompt has 12 tokens, which with an answer are at least 13; the KV cache, 8 + 3 blocks of 4 tokens, holds 12: "
        "shorten the prompt or give the KV cache more memory"
    )


def test_an_empty_prompt_is_refused() -> None:
    (rejection,) = Driver(limits()).add(request(1, []))
    assert rejection is not None and rejection.code == "invalid_value"


def test_an_answer_ends_where_the_pool_does() -> None:
    driver = Driver(limits(max_len=64, block_size=4, num_blocks=(3,)))
    driver.add(request(1, 5))
    driver.finish()
    assert driver.finished[1].reason is FinishReason.LENGTH and len(driver.tokens_of(1)) == 7


@pytest.mark.parametrize(("num_blocks", "is_refused"), [(2, True), (3, False)])
def test_a_window_pool_that_holds_the_window_and_a_block_holds_any_prompt(num_blocks: int, is_refused: bool) -> None:
    driver = Driver(limits(block_size=4, num_blocks=(num_blocks,)), (window_group(8),))
    assert (driver.add(request(1, 20, max_tokens=1))[0] is not None) == is_refused
    driver.finish()


# Orders -----------------------------------------------------------------------------------------------------------


def test_first_come_first_served_lets_nobody_overtake_who_lacks_blocks() -> None:
    driver = Driver(limits(block_size=4, num_blocks=(6,), max_len=24, max_step_tokens=32))
    driver.add(request(1, 12, max_tokens=3), request(2, 16, max_tokens=1), request(3, 1, max_tokens=1))
    plans = [slice_ids(driver.step()) for _ in range(4)]
    assert plans == [[1], [1], [1], [2, 3]]


def test_priority_lets_the_urgent_start_first() -> None:
    driver = Driver(limits(max_seqs=1), order=Priority())
    driver.add(request(1, 2, max_tokens=2, priority=1), request(2, 2, max_tokens=1), request(3, 2, max_tokens=1))
    driver.finish()
    assert list(driver.finished) == [2, 3, 1]


def test_a_static_batch_takes_nobody_in_before_its_longest_answer_ends() -> None:
    driver = Driver(limits(max_seqs=2), order=Static())
    driver.add(*(request(i, 2, max_tokens=tokens) for i, tokens in enumerate((4, 1, 1))))
    plans = [slice_ids(driver.step()) for _ in range(5)]
    assert plans == [[0, 1], [0], [0], [0], [2]]


def test_continuous_batching_takes_the_next_one_in_as_soon_as_a_seat_is_free() -> None:
    driver = Driver(limits(max_seqs=2))
    driver.add(*(request(i, 2, max_tokens=tokens) for i, tokens in enumerate((4, 1, 1))))
    plans = [slice_ids(driver.step()) for _ in range(4)]
    assert plans == [[0, 1], [0, 2], [0], [0]]


def test_a_static_batch_is_who_waits_when_it_is_formed_though_its_prompts_take_several_steps() -> None:
    driver = Driver(limits(max_seqs=3, max_step_tokens=4), order=Static())
    driver.add(request(1, 4, max_tokens=5), request(2, 4, max_tokens=3))
    driver.step()
    driver.add(request(3, 1, max_tokens=1))
    driver.finish()
    plans = [slice_ids(plan) for plan in driver.plans]
    assert plans[:2] == [[1, 2], [1, 2]]
    assert plans[-1] == [3] and not any(3 in ids for ids in plans[:-1])


def test_a_preempted_member_of_a_static_batch_comes_back_before_the_next_batch() -> None:
    driver = Driver(limits(block_size=4, num_blocks=(5,), max_len=20, max_seqs=2), order=Static())
    driver.add(request(1, 7, max_tokens=12), request(2, 7, max_tokens=12), request(3, 1, max_tokens=1))
    driver.finish()
    assert [event.request_id for _, event in driver.preempted] == [2]
    assert list(driver.finished) == [1, 2, 3] and slice_ids(driver.plans[-1]) == [3]


# Limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (replace(limits(), max_seqs=0), "max_seqs is 0; it must be at least 1"),
        (replace(limits(), max_step_tokens=0), "max_step_tokens is 0"),
        (replace(limits(), max_len=-1), "max_len is -1"),
        (replace(limits(), max_chunk_tokens=0), "max_chunk_tokens is 0; it must be at least 1"),
        (replace(limits(), block_size=0), "block_size is 0"),
        (replace(limits(), lookahead=-1), "lookahead is -1"),
        (replace(limits(), num_eager=(4, 4)), "num_eager has 2 entries for 1 KV groups"),
        (replace(limits(), num_blocks=()), "num_blocks has 0 entries for 1 KV groups"),
        (replace(limits(), num_blocks=(4, 4)), "num_blocks has 2 entries for 1 KV groups"),
        (replace(limits(), num_blocks=(0,)), "every group needs at least 1"),
    ],
)
def test_limits_within_which_nothing_could_run_are_refused(wrong: Limits, message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        Scheduler(wrong, ONE_GROUP, FCFS())


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(CapacityError, match="window"):
        Scheduler(limits(), (window_group(0),), FCFS())


# Invariants -------------------------------------------------------------------------------------------------------


def _swap_running(scheduler: Scheduler) -> None:
    scheduler._running.reverse()


def _forget_a_sequence(scheduler: Scheduler) -> None:
    del scheduler._sequences[1]


def _wrong_status(scheduler: Scheduler) -> None:
    scheduler._waiting[0].status = scheduler._running[0].status


def _too_many(scheduler: Scheduler) -> None:
    scheduler._limits = limits(max_seqs=1)


def _blocks_of_one_that_waits(scheduler: Scheduler) -> None:
    scheduler._waiting[0].tables[0].append(0)


def _too_far(scheduler: Scheduler) -> None:
    scheduler._running[0].num_computed = len(scheduler._running[0].tokens)


def _too_long(scheduler: Scheduler) -> None:
    scheduler._running[0].max_total = 1


def _in_flight_but_not_planned(scheduler: Scheduler) -> None:
    scheduler._running[0].num_in_flight = 1


def _a_slot_too_many(scheduler: Scheduler) -> None:
    scheduler._running[0].num_slots += 1


def _a_hole_in_a_table(scheduler: Scheduler) -> None:
    scheduler._running[0].tables[0][0] = -1


def _dropped_too_early(scheduler: Scheduler) -> None:
    seq = scheduler._running[0]
    scheduler._tables._pools[0].release(seq.tables[0][:1])
    seq.tables[0][0], seq.num_dropped[0] = -1, 1


def _shared_but_to_be_written(scheduler: Scheduler) -> None:
    scheduler._running[0].num_computed = 0


def _a_reference_too_many(scheduler: Scheduler) -> None:
    scheduler._tables._pools[0].share(scheduler._running[0].tables[0][0])


@pytest.mark.parametrize(
    "damage",
    [
        _swap_running,
        _forget_a_sequence,
        _wrong_status,
        _too_many,
        _blocks_of_one_that_waits,
        _too_far,
        _too_long,
        _in_flight_but_not_planned,
        _a_slot_too_many,
        _a_hole_in_a_table,
        _dropped_too_early,
        _shared_but_to_be_written,
        _a_reference_too_many,
    ],
)
def test_check_finds_damage(damage: Callable[[Scheduler], None]) -> None:
    driver = Driver(limits(max_seqs=2))
    driver.add(*(request(i, 5) for i in range(3)))
    driver.step()
    damage(driver.scheduler)
    with pytest.raises(InvariantError):
        driver.scheduler.check()


def test_check_finds_a_step_that_is_too_large() -> None:
    driver = Driver(limits())
    driver.add(request(1, 5))
    driver.plan()
    driver.scheduler._limits = limits(max_step_tokens=4)
    with pytest.raises(InvariantError, match="too large"):
        driver.scheduler.check()


def test_work_that_cannot_get_on_is_an_error_and_not_silence() -> None:
    scheduler = Scheduler(limits(block_size=4, num_blocks=(2,)), ONE_GROUP, FCFS())
    scheduler.add(request(1, 7))
    scheduler._tables._pools[0].take(1)  # a block that nobody will give back
    with pytest.raises(InvariantError, match="1 requests, and none can run"):
        scheduler.plan(0)


@pytest.mark.parametrize("order", [FCFS(), Priority(), Static()])
def test_every_order_lets_everyone_run_in_the_end(order: Order) -> None:
    driver = Driver(limits(max_seqs=3, num_blocks=(9,), block_size=2, max_len=18), order=order)
    requests = [request(i, 1 + i % 5, max_tokens=i, priority=-i) for i in range(12)]
    driver.add(*requests)
    driver.finish()
    for one in requests:
        assert driver.tokens_of(one.id) == solo_answer(one, ONE_GROUP, 18).tokens
