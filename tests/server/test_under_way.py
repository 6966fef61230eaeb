"""Which answers are under way, and what they are told when all are to end."""

from __future__ import annotations

from array import array
from typing import Any, cast

import pytest

from headrace.engine.stream import AsyncEngine, Stream
from headrace.server.admission import Admission
from headrace.types import Request, RequestError, SamplingParams


class Client:
    """An engine and a listener in one that take down what they are told."""

    def __init__(self, request_id: int) -> None:
        self.told: list[str] = []
        request = Request(request_id, array("i", [5]), SamplingParams(), seed=1, arrival_us=100 * request_id)
        self.stream = Stream(cast(AsyncEngine, self), request, self)

    def cancel(self, request_id: int) -> None:
        self.told.append(f"cancel {request_id}")

    def take(self, *event: Any) -> None: ...

    def fail(self, error: RequestError) -> None:
        self.told.append(str(error))


def test_the_oldest_answer_under_way_is_the_first_of_those_that_have_not_ended() -> None:
    admission, first, second = Admission(), Client(1), Client(2)
    with admission.under_way(second.stream):
        with admission.under_way(first.stream):
            assert (admission.request_ids, admission.oldest_us) == ((2, 1), 200)
        assert (admission.request_ids, admission.oldest_us) == ((2,), 200)
    assert (admission.request_ids, admission.oldest_us) == ((), None)


def test_all_are_told_why_they_end_those_too_that_were_about_to_begin_and_none_that_has_ended() -> None:
    admission, running, ended, late = Admission(), Client(1), Client(2), Client(3)
    with admission.under_way(running.stream):
        with admission.under_way(ended.stream):
            pass
        admission.end_all()
        with pytest.raises(RequestError, match="shut") as refused, admission.under_way(late.stream):
            pytest.fail("it began")
    assert running.told == ["cancel 1", str(refused.value)]
    assert ended.told == late.told == []
