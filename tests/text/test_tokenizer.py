"""The tokenizer against two independent ones (tools/tokenizer_corpus.py), and the rules around special tokens."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.model.files import GgufVocabulary, ModelFiles
from headrace.text.tokenizer import Tokenizer
from headrace.types import ModelError, RequestError

GOLDEN = Path(__file__).parent.parent / "golden"
CORPUS: list[dict[str, Any]] = json.loads((GOLDEN / "tokenizer_corpus.json").read_text("utf-8"))["strings"]
GOLDEN_PROMPTS: list[dict[str, Any]] = json.loads((GOLDEN / "smollm2.json").read_text("utf-8"))["prompts"]


def test_the_corpus_has_at_least_500_strings() -> None:
    assert len({row["text"] for row in CORPUS}) >= 500


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe"])
def test_hard_strings_have_the_ids_that_independent_tokenizers_give_them(smollm2: ModelFiles, pre: str) -> None:
    assert isinstance(smollm2.vocabulary, GgufVocabulary)
    tokenizer = Tokenizer.load(dataclasses.replace(smollm2.vocabulary, pre=pre))
    wrong = {}
    for row in CORPUS:
        expected = row.get(pre, row["smollm"])
        if (ids := tokenizer.encode(row["text"], add_special=False)) != expected:
            wrong[row["text"]] = (ids, expected)
    assert not wrong


def test_the_bytes_of_the_tokens_join_to_the_text(smollm2_tokenizer: Tokenizer) -> None:
    for row in CORPUS:
        ids = smollm2_tokenizer.encode(row["text"])
        assert b"".join(smollm2_tokenizer.token_bytes[index] for index in ids) == row["text"].encode()
        assert smollm2_tokenizer.decode(ids, skip_special=False) == row["text"]


def test_the_prompts_of_the_golden_figures_have_their_ids(smollm2_tokenizer: Tokenizer) -> None:
    completions = [row for row in GOLDEN_PROMPTS if isinstance(row["prompt"], str)]
    assert completions
    for row in completions:
        assert smollm2_tokenizer.encode(row["prompt"]) == row["ids"]


def test_special_tokens_in_a_text_are_parsed_or_left_as_text(smollm2_tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>b<repo_name>"
    parsed = smollm2_tokenizer.encode(text)
    plain = smollm2_tokenizer.encode(text, parse_special=False)
    assert [index for index in parsed if index in smollm2_tokenizer.special_ids] == [2, 3]
    assert not smollm2_tokenizer.special_ids.intersection(plain)
    assert smollm2_tokenizer.decode(plain) == text
    assert smollm2_tokenizer.decode(parsed) == "ab"
    assert smollm2_tokenizer.decode(parsed, skip_special=False) == text


def test_control_strings_are_the_texts_of_the_special_tokens(smollm2_tokenizer: Tokenizer) -> None:
    texts = [smollm2_tokenizer.token_text(index) for index in smollm2_tokenizer.special_ids]
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>", "<empty_output>"} <= set(texts)
    assert len(texts) == 17
    for text in texts:
        assert list(smollm2_tokenizer.controls.split(text)) == [(text, True)]
        assert smollm2_tokenizer.encode(text) == [smollm2_tokenizer.control_id(text)]


def test_a_long_text_is_encoded_as_a_short_one_and_lets_other_threads_run(smollm2_tokenizer: Tokenizer) -> None:
    line = "one 1234 é🙂 <|im_end|>\n\n  two"
    count = 12_000
    gaps = []

    def beat() -> None:
        before = time.perf_counter()
        while not is_done.wait(0.001):
            now = time.perf_counter()
            gaps.append(now - before)
            before = now

    is_done = threading.Event()
    thread = threading.Thread(target=beat)
    thread.start()
    began = time.perf_counter()
    ids = smollm2_tokenizer.encode(line * count)
    elapsed = time.perf_counter() - began
    is_done.set()
    thread.join()
    short = smollm2_tokenizer.encode(line)
    assert ids[: len(short)] == short and len(ids) == count * len(short)
    assert max(gaps) < elapsed / 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\ud83d", "\ufffd"),
        ("a\udc00b", "a\ufffdb"),
        ("\ud83d\ude42", "🙂"),
        ("x\ude42\ud83d", "x\ufffd\ufffd"),
    ],
)
def test_surrogates_are_joined_or_replaced(smollm2_tokenizer: Tokenizer, text: str, expected: str) -> None:
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text)) == expected


@pytest.mark.parametrize("unit", ["a", " ", "🙂", "1", "\n"])
def test_a_megabyte_of_one_character_is_not_quadratic(smollm2_tokenizer: Tokenizer, unit: str) -> None:
    text = unit * (1_000_000 // len(unit.encode()))
    start = time.process_time()
    ids = smollm2_tokenizer.encode(text)
    assert time.process_time() - start < 20  # takes about 0.3 s, digits 1 s; quadratic time would be minutes
    assert smollm2_tokenizer.decode(ids) == text


def test_a_bos_is_put_before_a_text_once(tiny_vocabulary: GgufVocabulary) -> None:
    tokenizer = Tokenizer.load(dataclasses.replace(tiny_vocabulary, add_bos=True))
    assert tokenizer.add_bos
    once = tokenizer.encode("hello")
    assert once[0] == tokenizer.bos_id == 1
    assert tokenizer.encode("<|im_start|>hello") == once
    assert tokenizer.encode("hello", add_special=False) == once[1:]
    assert tokenizer.encode("") == [1]


def test_a_bos_written_as_mere_text_does_not_replace_the_real_one(tiny_vocabulary: GgufVocabulary) -> None:
    tokenizer = Tokenizer.load(dataclasses.replace(tiny_vocabulary, add_bos=True))
    ids = tokenizer.encode("<|im_start|>hello", parse_special=False)
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert tokenizer.decode(ids) == "<|im_start|>hello"


def test_an_eos_is_put_after_a_text_where_the_model_asks_for_it(tiny_vocabulary: GgufVocabulary) -> None:
    tokenizer = Tokenizer.load(dataclasses.replace(tiny_vocabulary, add_eos=True))
    assert tokenizer.encode("hello")[-1] == 2


def test_padding_ids_stand_for_nothing(tiny_vocabulary: GgufVocabulary) -> None:
    size = len(tiny_vocabulary.tokens) + 7
    tokenizer = Tokenizer.load(tiny_vocabulary, size)
    assert tokenizer.vocab_size == len(tokenizer.token_bytes) == size
    assert tokenizer.decode([*tokenizer.encode("hi"), size - 1]) == "hi"
    assert tokenizer.token_text(size - 1) == ""


def test_an_id_outside_the_vocabulary_is_refused_with_the_range(tiny_tokenizer: Tokenizer) -> None:
    for index in (-1, tiny_tokenizer.vocab_size):
        with pytest.raises(RequestError, match=rf"{index} is no token id; the vocabulary is 0 to 303"):
            tiny_tokenizer.decode([index])


def test_an_embedding_smaller_than_the_vocabulary_is_refused(tiny_vocabulary: GgufVocabulary) -> None:
    with pytest.raises(ModelError, match="304 tokens, the model's embedding only 300 rows"):
        Tokenizer.load(tiny_vocabulary, 300)


def test_a_token_is_named_by_its_text_or_its_bytes(tiny_tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    assert tiny_tokenizer.token_text(byte_ids[ord("a")]) == "a"
    assert tiny_tokenizer.token_text(byte_ids[0xF0]) == "bytes:\\xf0"
    assert tiny_tokenizer.token_text(2) == "<|im_end|>"
    names = [tiny_tokenizer.token_text(index) for index in range(tiny_tokenizer.vocab_size)]
    assert len(set(names)) == len(names)


def test_decoding_replaces_what_is_no_utf8(tiny_tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    assert tiny_tokenizer.decode([byte_ids[0xFF], byte_ids[ord("a")], byte_ids[0xE2]]) == "\ufffda\ufffd"
