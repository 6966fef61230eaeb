"""Blocks run out: who gives way, what is kept, and that everyone still gets on."""

from __future__ import annotations

from fake_executor import solo_answer
from headrace.sched import Priority
from headrace.types import Finished, Preempted, Request
from sched_driver import FULL, ONE_GROUP, Driver, fed, limits, request, slice_ids, window_group


def crowded(**fields: int) -> Driver:
    """Two sequences of 2 blocks each in a pool of 5: soon one must give way."""
    driver = Driver(limits(block_size=4, num_blocks=(5,), max_len=20))
    driver.add(request(1, 7, max_tokens=12, **fields), request(2, 7, max_tokens=12, **fields))
    return driver


def test_the_last_in_order_gives_way_and_is_told_of_with_the_next_events() -> None:
    driver = crowded()
    driver.step_until_preempted()
    plan, event = driver.preempted[0]
    assert slice_ids(plan) == [1]
    assert event == Preempted(2, 8)
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (1, 1)


def test_a_preempted_request_is_answered_as_if_nothing_had_happened() -> None:
    driver = crowded(logprobs=0)
    driver.finish()
    for request_id in (1, 2):
        alone = solo_answer(request(request_id, 7, max_tokens=12, logprobs=0), ONE_GROUP, 20)
        assert driver.answers[request_id] == alone
    assert driver.finished[2].usage.num_preemptions == 1


def test_tokens_drawn_before_a_preemption_are_computed_again_like_a_prompt() -> None:
    driver = crowded()
    driver.step_until_preempted()
    num_drawn = len(driver.tokens_of(2))
    driver.cancel(1)
    plan = driver.plan()
    (part,) = plan.slices()
    assert part.start + len(part.tokens) == 7 + num_drawn
    assert part.num_logits == 1 and list(part.targets) == [-1]


def test_prompt_logprobs_that_were_told_are_not_told_again() -> None:
    driver = crowded(prompt_logprobs=0)
    driver.finish()
    assert driver.finished[2].usage.num_preemptions == 1
    for request_id in (1, 2):
        alone = solo_answer(request(request_id, 7, max_tokens=12, prompt_logprobs=0), ONE_GROUP, 20)
        assert driver.answers[request_id].prompt_logprobs == alone.prompt_logprobs


def test_the_last_in_order_waits_with_what_it_has_if_it_finds_no_block() -> None:
    driver = Driver(limits(block_size=4, num_blocks=(5,), max_len=20))
    driver.add(request(1, 8), request(2, 8))
    driver.step()
    assert slice_ids(driver.step()) == [1]  # both need a third block, and there is one
    assert driver.scheduler.num_running == 2 and not driver.preempted
    assert slice_ids(driver.step_until_preempted()) == [1]  # now request 1 needs a fourth
    assert driver.preempted[0][1] == Preempted(2, 8)


def starving() -> tuple[Driver, Request]:
    """Request 1 decodes; request 2, whose prompt is scored, has computed 12 tokens of 15 and finds no fourth block."""
    driver = Driver(limits(block_size=4, num_blocks=(7,), max_len=24, max_step_tokens=3))
    scored = request(2, 15, prompt_logprobs=0, max_tokens=2)
    driver.add(request(1, 7, max_tokens=12))
    for _ in range(3):
        driver.step()
    driver.add(scored)
    for _ in range(6):
        assert fed(driver.step()) == {1: 1, 2: 2}
    return driver, scored


def test_a_prompt_that_finds_no_block_keeps_what_it_has_while_others_get_on() -> None:
    driver, _ = starving()
    assert slice_ids(driver.step()) == [1]
    assert driver.scheduler.num_running == 2 and not driver.preempted


def test_a_running_prompt_gives_way_to_a_decode_before_it() -> None:
    driver, _ = starving()
    plan = driver.step_until_preempted()
    assert slice_ids(plan) == [1] and driver.preempted[0][1] == Preempted(2, 12)


def test_prompt_logprobs_go_on_where_a_preemption_cut_them() -> None:
    """Only the rows of positions not yet told are asked for; they are the last rows of their slice."""
    driver, scored = starving()
    driver.step_until_preempted()
    num_told = len(driver.answers[2].prompt_logprobs)
    driver.finish()
    alone = solo_answer(scored, ONE_GROUP, 24)
    assert num_told == 12 and driver.answers[2].prompt_logprobs == alone.prompt_logprobs
    assert driver.tokens_of(2) == alone.tokens


def test_a_running_prompt_takes_the_block_it_needs_from_a_decode_behind_it() -> None:
    driver = Driver(limits(block_size=4, num_blocks=(7,), max_len=24, max_step_tokens=3), order=Priority())
    driver.add(request(2, 7, priority=1, seed=1))
    for _ in range(3):
        driver.step()
    driver.add(request(1, 14, priority=0, max_tokens=1))
    for _ in range(6):
        assert slice_ids(driver.step()) == [2, 1]
    assert slice_ids(driver.step_until_preempted()) == [1]
    assert driver.preempted[0][1].request_id == 2


def test_two_long_prompts_share_a_window_pool_that_is_too_small_for_both_at_once() -> None:
    groups = (window_group(8),)
    driver = Driver(limits(block_size=2, num_blocks=(7,), max_len=40, max_step_tokens=6), groups)
    requests = [request(1, 30, max_tokens=2), request(2, 30, max_tokens=2)]
    driver.add(*requests)
    driver.finish()
    for one in requests:
        assert driver.tokens_of(one.id) == solo_answer(one, groups, 40).tokens


def test_a_preempted_request_comes_back_before_those_that_came_after_it() -> None:
    driver = crowded()
    driver.step_until_preempted()
    driver.add(request(3, 1, max_tokens=1))
    num_plans = len(driver.plans)
    driver.finish()
    later = [slice_ids(plan) for plan in driver.plans[num_plans:]]
    assert later[0] == [1]  # there is room for request 3 at once, but request 2 comes first
    assert next(ids for ids in later if 3 in ids or 2 in ids)[:2] == [2, 3]


def test_who_is_let_in_leaves_a_block_to_each_that_runs() -> None:
    driver = Driver(limits(block_size=4, num_blocks=(7,), max_len=28))
    driver.add(request(1, 4), request(2, 4), request(3, 8, max_tokens=1))
    assert slice_ids(driver.step()) == [1, 2, 3]
    driver = Driver(limits(block_size=4, num_blocks=(5,), max_len=20))
    driver.add(request(1, 4), request(2, 4), request(3, 8, max_tokens=1))
    assert slice_ids(driver.step()) == [1, 2]


def test_under_priority_the_least_urgent_gives_way_though_it_came_first() -> None:
    driver = Driver(limits(block_size=4, num_blocks=(5,), max_len=20), order=Priority())
    driver.add(request(1, 7, max_tokens=12, priority=1), request(2, 7, max_tokens=12, priority=0))
    driver.finish()
    assert {event.request_id for _, event in driver.preempted} == {1}


def test_a_preempted_request_waits_behind_those_that_are_more_urgent() -> None:
    driver = Driver(limits(block_size=4, num_blocks=(5,), max_len=20, max_seqs=2), order=Priority())
    driver.add(request(1, 7, max_tokens=12, priority=1), request(2, 7, max_tokens=12, priority=1))
    driver.step()
    driver.add(request(3, 7, max_tokens=12, priority=0))
    driver.finish()
    assert driver.preempted[0][1].request_id == 2
    assert list(driver.finished) == [1, 3, 2]


def test_a_request_is_told_of_as_preempted_before_its_end_and_never_after() -> None:
    driver = crowded()
    while (plan := driver.plan()) is not None and not driver.scheduler.num_waiting:
        driver.commit(plan)
    assert plan is not None
    preempted, finished = driver.scheduler.cancel(2)
    assert isinstance(preempted, Preempted) and isinstance(finished, Finished)
    assert [event.request_id for event in driver.scheduler.commit(driver.executor.run(plan))] == [1]


def test_one_sequence_can_fill_the_whole_pool() -> None:
    driver = Driver(limits(block_size=4, num_blocks=(4,), max_len=16))
    driver.add(*(request(i, 3) for i in range(4)))
    driver.finish()
    assert all(len(driver.tokens_of(i)) == 13 for i in range(4))


def test_prompts_alone_preempt_nobody() -> None:
    """Whoever is let in finds blocks for all of its prompt, however small the chunks are."""
    driver = Driver(limits(block_size=4, num_blocks=(9,), max_len=32, max_step_tokens=6))
    driver.add(*(request(i, 15, max_tokens=1) for i in range(6)))
    driver.finish()
    assert not driver.preempted
    assert max(plan.num_slices for plan in driver.plans) == 2


def test_with_two_groups_the_shorter_pool_decides() -> None:
    driver = Driver(limits(block_size=4, num_blocks=(32, 5), max_len=20), (FULL, FULL))
    driver.add(request(1, 7, max_tokens=12, seed=1), request(2, 7, max_tokens=12, seed=1))
    driver.finish()
    assert [event.request_id for _, event in driver.preempted] == [2]
    assert fed(driver.plans[0]) == {1: 7, 2: 7}
