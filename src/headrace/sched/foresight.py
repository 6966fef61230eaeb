"""The next plan, told while a step is out: what can be made ready beside the step costs no time after it.

Owns the plan that is expected. Refuses to decide anything: it says what the scheduler will plan if nothing happens but
what mostly happens, that each sequence draws a token and goes on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from headrace.sched.sequence import Sequence
from headrace.types import StepPlan

UNKNOWN = -1  # a token that is still to be drawn


class Foresight:
    """The last plan and, once it was asked for, the one expected after it."""

    def __init__(self) -> None:
        self._last: StepPlan | None = None
        self._next: StepPlan | None = None

    def note(self, plan: StepPlan) -> StepPlan:
        """`plan` is out now."""
        self._last, self._next = plan, None
        return plan

    def foresee(self, flight: SequenceOf[Sequence]) -> StepPlan | None:
        """The plan after the last one, whose slices are those of `flight`. Its tokens are UNKNOWN. None where a slice
        is no plain decode, needs a block for the next one or comes to its end.
        """
        plan = self._last
        if plan is None or not (flight and plan.is_decode and all(_goes_on(seq) for seq in flight)):
            return None
        tokens = array("i", [UNKNOWN]) * len(flight)
        starts = array("i", [start + 1 for start in plan.starts])
        self._next = replace(plan, step=plan.step + 1, tokens=tokens, starts=starts)
        return self._next

    def come_true(self, running: SequenceOf[Sequence]) -> StepPlan | None:
        """The plan that was foreseen, with its tokens; None if there is none, or the sequences that run now are not its
        own or not where it begins.
        """
        plan = self._next
        if (
            plan is None
            or plan.requests != tuple([seq.request for seq in running])
            or plan.starts != array("i", [seq.num_computed for seq in running])
        ):
            return None
        for s, seq in enumerate(running):
            plan.tokens[s] = seq.tokens[-1]
        return self.note(plan)


def _goes_on(seq: Sequence) -> bool:
    return seq.num_computed + 1 < seq.num_slots and len(seq.tokens) + 1 < seq.max_total and not seq.needs_history
