"""Tokenizers for the tests of text/: the default model's, and a tiny one that needs no file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.model import open_model
from headrace.model.files import GgufVocabulary, ModelFiles
from headrace.text.tokenizer import Tokenizer
from tiny import MERGES, TOKEN_TYPES, TOKENS

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> ModelFiles:
    return open_model(smollm2_path)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: ModelFiles) -> Tokenizer:
    return Tokenizer.load(smollm2.vocabulary, smollm2.spec.vocab_size)


@pytest.fixture(scope="session")
def tiny_vocabulary() -> GgufVocabulary:
    """A token for each byte, some merges, and three special tokens: <|endoftext|>, <|im_start|>, <|im_end|>."""
    return GgufVocabulary(
        model="gpt2",
        pre="gpt-2",
        tokens=TOKENS,
        types=TOKEN_TYPES,
        merges=MERGES,
        bos_id=1,
        eos_id=2,
        unk_id=None,
        pad_id=None,
        add_bos=None,
        add_eos=None,
    )


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_vocabulary: GgufVocabulary) -> Tokenizer:
    return Tokenizer.load(tiny_vocabulary)


@pytest.fixture(scope="session")
def byte_ids(tiny_tokenizer: Tokenizer) -> dict[int, int]:
    """The token that stands for each single byte."""
    return {content[0]: index for index, content in enumerate(tiny_tokenizer.token_bytes) if len(content) == 1}


@pytest.fixture(scope="session")
def golden_chats() -> dict[str, Any]:
    golden: dict[str, Any] = json.loads((GOLDEN / "chat.json").read_text("utf-8"))
    return golden
