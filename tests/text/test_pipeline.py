"""Steps of a tokenizer.json that are refused, since they could make a text longer than memory holds."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from test_vocabulary import byte_level, saved, tokenizer_file
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from headrace.text.pipeline import MAX_STEPS, check_pipeline
from headrace.text.vocabulary import load_vocabulary
from headrace.types import ModelError

PATH = Path("tokenizer.json")
LONGER = normalizers.Replace("e", "e" * 10)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize(
    ("normalizer", "message"),
    [
        (normalizers.Sequence([LONGER] * 8), "the normalizer's Replace makes 10 characters of 1; it may not"),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Sequence([LONGER])]), "makes 10 characters of 1"),
        (normalizers.Replace("", "e"), "makes 1 characters of 0"),
        (normalizers.Replace(Regex("e*"), "e"), "Replace has a regular expression; only strings are supported"),
        (normalizers.Prepend("ee"), "Prepend puts 2 characters before a text; at most one"),
        (normalizers.Sequence([normalizers.Prepend("e")] * 2), "has 2 steps Prepend; one is allowed"),
        (normalizers.Sequence([normalizers.NFKC()] * 2), "has 2 steps NFKC; one is allowed"),
        (normalizers.BertNormalizer(), "has a BertNormalizer; supported are NFC, NFKC, Prepend, Replace"),
        (
            normalizers.Sequence([normalizers.Replace("a", "b")] * (MAX_STEPS + 1)),
            f"the normalizer has {MAX_STEPS + 1} steps; at most {MAX_STEPS}",
        ),
    ],
)
def test_a_normalizer_that_could_make_a_text_much_longer_is_refused_by_name(
    tmp_path: Path, normalizer: Any, message: str
) -> None:
    built = byte_level()
    built.normalizer = normalizer
    with pytest.raises(ModelError, match=f"tokenizer.json: .*{message}"):
        load_vocabulary(tokenizer_file(saved(built, tmp_path)))


@pytest.mark.parametrize(
    ("pre_tokenizer", "message"),
    [
        (pre_tokenizers.Sequence([BYTES] * 12), "the pre_tokenizer has 12 steps ByteLevel; one is allowed"),
        (pre_tokenizers.Sequence([pre_tokenizers.Metaspace()] * 2), "has 2 steps Metaspace; one is allowed"),
        (pre_tokenizers.BertPreTokenizer(), "has a BertPreTokenizer; supported are ByteLevel, Digits"),
    ],
)
def test_a_pre_tokenizer_that_could_make_a_text_much_longer_is_refused_by_name(
    tmp_path: Path, pre_tokenizer: Any, message: str
) -> None:
    built = byte_level()
    built.pre_tokenizer = pre_tokenizer
    with pytest.raises(ModelError, match=f"tokenizer.json: .*{message}"):
        load_vocabulary(tokenizer_file(saved(built, tmp_path)))


@pytest.mark.parametrize("charsmap", [b"", b"\xff" * 9, b"\x04\x00\x00\x00\xff\xff\xff\xffabc"])
def test_a_table_of_characters_is_refused_whatever_it_holds(tmp_path: Path, charsmap: bytes) -> None:
    path = saved(byte_level(), tmp_path)
    document = json.loads(path.read_text())
    document["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
    path.write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_vocabulary(tokenizer_file(path))


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [
        (None, None),
        (normalizers.NFC(), BYTES),  # Qwen 2
        (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),  # Llama 2
        (None, pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"), BYTES])),  # Llama 3
        (normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")),  # Gemma
        (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES])),  # SmolLM 2
    ],
)
def test_the_steps_of_known_vocabularies_are_allowed(normalizer: Any, pre_tokenizer: Any) -> None:
    built: Tokenizer = byte_level()
    built.normalizer = normalizer
    built.pre_tokenizer = pre_tokenizer
    check_pipeline(PATH, built)
