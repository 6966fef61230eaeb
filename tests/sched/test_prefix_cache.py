"""What is shared, what is computed again, and who waits for whom."""

from __future__ import annotations

import pytest

from fake_executor import solo_answer
from headrace.sched import sequence
from headrace.sched.blocks import NO_BLOCK, BlockPool
from headrace.sched.tables import BlockTables
from headrace.types import StepPlan
from sched_driver import FULL, ONE_GROUP, Driver, fed, limits, request, slice_ids, window_group

TEXT = list(range(1, 33))  # 8 blocks of 4


def starts(plan: StepPlan | None) -> dict[int, int]:
    return {} if plan is None else {part.request.id: part.start for part in plan.slices()}


def warm(driver: Driver, prompt: list[int] = TEXT, request_id: int = 100, **fields: object) -> None:
    """Compute `prompt` and let it go."""
    driver.add(request(request_id, prompt, max_tokens=1, **fields))
    driver.finish()


# Hits -------------------------------------------------------------------------------------------------------------


def test_a_prompt_starts_behind_the_longest_prefix_that_is_cached() -> None:
    driver = Driver(limits())
    warm(driver, TEXT[:18])
    driver.add(request(1, [*TEXT[:17], 39, 39, 39]))
    assert starts(driver.step()) == {1: 16}
    driver.cancel(1)
    assert driver.finished[1].usage.cached_tokens == 16


@pytest.mark.parametrize(("length", "start"), [(8, 4), (9, 8), (5, 4), (4, 0), (3, 0), (1, 0)])
def test_of_a_prompt_that_is_wholly_cached_at_least_the_last_token_is_computed(length: int, start: int) -> None:
    driver = Driver(limits())
    warm(driver)
    driver.add(request(1, TEXT[:length]))
    assert starts(driver.step()) == {1: start}
    assert driver.tokens_of(1) == solo_answer(request(1, TEXT[:length]), ONE_GROUP, 64).tokens[:1]


def test_a_shared_block_is_never_written() -> None:
    driver = Driver(limits(block_size=4))
    warm(driver, TEXT[:8])
    before = [list(slots) for slots in driver.executor.slots[0]]
    driver.add(request(1, TEXT[:8]), request(2, TEXT[:8]))
    plan = driver.plan()
    shared = {part.blocks[0][0] for part in plan.slices()}
    driver.commit(plan)
    assert len(shared) == 1 and driver.executor.slots[0][shared.pop()] in before
    assert len({part.blocks[0][1] for part in plan.slices()}) == 2


def test_tokens_of_the_answer_are_cached_too() -> None:
    driver = Driver(limits())
    first = request(1, TEXT[:6], max_tokens=8)
    driver.add(first)
    driver.finish()
    driver.add(request(2, TEXT[:6] + driver.tokens_of(1)))
    assert starts(driver.step()) == {2: 12}


def test_another_salt_shares_nothing() -> None:
    driver = Driver(limits())
    warm(driver, cache_salt=b"one")
    driver.add(request(1, TEXT, cache_salt=b"two"), request(2, TEXT, cache_salt=b""))
    plan = driver.plan()
    assert starts(plan)[1] == 0
    driver.cancel(1)
    driver.cancel(2)
    driver.commit(plan)
    driver.add(request(3, TEXT, cache_salt=b"one"))
    assert starts(driver.step()) == {3: 28}


def test_without_a_prefix_cache_nothing_is_shared_or_sealed() -> None:
    driver = Driver(limits(), has_prefix_cache=False)
    warm(driver)
    assert driver.scheduler.num_cached_blocks == (0,)
    driver.add(request(1, TEXT[:9]), request(2, TEXT[:9]))
    assert starts(driver.step()) == {1: 0, 2: 0}


def test_a_request_for_prompt_logprobs_takes_no_hit_but_seals() -> None:
    driver = Driver(limits())
    warm(driver, TEXT[:8])
    driver.add(request(1, TEXT[:12], prompt_logprobs=0))
    assert starts(driver.step()) == {1: 0}
    driver.cancel(1)
    driver.add(request(2, TEXT[:13]))
    assert starts(driver.step()) == {2: 12}


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    driver = Driver(limits(block_size=4, num_blocks=(6,), max_len=20))
    driver.add(request(1, TEXT[:8], max_tokens=9), request(2, 8, max_tokens=9))
    driver.finish()
    assert driver.finished[2].usage.num_preemptions > 0
    assert driver.finished[2].usage.cached_tokens == 0


# Windows ----------------------------------------------------------------------------------------------------------


def test_a_window_group_frees_what_no_later_position_sees() -> None:
    driver = Driver(limits(block_size=4, num_blocks=(32, 32)), (FULL, window_group(6)))
    driver.add(request(1, 15))
    driver.step()
    assert driver.scheduler.num_free_blocks == (28, 30)
    (part,) = driver.step().slices()  # position 15 sees 9 to 15
    assert list(part.blocks[1])[:2] == [NO_BLOCK] * 2 and NO_BLOCK not in part.blocks[1][2:]
    assert NO_BLOCK not in part.blocks[0]


def test_a_window_group_needs_only_the_end_of_a_prefix_for_a_hit() -> None:
    driver = Driver(limits(max_step_tokens=4, block_size=4, num_blocks=(16, 4)), (FULL, window_group(4)))
    driver.add(request(1, TEXT[:25], max_tokens=1))
    driver.finish()  # the window's first blocks were taken again on the way
    driver.add(request(2, TEXT[:25]))
    (part,) = driver.step().slices()
    assert part.start == 24
    assert list(part.blocks[1])[:5] == [NO_BLOCK] * 5 and part.blocks[1][5] >= 0


def test_a_hit_is_only_as_long_as_every_group_allows() -> None:
    groups = (FULL, window_group(4))
    driver = Driver(limits(block_size=4, num_blocks=(16, 16)), groups)
    warm(driver, TEXT[:16])
    pool = driver.scheduler._tables._pools[1]
    kept = pool.take(15)  # all the blank ones, and the tail: the window group forgets everything behind 4 tokens
    assert pool.num_sealed == 1
    pool.release(kept)
    driver.add(request(1, TEXT[:16]))
    assert starts(driver.step()) == {1: 4}


def test_a_long_prompt_runs_in_a_window_pool_that_is_smaller_than_it() -> None:
    groups = (window_group(5),)
    driver = Driver(limits(block_size=4, num_blocks=(3,), max_len=64), groups)
    driver.add(request(1, 40, max_tokens=5))
    driver.finish()
    assert driver.tokens_of(1) == solo_answer(request(1, 40, max_tokens=5), groups, 64).tokens


def test_with_windows_alone_a_hit_is_found_behind_blocks_that_are_gone() -> None:
    groups = (window_group(4),)
    driver = Driver(limits(block_size=4, num_blocks=(3,)), groups)
    warm(driver, TEXT)
    driver.add(request(1, TEXT))
    assert starts(driver.step()) == {1: 28}


def test_a_hit_that_fills_a_window_pool_but_for_a_block_leaves_room_for_the_rest() -> None:
    groups = (window_group(8),)
    driver = Driver(limits(block_size=4, num_blocks=(3,)), groups)
    warm(driver, TEXT[:16])
    longer = request(1, [*TEXT[:16], *[39] * 12], max_tokens=2)
    driver.add(longer)
    assert starts(driver.step()) == {1: 16}
    driver.finish()
    assert driver.tokens_of(1) == solo_answer(longer, groups, 64).tokens


def test_blocks_that_fell_out_of_a_window_let_a_refused_request_in() -> None:
    driver = Driver(limits(block_size=4, num_blocks=(5,), lookahead=8), (window_group(4),))
    driver.add(request(1, 4))
    driver.step()
    driver.step({1: [0] * 8})  # rejected, but their blocks stay
    assert driver.scheduler.num_free_blocks == (1,)
    driver.add(request(2, 8))
    while slice_ids(driver.step()) == [1]:
        pass
    assert slice_ids(driver.plans[-1]) == [1, 2] and starts(driver.plans[-1])[1] == 12


# Waiting for a prefix ---------------------------------------------------------------------------------------------


def test_a_request_waits_while_another_computes_its_prefix() -> None:
    driver = Driver(limits(max_step_tokens=24))
    driver.add(request(1, [*TEXT[:16], 39]), request(2, [*TEXT[:16], 38]), request(3, 4))
    assert slice_ids(driver.step()) == [1, 3]
    plan = driver.step()
    assert starts(plan)[2] == 16
    assert driver.executor.num_fed == 17 + 4 + 1 + 1 + 1


def test_a_request_starts_with_what_is_there_once_it_need_not_wait() -> None:
    """Prompts that part after three blocks: the second waits for these three, then goes its own way."""
    driver = Driver(limits(max_step_tokens=8))
    driver.add(request(1, TEXT[:28]), request(2, TEXT[:12] + [39] * 8))
    driver.step()
    assert slice_ids(driver.plan()) == [1]
    driver.commit(driver.plans[-1])
    driver.cancel(1)
    assert starts(driver.step()) == {2: 12}


def test_a_request_waits_also_for_the_last_chunk_of_another() -> None:
    driver = Driver(limits(max_step_tokens=24))
    driver.add(request(1, TEXT[:28]), request(2, [*TEXT[:28], 39]))
    assert [slice_ids(driver.step()) for _ in range(2)] == [[1], [1]]
    assert starts(driver.step())[2] == 28


def test_nobody_waits_for_a_block_that_cannot_be_shared_anyway() -> None:
    driver = Driver(limits(max_step_tokens=24))
    driver.add(request(1, TEXT[:8]), request(2, TEXT[:8]), request(3, TEXT[:4]))
    driver.plan()
    # request 2 may share one block, which request 1 is about to seal; request 3 may share none
    assert slice_ids(driver.plans[0]) == [1, 3]


def test_nobody_waits_for_a_block_that_will_not_be_full_of_prompt() -> None:
    driver = Driver(limits(max_step_tokens=24))
    driver.add(request(1, TEXT[:3]), request(2, TEXT[:9]))
    assert slice_ids(driver.step()) == [1, 2]


def test_nobody_waits_for_another_salt() -> None:
    driver = Driver(limits(max_step_tokens=40))
    driver.add(request(1, TEXT[:16], cache_salt=b"one"), request(2, TEXT[:16], cache_salt=b"two"))
    assert slice_ids(driver.step()) == [1, 2]


def test_nobody_waits_for_what_is_cached_already() -> None:
    driver = Driver(limits(max_step_tokens=40))
    warm(driver, TEXT[:16])
    driver.add(request(1, TEXT[:20], prompt_logprobs=0), request(2, TEXT[:16]))
    assert starts(driver.step()) == {1: 0, 2: 12}


def test_a_leader_that_is_cancelled_frees_who_waited_at_once() -> None:
    driver = Driver(limits(max_step_tokens=8))
    driver.add(request(1, TEXT), request(2, TEXT))
    assert slice_ids(driver.step()) == [1]
    driver.cancel(1)
    assert starts(driver.step()) == {2: 8}


def test_many_with_one_prefix_compute_it_once() -> None:
    driver = Driver(limits(max_seqs=8, max_step_tokens=64, num_blocks=(64,)))
    driver.add(*(request(i, [*TEXT, 30 + i], max_tokens=1) for i in range(8)))
    driver.finish()
    assert driver.executor.num_fed == 33 + 7
    assert sum(finished.usage.cached_tokens for finished in driver.finished.values()) == 7 * 32


def test_a_prefix_that_many_share_is_not_hashed_by_each(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    link = sequence.chain_link
    monkeypatch.setattr(sequence, "chain_link", lambda parent, tokens: calls.append(tokens) or link(parent, tokens))
    driver = Driver(limits(max_seqs=32, max_step_tokens=8, num_blocks=(320,)))
    driver.add(*(request(i, [*TEXT, i], max_tokens=1) for i in range(20)))
    driver.finish()
    steps_led = len(TEXT) // 8
    assert len(calls) <= 2 * 8 + 20 * steps_led  # in each of these every one looks at the block that comes next


def test_another_salt_takes_over_no_links_of_the_same_text() -> None:
    driver = Driver(limits(max_seqs=8, max_step_tokens=64, num_blocks=(64,)))
    driver.add(*(request(i, [*TEXT, i], cache_salt=bytes([i % 2]), max_tokens=1) for i in range(6)))
    driver.finish()
    assert driver.executor.num_fed == 2 * 33 + 4


def test_of_those_who_wait_for_a_prefix_no_more_are_looked_at_than_could_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the cost of a plan has a bound. Who comes behind so many waits with them, and is not forgotten."""
    driver = Driver(limits(max_seqs=4, max_step_tokens=8))
    driver.add(*(request(i, [*TEXT, i], max_tokens=1) for i in range(100)), request(100, 4, max_tokens=1))
    calls: list[object] = []
    is_led = BlockTables.is_led
    monkeypatch.setattr(
        BlockTables, "is_led", lambda tables, seq, leaders: calls.append(seq) or is_led(tables, seq, leaders)
    )
    assert slice_ids(driver.step()) == [0]
    assert len(calls) == 1 + 4
    driver.finish()
    assert len(driver.finished) == 101


def test_a_prompt_is_not_walked_through_behind_its_first_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    match = BlockPool.match
    monkeypatch.setattr(BlockPool, "match", lambda pool, link: calls.append(link) or match(pool, link))
    driver = Driver(limits())
    driver.add(request(1, TEXT))
    driver.plan()
    assert len(calls) == 1


def test_a_refused_prompt_is_not_walked_through_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(limits(block_size=4, num_blocks=(14,)))
    warm(driver, TEXT)
    driver.add(request(1, 20, max_tokens=40), request(2, [*TEXT, *TEXT[:12]]))
    driver.step()
    driver.step()
    assert driver.scheduler.num_waiting == 1
    calls: list[object] = []
    match = BlockPool.match
    monkeypatch.setattr(BlockPool, "match", lambda pool, link: calls.append(link) or match(pool, link))
    for _ in range(8):
        assert fed(driver.step()) == {1: 1}
    assert len(calls) <= 8  # one look a step, at the block that it could not share


def test_a_refused_request_is_let_in_when_what_it_lacks_is_sealed_by_another() -> None:
    """Nothing is freed, but it needs less: the answer of request 1 goes the way of its prompt."""
    driver = Driver(limits(block_size=4, num_blocks=(8,), max_len=28, lookahead=6))
    first = request(1, TEXT[:6], max_tokens=20)
    driver.add(first)
    driver.step()
    driver.step({1: [0] * 6})  # rejected, but their blocks stay
    assert driver.scheduler.num_free_blocks == (4,)
    driver.add(request(2, TEXT[:6] + solo_answer(first, ONE_GROUP, 28).tokens[:15], max_tokens=1))
    plan = next(plan for plan in (driver.step() for _ in range(20)) if 2 in slice_ids(plan))
    assert starts(plan)[2] == 12 and list(driver.finished) == [2]
