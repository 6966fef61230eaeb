"""What one rendering of a chat template may cost: steps, characters, CPU time.

Owns the account and its limits. Refuses to know Jinja: sandbox.py says what is charged and when.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, cast

MAX_STEPS = 1_000_000  # passes through a loop or macro, calls, filters; real templates take some tens per message
MAX_CPU_SECONDS = 2.0  # of the rendering thread, so that a busy machine does not fail an honest template
FREE_CHARS = 32 * 2**20  # characters that operations may touch in all, besides …
CHARS_PER_INPUT = 64  # … this many times the size of what is rendered: real templates touch a message some ten times
FREE_VALUE = 8 * 2**20  # the same for a single value
VALUE_PER_INPUT = 4
ITEM_CHARS = 64  # what an entry of a list or dict counts for
MAX_WIDTH = 1_000  # of padding and indentation
MAX_BITS = 4_096  # of an integer

# Fields of `%` (and of strftime) and of str.format whose width or precision has four digits or is an argument
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-+ #0-9.]*(\d{4}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*(\d{4}|\{)")

_CONTAINERS: tuple[type, ...] = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))


class LimitError(Exception):
    """A template asked for more than it may have."""


class Meter:
    """The account of one rendering."""

    def __init__(self, inputs: Iterable[Any], clock: Callable[[], float]) -> None:
        """`inputs` are the values handed to the template: measured once, and never walked through again."""
        self._known: dict[int, int] = {}  # size by id() of the containers in `inputs`, which outlive the rendering
        size = sum(self._measure(value) for value in inputs)
        self._max_value = FREE_VALUE + VALUE_PER_INPUT * size
        self._chars_left = FREE_CHARS + CHARS_PER_INPUT * size
        self._steps_left = MAX_STEPS
        self._clock = clock
        self._deadline = clock() + MAX_CPU_SECONDS

    def step(self, chars: int = 0) -> None:
        """Charge one step that puts out `chars` characters of the template's own text."""
        self._steps_left -= 1
        self._chars_left -= chars
        if self._steps_left < 0:
            raise LimitError(f"it takes more than {MAX_STEPS:,} steps")
        if self._chars_left < 0:
            raise LimitError("it makes too much text")
        if self._clock() > self._deadline:
            raise LimitError(f"it takes more than {MAX_CPU_SECONDS} seconds")

    def weigh(self, *values: Any) -> int:
        """Charge the characters of `values`, containers with all that they hold, and return their number."""
        size, waiting = 0, list(values)
        while waiting:
            value = waiting.pop()
            size += self._known.get(id(value), 0) or _own_size(value, waiting)
            self.check_size(size)
        self._chars_left -= size
        self.step()
        return size

    def check_size(self, size: int) -> None:
        """Raise before a value of `size` characters is made."""
        if size > self._max_value:
            raise LimitError(f"a value of it has more than {self._max_value:,} characters")

    def _measure(self, value: Any) -> int:
        parts: list[Any] = []
        size = _own_size(value, parts) + sum(self._measure(part) for part in parts)
        if not isinstance(value, str | int):
            self._known[id(value)] = size
        return size


def _own_size(value: Any, parts: list[Any]) -> int:
    """The size of `value` without what it contains, which is added to `parts`."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        parts.extend(value)
        parts.extend(value.values())
    elif isinstance(value, _CONTAINERS):
        parts.extend(cast(Iterable[Any], value))
    elif isinstance(value, int):
        return value.bit_length() // 8
    return ITEM_CHARS * (1 + len(parts))


def check_width(*widths: Any) -> None:
    for width in widths:
        if isinstance(width, int) and width > MAX_WIDTH:
            raise LimitError(f"it pads to {width:,} characters; at most {MAX_WIDTH:,} are allowed")


def check_percent_format(text: str) -> None:
    """Refuse a format of `%` or strftime that could pad without bound."""
    if _WIDE_PERCENT.search(text):
        raise LimitError(f"it formats with a width of {MAX_WIDTH:,} or more, or one that is not written out")


def check_brace_format(text: str) -> None:
    """Refuse a format of str.format that could pad without bound."""
    if _WIDE_BRACES.search(text):
        raise LimitError(f"it formats with a width of {MAX_WIDTH:,} or more, or one that is not written out")


def check_product(left: Any, right: Any, meter: Meter) -> None:
    """Refuse `left * right` before it becomes too large."""
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length())
    elif isinstance(left, int):
        meter.check_size(meter.weigh(right) * max(left, 0))
    elif isinstance(right, int):
        meter.check_size(meter.weigh(left) * max(right, 0))


def check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() * max(right, 0))


def check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise LimitError(f"a number of it has more than {MAX_BITS:,} bits")
