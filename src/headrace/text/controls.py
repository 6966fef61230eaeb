"""Control strings (the texts of special tokens) in what users write: found, and hidden from a template.

Owns the promise that only a chat template writes control tokens. Refuses to know templates and tokenizers.

Each control string in a user's text is one private-use character while the template runs, and so is the first or last
character of what could become a control string together with what the template puts beside it. The control strings
in the result are therefore the template's. (A template that takes characters out of the *middle* of a message could
still join what is left to one; none is known that does so with text a user could shape to it.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.types import RequestError

# Characters that no standard gives a meaning
PRIVATE_USE = range(0xF0000, 0xFFFFE)


class ControlStrings:
    """How a model's control strings are found in a text, whole or cut off at its edges."""

    def __init__(self, strings: Iterable[str]) -> None:
        longest_first = sorted((string for string in strings if string), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # (?!) matches nowhere
        self._lengths = range(1, max(map(len, longest_first), default=1))
        self._beginnings = {string[:length] for string in longest_first for length in range(1, len(string))}
        self._endings = {string[-length:] for string in longest_first for length in range(1, len(string))}

    def is_begun(self, text: str) -> bool:
        """Whether `text` ends in the beginning of a control string."""
        return any(text[-length:] in self._beginnings for length in self._lengths)

    def is_ended(self, text: str) -> bool:
        """Whether `text` begins with the end of a control string."""
        return any(text[:length] in self._endings for length in self._lengths)

    def split(self, text: str) -> Iterable[tuple[str, bool]]:
        """The parts of `text` in order, and whether each is a control string."""
        start = 0
        for match in self.pattern.finditer(text):
            if start < match.start():
                yield text[start : match.start()], False
            yield match.group(), True
            start = match.end()
        if start < len(text):
            yield text[start:], False


class Marks:
    """The private-use characters of one rendering: each stands for a string that the template must not see."""

    def __init__(self, controls: ControlStrings, written: Any, templated: Iterable[str]) -> None:
        """`written` is everything that users wrote, `templated` what may be put beside it: no mark occurs in either."""
        used = set().union(*_strings(written), *templated)
        self._free = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
        self._controls = controls
        self._mark_of: dict[str, str] = {}
        self.end = self._next()

    def _next(self) -> str:
        try:
            return next(self._free)
        except StopIteration:
            raise RequestError(
                "the messages use every private-use character of Unicode; take one out", "messages"
            ) from None

    def protect(self, value: Any) -> Any:
        """A copy of `value` in which marks stand for control strings; JSON values only, others become their text."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, Mapping):
            return {self._protect_whole(str(key)): self.protect(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.protect(item) for item in value]
        return value if value is None or isinstance(value, bool | int | float) else self.protect(str(value))

    def restore(self, text: str) -> str:
        """`text` with every mark replaced by what it stands for."""
        if not self._mark_of:
            return text
        return text.translate({ord(mark): string for string, mark in self._mark_of.items()})

    def _protect_whole(self, text: str) -> str:
        return self._controls.pattern.sub(lambda match: self._mark(match.group()), without_surrogates(text))

    def _protect_text(self, text: str) -> str:
        text = self._protect_whole(text)
        inner = text.strip()  # a template may strip it, too
        start = text.index(inner)
        before, after = text[:start], text[start + len(inner) :]
        if self._controls.is_ended(inner):
            inner = self._mark(inner[0]) + inner[1:]
        if self._controls.is_begun(inner):
            inner = inner[:-1] + self._mark(inner[-1])
        return before + inner + after

    def _mark(self, string: str) -> str:
        if string not in self._mark_of:
            self._mark_of[string] = self._next()
        return self._mark_of[string]


def _strings(value: Any) -> Iterable[str]:
    """Every string in `value`, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, Iterable):
        for item in value:
            yield from _strings(item)


def without_surrogates(text: str) -> str:
    """`text` with each pair of surrogates joined and each lone one replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
