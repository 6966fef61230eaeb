"""The next plan, told while a step is out: what can be made ready beside the step costs no time after it.

Owns the plan that is expected. Refuses to decide anything: it says what the scheduler will plan if nothing happens but
what mostly happens, that each sequence draws a token and goes on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf

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

    def forget(self) -> None:
        """Something happens that was not foreseen."""
        self._next = None

    def foresee(self, flight: SequenceOf[Sequence]) -> StepPlan | None:
        """The plan after the last one, whose slices are those of `flight`. Its tokens are UNKNOWN. None where a slice
        is no plain decode, needs a block for the next one or comes to its end.
        """
        plan = self._last
        if plan is not None and flight and all(_goes_on(seq) for seq in flight):
            self._next = StepPlan(
                step=plan.step + 1,
                requests=plan.requests,
                tokens=array("i", [UNKNOWN]) * len(flight),
                token_offsets=plan.token_offsets,
                starts=array("i", [start + 1 for start in plan.starts]),
                num_drafts=plan.num_drafts,
                row_offsets=plan.row_offsets,
                targets=plan.targets,
                block_offsets=plan.block_offsets,
                blocks=plan.blocks,
                histories=plan.histories,
            )
        return self._next

    def come_true(self, running: SequenceOf[Sequence]) -> StepPlan | None:
        """The plan that was foreseen, with its tokens, if nothing else happened: its slices are those of `running`."""
        plan = self._next
        if plan is not None:
            self.note(plan)
            for s, seq in enumerate(running):
                plan.tokens[s] = seq.tokens[-1]
                seq.num_in_flight = 1
        return plan


def _goes_on(seq: Sequence) -> bool:
    return (
        seq.num_in_flight == 1
        and seq.is_drawing
        and seq.num_computed + 1 < seq.num_slots
        and len(seq.tokens) + 1 < seq.max_total
        and not seq.needs_history
    )
