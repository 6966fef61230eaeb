"""Which answers are under way."""

from __future__ import annotations

from array import array
from typing import Any, cast

from headrace.engine.stream import AsyncEngine, Listener, Stream
from headrace.server.admission import Admission
from headrace.types import Finished, FinishReason, Request, SamplingParams, Usage


class Deaf:
    """A listener to whom it is all the same."""

    def take(self, *told: Any) -> None: ...
    def fail(self, *told: Any) -> None: ...


def stream(request_id: int) -> Stream:
    request = Request(request_id, array("i", [5]), SamplingParams(), seed=1, arrival_us=100 * request_id)
    return Stream(cast(AsyncEngine, None), request, cast(Listener, Deaf()))


def test_an_answer_that_has_ended_is_not_under_way_though_its_request_has_others_that_are() -> None:
    admission, first, second = Admission(), stream(1), stream(2)
    with admission.under_way(first), admission.under_way(second):
        assert (admission.request_ids, admission.oldest_us) == ((1, 2), 100)
        first.put(Finished(1, FinishReason.LENGTH, Usage(1, 1, 0, 0, None)), 500)
        assert (admission.request_ids, admission.oldest_us) == ((2,), 200)
    assert (admission.request_ids, admission.oldest_us) == ((), None)
