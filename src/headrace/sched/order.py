"""Who comes first, and who may join what is already running: the admission rules.

Knows requests and the order in which they came. Refuses to know blocks, budgets and what a step is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from headrace.types import Request

Rank = tuple[int, int]  # smaller comes first; the second number is the arrival's, so that no two are equal


class Order(Protocol):
    """An admission rule."""

    @property
    def is_batched(self) -> bool:
        """Whether a waiting request may only run as part of a batch that is formed when nothing runs."""

    def rank(self, request: Request, arrival: int) -> Rank:
        """Asked once, when the `arrival`-th request is added. The lowest runs first, the highest is preempted."""


@dataclass(frozen=True, slots=True)
class FCFS:
    """First come, first served."""

    is_batched: ClassVar[bool] = False

    def rank(self, request: Request, arrival: int) -> Rank:
        return (0, arrival)


@dataclass(frozen=True, slots=True)
class Priority:
    """Lower `Request.priority` first; first come, first served among equals."""

    is_batched: ClassVar[bool] = False

    def rank(self, request: Request, arrival: int) -> Rank:
        return (request.priority, arrival)


@dataclass(frozen=True, slots=True)
class Static:
    """The textbook baseline: a batch is formed of who waits when nothing runs, and runs until its last answer ends."""

    is_batched: ClassVar[bool] = True

    def rank(self, request: Request, arrival: int) -> Rank:
        return (0, arrival)
