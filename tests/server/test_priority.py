"""Who may say what runs first."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from echoing import EchoingExecutor, Running, running

from headrace.run.executor import Foresee
from headrace.types import StepPlan, StepResult


@dataclass
class Listening(EchoingExecutor):
    priorities: list[int] = field(default_factory=list)  # of the requests in every step so far

    def run(self, plan: StepPlan, masks: object = None, foresee: Foresee | None = None) -> StepResult:
        self.priorities += [request.priority for request in plan.requests]
        return super().run(plan, masks, foresee)


def test_a_priority_reaches_an_engine_that_runs_by_priority() -> None:
    executor = Listening()
    with running(executor=executor, has_priorities=True) as server:
        assert server.completion(prompt="Hi", max_tokens=1, priority=-7).status_code == 200
        assert server.chat(max_tokens=1, priority=5).status_code == 200
    assert set(executor.priorities) == {-7, 5}


def test_a_priority_that_would_change_nothing_is_refused(server: Running) -> None:
    for answer in (partial(server.completion, prompt="Hi"), server.chat):
        assert answer(max_tokens=1, priority=0).status_code == 200
        error = answer(max_tokens=1, priority=1).json()["error"]
        assert error["param"] == "priority" and "--order priority" in error["message"]
