"""Who comes first under each order."""

from __future__ import annotations

import pytest

from headrace.sched import FCFS, Order, Priority, Static
from sched_driver import request


@pytest.mark.parametrize("order", [FCFS(), Static()])
def test_first_come_first_served_ignores_priority(order: Order) -> None:
    assert order.rank(request(0, 1, priority=5), 0) < order.rank(request(1, 1, priority=1), 1)


def test_priority_puts_the_lower_number_first_and_equals_by_arrival() -> None:
    order = Priority()
    assert order.rank(request(0, 1, priority=5), 0) > order.rank(request(1, 1, priority=-1), 1)
    assert order.rank(request(0, 1, priority=5), 0) < order.rank(request(1, 1, priority=5), 1)


def test_only_the_static_order_forms_batches() -> None:
    assert Static().is_batched and not FCFS().is_batched and not Priority().is_batched
