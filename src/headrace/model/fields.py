"""Reading settings one by one from a model's metadata, whatever file they came from, with errors that name the field.

Owns strict JSON and the checks of type and range. Refuses to know what a field means (gguf.py, hf.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from typing import Any, TypeVar

from headrace.types import ModelError

MAX_JSON_BYTES = 8 << 20  # 100 × the index of a 400-billion-parameter model; bounds what parsing can allocate

# Bounds of a model's sizes: far above any model there is, small enough that no product of a few overflows 64 bits.
MAX_SIZE = 1 << 20
MAX_LAYERS = 1 << 10
MAX_CONTEXT = 1 << 27

D = TypeVar("D")
_ABSENT: Any = object()


class Fields:
    """A mapping that remembers which of its keys were read, so that the rest can be refused instead of ignored.

    A value of None counts as absent, as it does in config.json.
    """

    def __init__(self, source: str, values: Mapping[str, object], prefix: str = "") -> None:
        self.source = source
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._values.get(self._prefix + name) is not None

    def value(self, name: str, default: Any = _ABSENT) -> Any:
        """The value as it is, `default` where it is absent; ModelError if there is no default either."""
        key = self._prefix + name
        self._read.add(key)
        value = self._values.get(key)
        if value is not None:
            return value
        if default is _ABSENT:
            raise ModelError(f"{self.source}: {key} is missing")
        return default

    def integer(self, name: str, low: int, high: int, default: D = _ABSENT) -> int | D:
        value = self.value(name, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refusal(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: D = _ABSENT) -> float | D:
        """A finite float from low to high."""
        value = self.value(name, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(name, f"a number from {low:g} to {high:g}")
        if not low <= value <= high or not math.isfinite(value):
            raise self.refusal(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, name: str, default: D = _ABSENT) -> bool | D:
        value = self.value(name, default)
        if value is default:
            return default
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def text(self, name: str, default: D = _ABSENT) -> str | D:
        value = self.value(name, default)
        if value is default:
            return default
        if not isinstance(value, str) or not _is_unicode(value):
            raise self.refusal(name, "a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; none where it is absent."""
        value = self.value(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refusal(name, "a list of strings")
        return tuple(value)

    def table(self, name: str) -> Fields:
        """A nested object; an empty one where it is absent."""
        value = self.value(name, {})
        if not isinstance(value, dict):
            raise self.refusal(name, "an object")
        return Fields(f"{self.source}: {self._prefix}{name}", value)

    def require(self, name: str, allowed: object, reason: str) -> None:
        """Refuse the field unless it is absent or exactly `allowed`."""
        value = self.value(name, allowed)
        if type(value) is not type(allowed) or value != allowed:
            raise self.refusal(name, f"{allowed!r}: {reason}")

    def ignore(self, names: Iterable[str]) -> None:
        """Count fields as read that are known to change nothing."""
        self._read.update(self._prefix + name for name in names)

    def unread(self) -> list[str]:
        """The keys under the prefix that nobody asked for, whole."""
        keys = (key for key, value in self._values.items() if key.startswith(self._prefix) and value is not None)
        return sorted(key for key in keys if key not in self._read)

    def refuse_unread(self, what: str) -> None:
        """Refuse keys under the prefix that nobody asked for: they may change the answers."""
        if unread := self.unread():
            raise ModelError(f"{self.source}: {what} does not support the field {shown(unread[0])}")

    def refusal(self, name: str, allowed: str) -> ModelError:
        value = self._values.get(self._prefix + name)
        return ModelError(f"{self.source}: {self._prefix}{name} is {shown(value)}; it must be {allowed}")


def _is_unicode(text: str) -> bool:
    """Whether the text has no half of a surrogate pair: JSON can spell one, UTF-8 cannot."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def shown(value: object, limit: int = 80) -> str:
    """A value from a file as an error message may carry it: short, and escaped."""
    if isinstance(value, Sized) and not isinstance(value, str | bytes):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value[: limit + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError if it is anything else."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if len(text) > MAX_JSON_BYTES:
        raise ModelError(f"{path}: is longer than {MAX_JSON_BYTES} bytes, the most that is read as JSON")
    return parse_json(text, str(path))


def parse_json(text: bytes, source: str) -> dict[str, Any]:
    """A JSON object; duplicate keys, NaN, infinities and bytes that are not UTF-8 are refused."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except RecursionError:
        raise ModelError(f"{source}: JSON is nested too deep") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ModelError(f"{source}: is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{source}: must hold a JSON object")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} is there twice")
    return table


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
