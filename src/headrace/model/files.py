"""ModelFiles: what opening a model gives to the layers above, as plain values.

Owns the shape of that answer for every kind of source. Refuses to know how a file is parsed (gguf.py, hf.py), how text
becomes tokens (text/) and how weights become fast (backend/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.model.llama import LlamaWeights
from headrace.model.spec import ModelSpec
from headrace.tensor import Tensor


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A tokenizer as a GGUF file describes it: `tokenizer.ggml.*`. The index into `tokens` is the token id."""

    model: str  # "gpt2": byte-level BPE; "llama": SentencePiece; others as the file names them
    pre: str  # the pre-tokenizer's name, "default" where the file has none
    tokens: tuple[str, ...]
    types: tuple[int, ...]  # per token, llama.cpp's: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte
    merges: tuple[str, ...]  # "left right", best first; empty for models without
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    pad_id: int | None
    add_bos: bool | None  # None: the file does not say, the tokenizer's kind decides
    add_eos: bool | None


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A tokenizer as a Hugging Face directory has it: tokenizer.json, and tokenizer_config.json's values."""

    path: Path  # of tokenizer.json
    bos_token: str | None  # the tokens' texts, also for the chat template
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    add_bos: bool | None  # None: not said, tokenizer.json's post-processor decides
    add_eos: bool | None


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's authors say about sampling (generation_config.json). None: nothing said."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk: headers read and checked, weights still on their map."""

    name: str  # of the file (without its ending) or of the directory
    path: Path
    spec: ModelSpec
    weights: Callable[[], LlamaWeights[Tensor]]  # views of the mapped file
    vocabulary: GgufVocabulary | TokenizerFile
    end_ids: frozenset[int]  # every token that ends an answer
    generation_defaults: GenerationDefaults
    chat_template: str | None  # Jinja source
    license: str | None
    weight_bytes: int  # as stored, a tied embedding counted once

    @property
    def parameters(self) -> int:
        return self.spec.num_parameters
