"""A Hugging Face directory as a model: config.json and what lies beside it.

Owns the files' names and the fields that all architectures share. Refuses to know the keys of one architecture
(llama_files.py), how tensors are stored (safetensors.py) and how text becomes tokens (text/).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.model.architecture import Architecture
from headrace.model.fields import MAX_JSON_BYTES, Fields, read_json, shown
from headrace.model.files import GenerationDefaults, ModelFiles, TokenizerFile
from headrace.model.hf_fields import HARMLESS_CONFIG, HARMLESS_GENERATION, NEUTRAL_CONFIG, NEUTRAL_WISHES
from headrace.model.safetensors import inside, read_directory
from headrace.types import ModelError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

log = logging.getLogger(__name__)

MAX_END_IDS = 64
MAX_TEMPLATES = 64


def open_directory(path: Path, architectures: Mapping[str, Architecture]) -> ModelFiles:
    """Read and check config.json and the headers of the weights; ModelError if headrace cannot run the model."""
    config = _fields(path, CONFIG)
    name = config.text("model_type")
    if (architecture := architectures.get(name)) is None:
        raise config.refusal("model_type", f"one that is supported: {', '.join(architectures)}")
    if "quantization_config" in config:
        raise ModelError(f"{config.source}: quantization_config is not supported; take the unquantized model or a GGUF")
    spec = architecture.spec_from_config(config)
    generation = _fields(path, GENERATION_CONFIG, is_optional=True)
    tokenizer_config = _fields(path, TOKENIZER_CONFIG, is_optional=True)
    end_ids = _end_ids(config, generation, tokenizer_config, spec.vocab_size)
    defaults = _generation_defaults(generation)
    generation.ignore(HARMLESS_GENERATION)
    _tell_what_is_not_honoured(generation, generation.unread())
    _tell_what_is_not_honoured(config, [name for name in config.unread() if name in NEUTRAL_WISHES])
    config.ignore((*HARMLESS_CONFIG, *NEUTRAL_WISHES))
    for field, neutral in NEUTRAL_CONFIG.items():
        config.require(field, neutral, "anything else is not supported")
    config.refuse_unread(f"architecture {name!r}")
    weights = architecture.weights_from_config(str(path), spec, read_directory(path))
    return ModelFiles(
        name=path.resolve().name,
        path=path,
        spec=spec,
        weights=weights.load,
        vocabulary=_tokenizer(path, tokenizer_config),
        end_ids=end_ids,
        generation_defaults=defaults,
        chat_template=_chat_template(path, tokenizer_config),
        license=_license(path),
        weight_bytes=weights.num_bytes,
    )


def _fields(directory: Path, name: str, *, is_optional: bool = False) -> Fields:
    path = inside(directory, name)
    if is_optional and not path.exists():
        return Fields(str(path), {})
    return Fields(str(path), read_json(path))


# Tokenizer ------------------------------------------------------------------------------------------------------


def _tokenizer(directory: Path, config: Fields) -> TokenizerFile:
    path = inside(directory, TOKENIZER)
    if not path.is_file():
        raise ModelError(f"{directory}: {TOKENIZER} is missing; other kinds of tokenizer files are not supported")
    return TokenizerFile(
        path=path,
        bos_token=_token_text(config, "bos_token"),
        eos_token=_token_text(config, "eos_token"),
        unk_token=_token_text(config, "unk_token"),
        pad_token=_token_text(config, "pad_token"),
        add_bos=config.boolean("add_bos_token", None),
        add_eos=config.boolean("add_eos_token", None),
    )


def _token_text(config: Fields, name: str) -> str | None:
    """A special token: its text, or an object (an AddedToken) that has the text as its content."""
    if isinstance(config.value(name, None), dict):
        return config.table(name).text("content")
    return config.text(name, None)


def _chat_template(directory: Path, config: Fields) -> str | None:
    """As in transformers: chat_template.jinja, else tokenizer_config.json's, the one named default."""
    path = inside(directory, CHAT_TEMPLATE)
    if path.exists():
        return _read_text(path)
    value = config.value("chat_template", None)
    if not isinstance(value, list):
        return config.text("chat_template", None)
    templates: dict[str, str] = {}
    for entry in value[:MAX_TEMPLATES]:
        if not isinstance(entry, dict):
            raise config.refusal("chat_template", "a string, or a list of objects with name and template")
        named = Fields(f"{config.source}: chat_template", entry)
        templates[named.text("name")] = named.text("template")
    return templates.get("default")


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
        if len(text) > MAX_JSON_BYTES:
            raise ModelError(f"{path}: is longer than {MAX_JSON_BYTES} bytes")
        return text.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None


# What ends an answer, and how tokens are drawn ------------------------------------------------------------------


def _end_ids(config: Fields, generation: Fields, tokenizer_config: Fields, vocab_size: int) -> frozenset[int]:
    """Whatever any of the three files calls an end: models differ in which of them is complete."""
    found = {token for fields in (config, generation) for token in _eos_ids(fields, vocab_size)}
    eos_token = _token_text(tokenizer_config, "eos_token")
    added = tokenizer_config.value("added_tokens_decoder", {})
    if not isinstance(added, dict):
        raise tokenizer_config.refusal("added_tokens_decoder", "an object from token ids to tokens")
    for token, entry in added.items():
        is_end = isinstance(entry, dict) and eos_token is not None and entry.get("content") == eos_token
        if is_end and token.isdecimal() and len(token) < 10 and int(token) < vocab_size:
            found.add(int(token))
    return frozenset(found)


def _eos_ids(fields: Fields, vocab_size: int) -> list[int]:
    value = fields.value("eos_token_id", None)
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if len(ids) > MAX_END_IDS or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        shape = f"a token id, or up to {MAX_END_IDS} in a list, from 0 to {vocab_size - 1}"
        raise ModelError(f"{fields.source}: eos_token_id is {shown(value)}; it must be {shape}")
    return ids


def _generation_defaults(fields: Fields) -> GenerationDefaults:
    is_greedy = fields.boolean("do_sample", None) is False  # said outright; absent says nothing
    temperature = fields.number("temperature", 0.0, 100.0, None)
    return GenerationDefaults(
        temperature=0.0 if is_greedy else temperature,
        top_k=fields.integer("top_k", 0, 2**31 - 1, None),
        top_p=fields.number("top_p", 1e-9, 1.0, None),
        min_p=fields.number("min_p", 0.0, 1.0, None),
        repetition_penalty=fields.number("repetition_penalty", 1e-9, 100.0, None),
    )


def _tell_what_is_not_honoured(fields: Fields, names: Sequence[str]) -> None:
    if asked := [name for name in names if fields.value(name) != NEUTRAL_WISHES.get(name)]:
        log.warning("%s: not honoured: %s", fields.source, ", ".join(shown(name) for name in asked))


def _license(directory: Path) -> str | None:
    """What the front matter of README.md (the model card) says in its line `license: …`."""
    path = inside(directory, "README.md")
    if not path.is_file():
        return None
    lines = _read_text(path).splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:]:
        if line.strip() == "---":
            return None
        if line.startswith("license:"):
            return line.removeprefix("license:").strip() or None
    return None
