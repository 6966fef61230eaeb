"""The next plan, told while a step is out: when it can be, that it comes true, and when it is forgotten."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.types import KVGroup
from sched_driver import FULL, ONE_GROUP, Driver, limits, request, slice_ids, window_group


def decoding(*, num_prompt: int = 9, groups: tuple[KVGroup, ...] = ONE_GROUP, **fields: object) -> Driver:
    """Two sequences that decode; the driver foresees after every plan. At position 9 the third block has two slots."""
    driver = Driver(limits(max_step_tokens=20, num_blocks=(32,) * len(groups), lookahead=1), groups)
    driver.add(request(1, num_prompt, **fields), request(2, num_prompt))
    driver.step()
    return driver


def test_the_plan_after_a_step_of_decodes_is_the_very_one_that_was_foreseen() -> None:
    driver = decoding()
    driver.step()
    assert driver.foreseen[-1] is not None
    assert driver.plan() is driver.foreseen[-2]


def test_what_is_foreseen_lacks_the_tokens_that_are_still_to_be_drawn_and_nothing_else() -> None:
    driver, other = decoding(), decoding()
    driver.plan()
    foreseen = driver.foreseen[-1]
    assert foreseen is not None and list(foreseen.tokens) == [-1, -1]
    other.is_foreseeing = False
    other.step()
    plan = other.plan()
    assert plan is not None and list(plan.tokens) == [other.tokens_of(1)[-1], other.tokens_of(2)[-1]]
    assert (foreseen.step, foreseen.starts, foreseen.blocks) == (plan.step, plan.starts, plan.blocks)


@pytest.mark.parametrize(
    "driver",
    [
        pytest.param(lambda: decoding(num_prompt=18), id="a prompt is still being computed"),
        pytest.param(lambda: decoding(num_prompt=7), id="a block is needed"),
        pytest.param(lambda: decoding(max_tokens=2), id="the answer ends"),
        pytest.param(lambda: decoding(presence_penalty=1.0), id="a history is needed"),
        pytest.param(lambda: decoding(groups=(FULL, window_group(8))), id="a window moves on"),
    ],
)
def test_nothing_is_foreseen_where_more_than_a_token_changes(driver: Callable[[], Driver]) -> None:
    it = driver()
    it.plan()
    assert it.foreseen[-1] is None


def test_nothing_is_foreseen_while_drafts_are_checked_or_somebody_waits() -> None:
    drafted = decoding()
    drafted.plan({1: [5]})
    assert drafted.foreseen[-1] is None
    crowded = decoding()
    crowded.add(*(request(i, 30) for i in range(3, 9)))
    crowded.plan()
    assert crowded.foreseen[-1] is None


def test_nothing_is_foreseen_when_no_step_is_out() -> None:
    driver = Driver(limits())
    assert driver.scheduler.foresee() is None
    driver.add(request(1, 9))
    driver.step()
    driver.step()
    assert driver.foreseen[-1] is not None and driver.scheduler.foresee() is None
    driver.cancel(1)
    assert driver.scheduler.foresee() is None


@pytest.mark.parametrize(
    "happen",
    [
        pytest.param(lambda driver: driver.add(request(3, 2)), id="a request comes"),
        pytest.param(lambda driver: driver.cancel(2), id="a request goes"),
    ],
)
@pytest.mark.parametrize("is_out", [True, False], ids=["while the step is out", "when it is back"])
def test_what_was_foreseen_is_forgotten_when(happen: Callable[[Driver], None], is_out: bool) -> None:
    driver = decoding()
    plan = driver.plan()
    assert plan is not None
    if is_out:
        happen(driver)
    driver.commit(plan)
    if not is_out:
        happen(driver)
    following = driver.plan()
    assert following is not None and following is not driver.foreseen[-2]
    assert -1 not in following.tokens


def test_what_was_foreseen_is_forgotten_when_the_step_fails() -> None:
    driver = decoding()
    driver.rollback(driver.plan())
    again = driver.plan()
    assert again is not driver.foreseen[-2] and list(again.starts) == [9, 9]


def test_what_was_foreseen_is_forgotten_when_an_answer_ends() -> None:
    known = decoding()
    known.step()
    first, second = known.tokens_of(1)
    assert first != second
    driver = decoding(stop_ids=frozenset([second]))
    driver.step()
    assert 1 in driver.finished
    following = driver.plan()
    assert following is not driver.foreseen[-2] and slice_ids(following) == [2]


def test_what_was_foreseen_is_forgotten_when_drafts_come() -> None:
    driver = decoding()
    driver.step()
    drafted = driver.plan({1: [5]})
    assert drafted is not driver.foreseen[-2] and list(drafted.num_drafts) == [1, 0]
