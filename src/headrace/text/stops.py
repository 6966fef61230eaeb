"""Stop strings in a text that arrives in pieces.

Owns what is held back because it may begin a stop string. Refuses to know tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.types import RequestError

MAX_STOPS = 16
MAX_STOP_CHARS = 1024  # of one stop string; the table below has a node per character


@dataclass(slots=True)
class _Node:
    """A prefix of some stop string."""

    depth: int
    next: dict[str, _Node] = field(default_factory=dict)
    suffix: _Node | None = None  # the longest proper suffix of this prefix that is a prefix, too
    stop: str | None = None  # the longest stop string that ends here


@dataclass(frozen=True, slots=True)
class StopStrings:
    """Stop strings, ready to be looked for: one may serve many answers. RequestError if they may not be asked for.

    Sixteen of the greatest length take 10 ms to make ready, so a request does it once for all its answers.
    """

    strings: tuple[str, ...] = ()
    root: _Node = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_stops(self.strings)
        object.__setattr__(self, "root", _automaton(self.strings))


class StopText(msgspec.Struct, frozen=True, gc=False):
    """What a piece of text gave: characters that may leave now, and the stop string that ended the text, if any."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Cuts a text at the first of several stop strings, in time linear in the text however they overlap.

    The match that is *complete* first wins, as it would if the text came one character at a time; of those complete at
    the same character, the longest. So the result does not depend on how the text is split into pieces.
    Source: Aho and Corasick 1975, Efficient string matching.
    """

    def __init__(self, stops: StopStrings, *, is_included: bool = False) -> None:
        """`is_included`: the stop string itself is part of the text that leaves."""
        self._root = stops.root
        self._node = self._root
        self.held = ""  # always the text of self._node: the longest suffix that begins a stop string
        self._is_included = is_included

    def push(self, text: str) -> StopText:
        """What may leave after `text`. Nothing may be pushed after a stop string was found."""
        if not self._root.next:
            return StopText(text)
        node = self._node
        for index, char in enumerate(text):
            node = self._step(node, char)
            if node.stop is not None:
                seen = self.held + text[: index + 1]
                self.held = ""
                kept = len(seen) if self._is_included else len(seen) - len(node.stop)
                return StopText(seen[:kept], node.stop)
        self._node = node
        seen = self.held + text
        safe = len(seen) - node.depth
        self.held = seen[safe:]
        return StopText(seen[:safe])

    def _step(self, node: _Node, char: str) -> _Node:
        while (following := node.next.get(char)) is None:
            if node.suffix is None:
                return node
            node = node.suffix
        return following


def check_stops(stops: Sequence[str]) -> None:
    """RequestError if `stops` is not what a request may ask for."""
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed", "stop")
    for stop in stops:
        if not stop:
            raise RequestError("stop has an empty string, which would end every answer at once; leave it out", "stop")
        if len(stop) > MAX_STOP_CHARS:
            raise RequestError(
                f"a stop string has {len(stop)} characters; at most {MAX_STOP_CHARS} are allowed", "stop"
            )


def _automaton(stops: Sequence[str]) -> _Node:
    root = _Node(depth=0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.next.setdefault(char, _Node(depth=node.depth + 1))
        node.stop = stop
    waiting = deque([root])
    while waiting:  # by depth, so that shorter prefixes have their suffix already
        node = waiting.popleft()
        for char, child in node.next.items():
            child.suffix = _longest_suffix(node, char, root)
            if child.stop is None:
                child.stop = child.suffix.stop
            waiting.append(child)
    return root


def _longest_suffix(parent: _Node, char: str, root: _Node) -> _Node:
    node = parent.suffix
    while node is not None:
        if char in node.next:
            return node.next[char]
        node = node.suffix
    return root
