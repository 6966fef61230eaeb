"""How prompts divide a step: the arithmetic, and what a short prompt behind long ones gets from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_executor import solo_answer
from headrace.sched import Priority
from headrace.sched.shares import share_out, sure_share
from headrace.types import Limits
from sched_driver import FULL, ONE_GROUP, Driver, fed, limits, request, slice_ids, window_group

# The arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "wants", "shares"),
    [
        (512, [4000], [512]),
        (512, [4000, 5], [507, 5]),
        (512, [4000, 4000], [256, 256]),
        (512, [4000, 4000, 4000, 5], [256, 128, 123, 5]),
        (512, [100, 4000, 4000], [100, 206, 206]),
        (512, [100, 20], [100, 20]),
        (7, [9, 9, 9], [4, 2, 1]),
        (4, [9, 9, 9, 9], [1, 1, 1, 1]),
        (5, [2, 9, 1, 9], [2, 1, 1, 1]),
        (8, [], []),
    ],
)
def test_each_takes_half_of_what_is_left_or_all_that_those_behind_do_not_want(
    budget: int, wants: list[int], shares: list[int]
) -> None:
    assert share_out(budget, wants) == shares


@given(st.lists(st.integers(1, 600), max_size=20), st.integers(0, 1024))
def test_shares_use_up_the_budget_or_meet_every_want_and_leave_nobody_out(wants: list[int], spare: int) -> None:
    budget = len(wants) + spare
    shares = share_out(budget, wants)
    assert sum(shares) == min(budget, sum(wants))
    assert all(1 <= share <= want for share, want in zip(shares, wants, strict=True))


@given(st.lists(st.integers(1, 600), max_size=20), st.integers(1, 1024))
def test_nobody_gets_less_than_the_halving_promised_when_it_was_let_in(wants: list[int], budget: int) -> None:
    left, promised = budget, []
    for want in wants:
        if left:
            promised.append(sure_share(want, left))
            left -= promised[-1]
    shares = share_out(budget, wants[: len(promised)])
    assert all(share >= least for share, least in zip(shares, promised, strict=True))


# At work ----------------------------------------------------------------------------------------------------------


def roomy(max_step_tokens: int = 64) -> Limits:
    return limits(max_seqs=16, max_step_tokens=max_step_tokens, max_len=1024, block_size=16, num_blocks=(600,))


@pytest.mark.parametrize("num_long", [1, 2, 5])
def test_a_short_prompt_behind_long_ones_ends_within_its_share_of_steps(num_long: int) -> None:
    driver = Driver(roomy())
    driver.add(*(request(i, 1000, max_tokens=1) for i in range(num_long)))
    driver.step()
    driver.add(request(9, 12, max_tokens=1))
    num_steps = next(count for count in range(1, 100) if driver.step() and 9 in driver.finished)
    assert num_steps == -(-12 // (64 >> num_long))
    assert list(driver.finished) == [9]


def test_a_lone_long_prompt_takes_whole_steps() -> None:
    driver = Driver(roomy())
    driver.add(request(1, 640))
    assert [fed(driver.step()) for _ in range(10)] == [{1: 64}] * 10
    assert len(driver.tokens_of(1)) == 1


def test_a_long_prompt_has_all_that_short_ones_do_not_want() -> None:
    driver = Driver(roomy())
    driver.add(request(1, 640), request(2, 3), request(3, 5))
    assert fed(driver.step()) == {1: 56, 2: 3, 3: 5}
    assert fed(driver.step()) == {2: 1, 3: 1, 1: 62}


def test_among_equals_the_first_has_half_of_every_step_and_ends_first() -> None:
    driver = Driver(roomy())
    driver.add(*(request(i, 640, max_tokens=1) for i in range(4)))
    plans = [fed(driver.step()) for _ in range(20)]
    assert all(plan[0] >= 32 for plan in plans) and 0 in driver.finished
    driver.finish()
    assert list(driver.finished) == [0, 1, 2, 3]
    assert len(driver.plans) == 4 * 640 // 64  # and no step was less than full


def test_as_many_prompts_are_read_at_once_as_halving_leaves_a_token_to() -> None:
    driver = Driver(roomy(max_step_tokens=4))
    driver.add(*(request(i, 100) for i in range(5)))
    assert [fed(driver.step()) for _ in range(9)] == [{0: 2, 1: 1, 2: 1}] * 9
    assert driver.scheduler.num_waiting == 2


def test_an_urgent_prompt_is_first_from_the_step_after_it_was_let_in() -> None:
    driver = Driver(roomy(), order=Priority())
    driver.add(request(1, 500, priority=1), request(2, 500, priority=1))
    driver.step()
    driver.add(request(3, 500, priority=0))
    assert list(fed(driver.step()).items()) == [(1, 32), (2, 16), (3, 16)]
    assert list(fed(driver.step()).items()) == [(3, 32), (1, 16), (2, 16)]


def test_the_last_token_of_a_prompt_that_is_only_scored_comes_alone_whatever_its_share() -> None:
    driver = Driver(roomy(max_step_tokens=16))
    scored = request(2, [5, 6, 7, 8, 9], prompt_logprobs=0, max_tokens=0)
    driver.add(request(1, 100), scored)
    assert fed(driver.step()) == {1: 12, 2: 4}
    assert fed(driver.step()) == {2: 1, 1: 15}
    assert driver.answers[2] == solo_answer(scored, ONE_GROUP, 1024)


def test_a_waiting_prompt_is_led_by_one_that_has_a_part_of_the_step() -> None:
    driver = Driver(roomy(max_step_tokens=32))
    text = list(range(1, 40))
    driver.add(request(1, 500), request(2, text), request(3, [*text, 1]))
    assert fed(driver.step()) == {1: 16, 2: 16}
    assert fed(driver.step()) == {1: 16, 2: 16}
    plan = driver.step()
    assert fed(plan)[3] == 8 and list(plan.starts)[2] == 32  # nothing is led any more: block 2 has no 16 tokens


@pytest.mark.parametrize(("num_blocks", "ids"), [(8, [1, 2]), (9, [1, 2]), (10, [1])])
def test_blocks_that_a_prompt_has_still_to_take_are_kept_for_it(num_blocks: int, ids: list[int]) -> None:
    """Of a pool of 40, request 1 is going to take 30, and one more is left for it to grow by."""
    driver = Driver(limits(max_step_tokens=8, max_len=160, block_size=4, num_blocks=(40,)))
    driver.add(request(1, 120, max_tokens=1), request(2, 4 * num_blocks, max_tokens=1))
    assert slice_ids(driver.step()) == ids
    driver.finish()
    assert not driver.preempted


def test_of_a_window_pool_a_span_is_kept_for_a_prompt() -> None:
    groups = (FULL, window_group(8))
    driver = Driver(limits(max_step_tokens=4, block_size=4, num_blocks=(64, 7)), groups)
    driver.add(request(1, 40, max_tokens=1), request(2, 40, max_tokens=1), request(3, 1, max_tokens=1))
    assert slice_ids(driver.step()) == [1, 2]  # 3 blocks each, and one for who runs to grow by
    driver.finish()
    assert not driver.preempted
    assert driver.tokens_of(2) == solo_answer(request(2, 40, max_tokens=1), groups, 64).tokens


def test_a_prompt_that_outgrows_its_window_in_a_step_takes_no_block_of_another() -> None:
    """A chunk has all its blocks at once. The second prompt keeps its slots, and what it cannot use the first gets."""
    groups = (window_group(4),)
    driver = Driver(limits(max_step_tokens=40, block_size=4, num_blocks=(9,)), groups)
    requests = [request(1, 40, max_tokens=2), request(2, 12, max_tokens=2)]
    driver.add(*requests)
    assert fed(driver.step()) == {1: 32, 2: 4}
    assert fed(driver.step()) == {1: 8, 2: 8}
    driver.finish()
    assert all(driver.tokens_of(one.id) == solo_answer(one, groups, 64).tokens for one in requests)


def test_a_prompt_claims_no_more_blocks_than_a_step_could_fill() -> None:
    """Else the first of two equals, whose window lets it in with few blocks kept for it, would claim all."""
    driver = Driver(limits(max_step_tokens=16, block_size=4, num_blocks=(9,)), (window_group(4),))
    driver.add(request(1, 40), request(2, 40))
    assert fed(driver.step()) == {1: 8, 2: 8}


def test_slots_that_a_failed_step_left_are_no_free_blocks() -> None:
    """Request 2 keeps its 14 blocks and has work for 12 of them, as drafts take a part of the step this time."""
    driver = Driver(limits(max_step_tokens=57, block_size=4, num_blocks=(21,), lookahead=8), (window_group(4),))
    driver.add(request(1, 1))
    driver.step()
    driver.add(request(2, 60))
    plan = driver.plan()
    assert fed(plan) == {1: 1, 2: 56}
    driver.rollback(plan)
    driver.add(request(3, 60))
    assert fed(driver.step({1: [0] * 8})) == {1: 9, 2: 32, 3: 16}
