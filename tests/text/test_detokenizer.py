"""Text from tokens as they come: the same however they are grouped, and never half a character."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headrace.text.detokenizer import Detokenizer
from headrace.text.tokenizer import Tokenizer

# Bytes that begin, continue and break characters in every way
AWKWARD_BYTES = st.lists(
    st.sampled_from([b"a", b" ", "é".encode(), "日".encode(), "🙂".encode(), b"\xff", b"\xc0\x80", b"\xed\xa0\x80"])
    | st.binary(min_size=1, max_size=3)
    | st.integers(0x80, 0xFF).map(lambda byte: bytes((byte,))),
    max_size=12,
).map(b"".join)


def groups(tokens: list[int], borders: list[int]) -> list[list[int]]:
    """`tokens` cut at the given places, some groups empty."""
    cuts = [0, *sorted(border % (len(tokens) + 1) for border in borders), len(tokens)]
    return [tokens[start:end] for start, end in itertools.pairwise(cuts)]


@given(content=AWKWARD_BYTES, borders=st.lists(st.integers(0, 100), max_size=8))
def test_the_pieces_join_to_the_decoding_of_all_bytes(
    tiny_tokenizer: Tokenizer, byte_ids: dict[int, int], content: bytes, borders: list[int]
) -> None:
    detokenizer = Detokenizer(tiny_tokenizer)
    pieces = [detokenizer.push(group) for group in groups([byte_ids[byte] for byte in content], borders)]
    assert "".join(pieces) + detokenizer.finish() == content.decode("utf-8", "replace")


@given(text=st.text(max_size=20))
def test_a_split_character_never_shows_as_a_replacement(
    tiny_tokenizer: Tokenizer, byte_ids: dict[int, int], text: str
) -> None:
    detokenizer = Detokenizer(tiny_tokenizer)
    seen = ""
    for byte in text.encode():
        seen += detokenizer.push((byte_ids[byte],))
        assert text.startswith(seen)
    assert seen == text
    assert detokenizer.finish() == ""


def test_an_answer_that_ends_inside_a_character_ends_with_one_replacement(
    tiny_tokenizer: Tokenizer, byte_ids: dict[int, int]
) -> None:
    detokenizer = Detokenizer(tiny_tokenizer)
    assert detokenizer.push([byte_ids[byte] for byte in b"a" + "🙂".encode()[:3]]) == "a"
    assert detokenizer.is_inside_character
    assert detokenizer.finish() == "\ufffd"
    assert not detokenizer.is_inside_character


def test_a_leading_space_is_kept(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode(" the answer")
    detokenizer = Detokenizer(tiny_tokenizer)
    assert "".join(detokenizer.push((index,)) for index in ids) == " the answer"


def test_special_and_hidden_tokens_give_no_text_unless_asked_for(tiny_tokenizer: Tokenizer) -> None:
    ids = [*tiny_tokenizer.encode("hi"), 2, *tiny_tokenizer.encode("x")]
    hidden = frozenset(tiny_tokenizer.encode("x"))
    assert Detokenizer(tiny_tokenizer).push(ids) == "hix"
    assert Detokenizer(tiny_tokenizer, skip_special=False).push(ids) == "hi<|im_end|>x"
    assert Detokenizer(tiny_tokenizer, hidden_ids=hidden).push(ids) == "hi"
    assert Detokenizer(tiny_tokenizer, skip_special=False, hidden_ids=hidden).push(ids) == "hi<|im_end|>"
