"""A GGUF file as a model: architecture, vocabulary, end tokens, chat template, licence.

Owns the meaning of the keys that all architectures share. Refuses to know the file format (gguf.py) and the keys of
one architecture (llama_files.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from headrace.model.architecture import Architecture
from headrace.model.fields import Fields
from headrace.model.files import GenerationDefaults, GgufVocabulary, ModelFiles
from headrace.model.gguf import GgufFile, read_gguf
from headrace.types import ModelError

# Texts of tokens that end an answer, for files that name only one of their end tokens by id. Source: llama.cpp's
# llama-vocab.cpp, special_eog_ids.
END_TOKENS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "<｜end▁of▁sentence｜>",
    }
)
_NORMAL = 1  # the type of a token where the file has no types


def open_gguf(path: Path, architectures: Mapping[str, Architecture]) -> ModelFiles:
    """Read and check the headers of a GGUF file; ModelError if headrace cannot run it."""
    file = read_gguf(path)
    source = str(path)
    fields = Fields(source, file.metadata)
    name = fields.text("general.architecture")
    if (architecture := architectures.get(name)) is None:
        raise fields.refusal("general.architecture", f"one that is supported: {', '.join(architectures)}")
    fields.require("general.type", "model", "adapters and other parts are not models")
    fields.require("split.count", 1, "join the parts of a split model first")
    spec = architecture.spec_from_gguf(file)
    vocabulary = _vocabulary(source, file, spec.vocab_size)
    weights = architecture.weights_from_gguf(source, spec, file.tensors)
    return ModelFiles(
        name=path.stem,
        path=path,
        spec=spec,
        weights=weights.load,
        vocabulary=vocabulary,
        end_ids=_end_ids(source, file, vocabulary),
        generation_defaults=GenerationDefaults(),
        chat_template=fields.text("tokenizer.chat_template", None),
        license=fields.text("general.license", None),
        weight_bytes=weights.num_bytes,
    )


def _vocabulary(source: str, file: GgufFile, vocab_size: int) -> GgufVocabulary:
    keys = Fields(source, file.metadata, prefix="tokenizer.ggml.")
    tokens = _strings(keys, "tokens")
    if len(tokens) != vocab_size:
        raise ModelError(
            f"{source}: tokenizer.ggml.tokens has {len(tokens)} entries; the model's vocabulary {vocab_size}"
        )
    return GgufVocabulary(
        model=keys.text("model"),
        pre=keys.text("pre", "default"),
        tokens=tokens,
        types=_token_types(keys, len(tokens)),
        merges=_strings(keys, "merges", ()),
        bos_id=_token_id(keys, "bos_token_id", len(tokens)),
        eos_id=_token_id(keys, "eos_token_id", len(tokens)),
        unk_id=_token_id(keys, "unknown_token_id", len(tokens)),
        pad_id=_token_id(keys, "padding_token_id", len(tokens)),
        add_bos=keys.boolean("add_bos_token", None),
        add_eos=keys.boolean("add_eos_token", None),
    )


def _strings(keys: Fields, name: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
    value = keys.value(name) if default is None else keys.value(name, default)
    if not isinstance(value, tuple):
        raise keys.refusal(name, "an array of strings")
    return value


def _token_types(keys: Fields, num_tokens: int) -> tuple[int, ...]:
    value = keys.value("token_type", None)
    if value is None:
        return (_NORMAL,) * num_tokens
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or len(value) != num_tokens:
        raise keys.refusal("token_type", f"an array of {num_tokens} integers, one per token")
    return tuple(value.tolist())


def _token_id(keys: Fields, name: str, vocab_size: int) -> int | None:
    return keys.integer(name, 0, vocab_size - 1, None)


def _end_ids(source: str, file: GgufFile, vocabulary: GgufVocabulary) -> frozenset[int]:
    keys = Fields(source, file.metadata, prefix="tokenizer.ggml.")
    named = (_token_id(keys, name, len(vocabulary.tokens)) for name in ("eos_token_id", "eot_token_id", "eom_token_id"))
    by_text = (token for token, text in enumerate(vocabulary.tokens) if text in END_TOKENS)
    return frozenset(token for token in named if token is not None) | frozenset(by_text)
