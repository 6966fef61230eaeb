"""Text from tokens as they come: the same wherever they end, and never half a character."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import cast

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


def cut(content: bytes, borders: list[int]) -> list[bytes]:
    """`content` cut at the given places, some pieces empty."""
    cuts = [0, *sorted(border % (len(content) + 1) for border in borders), len(content)]
    return [content[start:end] for start, end in itertools.pairwise(cuts)]


@given(content=AWKWARD_BYTES, borders=st.lists(st.integers(0, 100), max_size=8))
def test_the_pieces_join_to_the_decoding_of_all_bytes(content: bytes, borders: list[int]) -> None:
    token_bytes = cut(content, borders)
    tokenizer = cast(Tokenizer, SimpleNamespace(token_bytes=token_bytes, special_ids=frozenset()))
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in range(len(token_bytes))]
    assert "".join(pieces) + detokenizer.finish() == content.decode("utf-8", "replace")


@given(text=st.text(max_size=20))
def test_a_split_character_never_shows_as_a_replacement(
    tiny_tokenizer: Tokenizer, byte_ids: dict[int, int], text: str
) -> None:
    detokenizer = Detokenizer(tiny_tokenizer)
    seen = ""
    for byte in text.encode():
        seen += detokenizer.push(byte_ids[byte])
        assert text.startswith(seen)
    assert seen == text
    assert detokenizer.finish() == ""


def test_an_answer_that_ends_inside_a_character_ends_with_one_replacement(
    tiny_tokenizer: Tokenizer, byte_ids: dict[int, int]
) -> None:
    detokenizer = Detokenizer(tiny_tokenizer)
    assert [detokenizer.push(byte_ids[byte]) for byte in b"a" + "🙂".encode()[:3]] == ["a", "", "", ""]
    assert detokenizer.is_inside_character
    assert detokenizer.finish() == "\ufffd"
    assert not detokenizer.is_inside_character


def test_a_leading_space_is_kept(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode(" the answer")
    detokenizer = Detokenizer(tiny_tokenizer)
    assert "".join(map(detokenizer.push, ids)) == " the answer"


def test_special_and_hidden_tokens_give_no_text_unless_asked_for(tiny_tokenizer: Tokenizer) -> None:
    ids = [*tiny_tokenizer.encode("hi"), 2, *tiny_tokenizer.encode("x")]
    hidden = frozenset(tiny_tokenizer.encode("x"))
    assert "".join(map(Detokenizer(tiny_tokenizer).push, ids)) == "hix"
    assert "".join(map(Detokenizer(tiny_tokenizer, skip_special=False).push, ids)) == "hi<|im_end|>x"
    assert "".join(map(Detokenizer(tiny_tokenizer, hidden_ids=hidden).push, ids)) == "hi"
    shown = Detokenizer(tiny_tokenizer, skip_special=False, hidden_ids=hidden)
    assert "".join(map(shown.push, ids)) == "hi<|im_end|>"
