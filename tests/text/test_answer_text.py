"""The text of an answer: tokens' texts join to it, however tokens arrive and wherever it is cut."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from headrace.text.answer import AnswerText, TextDelta, TextOptions
from headrace.text.stops import StopMatcher, StopStrings
from headrace.text.tokenizer import Tokenizer
from tiny import SPECIAL_TOKENS, VOCAB_SIZE

# Any token, and often those of single bytes that stop strings are made of
BYTES = [len(SPECIAL_TOKENS) + byte for byte in "the aé🙂".encode()]
TOKENS = st.lists(st.sampled_from(BYTES) | st.sampled_from(BYTES) | st.integers(0, VOCAB_SIZE - 1), max_size=24)
STOPS = st.lists(st.text("the aé🙂\ufffd", min_size=1, max_size=4), max_size=3)
BORDERS = st.lists(st.integers(0, 30), max_size=6)


@dataclass
class Collected:
    """What a client has put together from the deltas."""

    text: str = ""
    tokens: list[tuple[int, str, int]] = field(default_factory=list)
    stop: str | None = None

    def add(self, delta: TextDelta) -> None:
        assert delta.text == "".join(token.text for token in delta.tokens)
        self.text += delta.text
        self.tokens += [(token.token, token.text, token.offset) for token in delta.tokens]
        self.stop = delta.stop or self.stop


def collect(tokenizer: Tokenizer, options: TextOptions, groups: list[list[int]]) -> tuple[Collected, AnswerText]:
    answer, collected = AnswerText(tokenizer, options), Collected()
    for group in groups:
        delta = answer.push(group)
        assert not delta or delta.text or delta.stop, "a delta without text ends nothing"
        collected.add(delta)
    collected.add(answer.finish())
    return collected, answer


def grouped(tokens: list[int], borders: list[int]) -> list[list[int]]:
    cuts = [0, *sorted(border % (len(tokens) + 1) for border in borders), len(tokens)]
    return [tokens[start:end] for start, end in itertools.pairwise(cuts)]


@given(
    tokens=TOKENS, stops=STOPS, borders=BORDERS, include=st.booleans(), skip=st.booleans(), minimum=st.integers(0, 5)
)
def test_the_answer_does_not_depend_on_how_its_tokens_are_grouped(
    tiny_tokenizer: Tokenizer,
    tokens: list[int],
    stops: list[str],
    borders: list[int],
    include: bool,
    skip: bool,
    minimum: int,
) -> None:
    options = TextOptions(StopStrings(tuple(stops)), include_stop=include, skip_special=skip, min_tokens=minimum)
    whole, whole_answer = collect(tiny_tokenizer, options, [tokens])
    split, split_answer = collect(tiny_tokenizer, options, grouped(tokens, borders))
    assert whole == split
    assert (whole_answer.num_tokens, whole_answer.stop) == (split_answer.num_tokens, split_answer.stop)


@given(tokens=TOKENS, stops=STOPS, include=st.booleans(), skip=st.booleans())
def test_the_text_is_the_decoding_cut_at_the_stop_string(
    tiny_tokenizer: Tokenizer, tokens: list[int], stops: list[str], include: bool, skip: bool
) -> None:
    options = TextOptions(StopStrings(tuple(stops)), include_stop=include, skip_special=skip)
    collected, answer = collect(tiny_tokenizer, options, [[token] for token in tokens])
    matcher = StopMatcher(StopStrings(tuple(stops)), is_included=include)
    found = matcher.push(tiny_tokenizer.decode(tokens, skip_special=skip))
    assert collected.stop == answer.stop == found.stop
    assert collected.text == (found.text if found.stop else found.text + matcher.held)


@given(tokens=TOKENS, stops=STOPS, skip=st.booleans())
def test_every_token_of_the_answer_has_its_text_and_offset(
    tiny_tokenizer: Tokenizer, tokens: list[int], stops: list[str], skip: bool
) -> None:
    options = TextOptions(StopStrings(tuple(stops)), skip_special=skip)
    collected, answer = collect(tiny_tokenizer, options, [[token] for token in tokens])
    assert [token for token, _, _ in collected.tokens] == tokens[: answer.num_tokens]
    end = 0
    for _, text, offset in collected.tokens:
        assert offset == end
        end += len(text)
    assert end == len(collected.text)


@given(tokens=TOKENS, stops=STOPS)
def test_the_answer_counts_tokens_up_to_the_one_that_completes_a_stop_string(
    tiny_tokenizer: Tokenizer, tokens: list[int], stops: list[str]
) -> None:
    _, answer = collect(tiny_tokenizer, TextOptions(StopStrings(tuple(stops))), [tokens])
    if answer.stop is not None and "\ufffd" not in answer.stop:
        assert answer.stop in tiny_tokenizer.decode(tokens[: answer.num_tokens])
        assert not any(stop in tiny_tokenizer.decode(tokens[: answer.num_tokens - 1]) for stop in stops)


def test_a_stop_string_across_tokens_is_never_partly_shown(tiny_tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    answer = AnswerText(tiny_tokenizer, TextOptions(StopStrings(("END",))))
    deltas = [answer.push((byte_ids[byte],)) for byte in b"the END, and more"]
    assert "".join(delta.text for delta in deltas) == "the "
    assert [(token.text, token.offset) for token in deltas[6].tokens] == [("", 4)] * 3
    assert answer.stop == "END"
    assert answer.num_tokens == len("the END")
    assert answer.finish() == TextDelta("", ())


def test_a_token_inside_a_character_is_held_and_its_text_goes_to_the_one_that_completes_it(
    tiny_tokenizer: Tokenizer, byte_ids: dict[int, int]
) -> None:
    answer = AnswerText(tiny_tokenizer, TextOptions())
    *first, last = (byte_ids[byte] for byte in "🙂".encode())
    assert [answer.push((token,)) for token in first] == [TextDelta("", ())] * 3
    delta = answer.push((last,))
    assert [token.text for token in delta.tokens] == ["", "", "", "🙂"]


def test_an_answer_cut_inside_a_character_ends_with_a_replacement_of_its_last_token(
    tiny_tokenizer: Tokenizer, byte_ids: dict[int, int]
) -> None:
    answer = AnswerText(tiny_tokenizer, TextOptions())
    assert answer.push([byte_ids[ord("a")], byte_ids[0xF0]]).text == "a"
    tail = answer.finish()
    assert [(token.token, token.text, token.offset) for token in tail.tokens] == [(byte_ids[0xF0], "\ufffd", 1)]


def test_the_replacement_at_the_end_may_complete_a_stop_string(
    tiny_tokenizer: Tokenizer, byte_ids: dict[int, int]
) -> None:
    answer = AnswerText(tiny_tokenizer, TextOptions(StopStrings(("b\ufffd",))))
    assert answer.push([byte_ids[ord("a")], byte_ids[ord("b")], byte_ids[0xF0]]).text == "a"
    tail = answer.finish()
    assert (tail.text, tail.stop, answer.num_tokens) == ("", "b\ufffd", 3)


def test_the_token_that_ended_the_answer_has_no_text_unless_it_is_included(tiny_tokenizer: Tokenizer) -> None:
    (x,) = tiny_tokenizer.encode("x")
    for include, expected in ((False, "hi"), (True, "hix")):
        options = TextOptions(stop_ids=frozenset({x}), include_stop=include)
        collected, answer = collect(tiny_tokenizer, options, [[*tiny_tokenizer.encode("hi"), x]])
        assert collected.text == expected
        assert [token for token, _, _ in collected.tokens][-1] == x
        assert answer.num_tokens == len(collected.tokens)


def test_a_stop_string_does_not_count_before_min_tokens(tiny_tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    tokens = [byte_ids[byte] for byte in b"ab ab"]
    answer = AnswerText(tiny_tokenizer, TextOptions(StopStrings(("ab",)), min_tokens=2))
    assert answer.push(tokens).text == "ab "
    assert answer.num_tokens == 5
    straddling = AnswerText(tiny_tokenizer, TextOptions(StopStrings(("ab",)), min_tokens=1))
    assert straddling.push(tokens[:2]).text == "ab"
    assert straddling.stop is None


def test_offsets_begin_after_an_echoed_prompt(tiny_tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    answer = AnswerText(tiny_tokenizer, TextOptions(StopStrings(("c",))), offset=10)
    delta = answer.push([byte_ids[byte] for byte in b"abc"])
    assert [(token.text, token.offset) for token in delta.tokens] == [("a", 10), ("b", 11), ("", 12)]
