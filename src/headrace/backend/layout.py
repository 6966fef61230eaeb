"""Where the values of a recorded forward pass live: one arena, laid out by liveness.

Time is counted in phases, as the core's Program runs them: row operations that follow each other over the same rows
form one phase, in which rows overtake each other; a linear's or an attention's own work is a phase of its own. A
value's floats may serve another from the phase after the one that last reads it, or at once for a result that is
written exactly where it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.backend.recording import Operation, RowKind, Value
from headrace.types import InvariantError

ALIGN_FLOATS = 16  # one vector


@dataclass(slots=True)
class Life:
    """From the phase that writes a value to the one that last reads it, and which operation does."""

    first: int
    last: int
    reader: Operation | None = None

    def read(self, phase: int, reader: Operation) -> None:
        self.last, self.reader = phase, reader


@dataclass(frozen=True, slots=True)
class Place:
    """Floats [begin, end) of the arena, taken in phases [first, last]."""

    begin: int
    end: int
    first: int
    last: int


def lay_out(operations: Sequence[Operation], num_rows: Mapping[RowKind, int]) -> dict[Value, int]:
    """The offset in floats of every value, for steps of up to `num_rows` rows of each kind."""
    lives = lives_of(operations)
    offsets: dict[Value, int] = {}
    places: list[Place] = []
    for operation in operations:
        for value in operation.writes:
            life = lives[value]
            size = -(-value.width * num_rows[value.kind] // ALIGN_FLOATS) * ALIGN_FLOATS
            begin = _place_of_dying(operation, value, lives, offsets)
            if begin is None:
                begin = _first_gap(size, [place for place in places if _overlap(place, life)])
            offsets[value] = begin
            places.append(Place(begin, begin + size, life.first, life.last))
    return offsets


def lives_of(operations: Sequence[Operation]) -> dict[Value, Life]:
    """When every value lives; raises InvariantError for one that is read before it is written."""
    lives: dict[Value, Life] = {}
    phase, rows = 0, None  # the kind of rows that the present phase runs over; None: not a phase of rows
    for operation in operations:
        kind = (operation.writes or operation.reads)[0].kind
        if kind is not rows:
            phase, rows = phase + 1, kind
        for value in operation.reads:
            _life(lives, value).read(phase, operation)
        if not operation.is_rowwise:
            phase, rows = phase + 1, None
        for value in operation.reads_late:
            _life(lives, value).read(phase, operation)
        for value in operation.writes:
            lives[value] = Life(phase, phase)
    return lives


def _life(lives: Mapping[Value, Life], value: Value) -> Life:
    if value not in lives:
        raise InvariantError(f"value {value.id} is read before it is written")
    return lives[value]


def _place_of_dying(
    operation: Operation, value: Value, lives: Mapping[Value, Life], offsets: Mapping[Value, int]
) -> int | None:
    """The place of an operand that ends here and that `value` may take over; None where there is none."""
    taken = {offsets[other] for other in operation.writes if other in offsets}
    for operand in operation.replaceable:
        is_alike = (operand.width, operand.kind) == (value.width, value.kind)
        if is_alike and lives[operand].reader is operation and offsets[operand] not in taken:
            return offsets[operand]
    return None


def _overlap(place: Place, life: Life) -> bool:
    return place.first <= life.last and life.first <= place.last


def _first_gap(size: int, taken: list[Place]) -> int:
    """The lowest offset at which `size` floats are free."""
    begin = 0
    for place in sorted(taken, key=lambda place: place.begin):
        if begin + size <= place.begin:
            break
        begin = max(begin, place.end)
    return begin
