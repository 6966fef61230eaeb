"""Stop strings: the text is cut at the same place however it arrives, and nothing is held back without need."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.text.stops import MAX_STOP_CHARS, MAX_STOPS, StopMatcher, StopStrings
from headrace.types import RequestError

FEW_LETTERS = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=5)
BORDERS = st.lists(st.integers(0, 30), max_size=6)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By the definition: the first character at which a stop string is complete, and the longest that is."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def pieces(text: str, borders: list[int]) -> list[str]:
    cuts = [0, *sorted(border % (len(text) + 1) for border in borders), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(cuts)]


@given(text=FEW_LETTERS, stops=STOPS, borders=BORDERS)
def test_any_split_of_a_text_is_cut_where_the_definition_says(text: str, stops: list[str], borders: list[int]) -> None:
    matcher = StopMatcher(StopStrings(tuple(stops)))
    emitted, stop = "", None
    for piece in pieces(text, borders):
        found = matcher.push(piece)
        emitted, stop = emitted + found.text, found.stop
        if stop is not None:
            break
    else:
        emitted += matcher.held
    assert (emitted, stop) == cut(text, stops)


@given(text=FEW_LETTERS, stops=STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(tuple(stops)))
    emitted = ""
    for end, char in enumerate(text, 1):
        found = matcher.push(char)
        emitted += found.text
        if found.stop is not None:
            return
        held = text[len(emitted) : end]
        beginnings = [text[start:end] for start in range(end) if any(s.startswith(text[start:end]) for s in stops)]
        assert held == max(beginnings, key=len, default="")


@given(text=FEW_LETTERS, stops=STOPS, borders=BORDERS)
def test_an_included_stop_string_ends_the_text(text: str, stops: list[str], borders: list[int]) -> None:
    matcher = StopMatcher(StopStrings(tuple(stops)), is_included=True)
    emitted, stop = "", None
    for piece in pieces(text, borders):
        found = matcher.push(piece)
        emitted, stop = emitted + found.text, found.stop
        if stop is not None:
            break
    else:
        emitted += matcher.held
    before, expected = cut(text, stops)
    assert (emitted, stop) == (before + (expected or ""), expected)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    found = StopMatcher(
        StopStrings(
            (
                "abcd",
                "bc",
            )
        )
    ).push("xabcd")
    assert (found.text, found.stop) == ("xa", "bc")


def test_of_stop_strings_that_end_together_the_longest_wins() -> None:
    found = StopMatcher(
        StopStrings(
            (
                "c",
                "abc",
                "bc",
            )
        )
    ).push("xabc")
    assert (found.text, found.stop) == ("x", "abc")


def test_a_false_start_is_released() -> None:
    matcher = StopMatcher(StopStrings(("\n\nUser:",)))
    assert matcher.push("hi\n\nUs").text == "hi"
    assert matcher.push("e").text == ""
    assert matcher.push(" it").text == "\n\nUse it"
    assert matcher.held == ""


def test_what_is_held_at_the_end_is_given_back() -> None:
    matcher = StopMatcher(StopStrings(("END",)))
    assert matcher.push("the EN").text == "the "
    assert matcher.held == "EN"


def test_one_set_of_stop_strings_serves_many_answers() -> None:
    stops = StopStrings(("END", "STOP"))
    first, second = StopMatcher(stops), StopMatcher(stops)
    assert first.push("a E").text == "a " and second.push("b S").text == "b "
    assert first.push("ND").stop == "END" and second.push("TOP").stop == "STOP"


def test_without_stop_strings_everything_leaves_at_once() -> None:
    matcher = StopMatcher(StopStrings(()))
    assert matcher.push("anything").text == "anything"
    assert matcher.held == ""


def test_long_overlapping_stop_strings_take_linear_time() -> None:
    stops = ["a" * (MAX_STOP_CHARS - i) + "b" for i in range(1, MAX_STOPS + 1)]
    matcher = StopMatcher(StopStrings(tuple(stops)))
    start = time.process_time()
    for _ in range(2_000):
        assert matcher.push("a" * 100).stop is None
    assert matcher.push("b").stop == stops[0]
    assert time.process_time() - start < 10  # some 0.1 s; 200,000 × 16 × 1,024 comparisons would take far longer


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        (["x"] * (MAX_STOPS + 1), "stop has 17 strings; at most 16 are allowed"),
        (["x", ""], "stop has an empty string"),
        (["x" * (MAX_STOP_CHARS + 1)], "a stop string has 1025 characters; at most 1024 are allowed"),
    ],
)
def test_stop_strings_beyond_the_limits_are_refused(stops: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        StopStrings(tuple(stops))
    assert caught.value.param == "stop"
