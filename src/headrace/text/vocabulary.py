"""A model's vocabulary as the `tokenizers` library runs it, and the exact bytes that each token stands for.

Owns what a GGUF vocabulary or a tokenizer.json must hold to be understood, and refuses the rest by name. Refuses to
know what text is encoded for, or when.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from headrace.model.files import GgufVocabulary, TokenizerFile
from headrace.text.pipeline import check_pipeline, steps_of
from headrace.types import ModelError

MAX_TOKENIZER_BYTES = 128 * 2**20  # Gemma's tokenizer.json, with 262,144 tokens, has 33 MB
MAX_TOKENS = 4 * 2**20  # the table of bytes is as long as the largest id; no vocabulary known has 300,000 tokens

# llama.cpp's token types that matter here (enum llama_token_type)
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

SPACE_MARK = "▁"  # SentencePiece's stand-in for a space
BYTE_TOKEN_LENGTH = len("<0x00>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a Tokenizer needs to know of a vocabulary, whatever file it came from."""

    parsing: tokenizers.Tokenizer  # special tokens written in a text become their ids
    plain: tokenizers.Tokenizer  # they are text like any other; shares the model with `parsing`
    anchor: str  # a token that only `plain` knows, whose text no one can guess: what precedes a text that goes on
    token_bytes: tuple[bytes, ...]
    special_ids: frozenset[int]
    prefix_ids: tuple[int, ...]  # what encoding with special tokens puts before a text
    suffix_ids: tuple[int, ...]
    bos_id: int | None
    named_tokens: dict[str, str]  # bos_token, eos_token, … as chat templates call them
    has_space_prefix: bool  # whether a space was put before the text, to be taken away when decoding


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How a byte-level BPE vocabulary cuts a text before merging: what a GGUF file only names."""

    pre_tokenizer: pre_tokenizers.PreTokenizer
    ignores_merges: bool = False  # a piece that is itself a token stays whole
    adds_bos: bool = False  # where the file does not say


# Llama 3's pattern, from the tokenizer.json that Meta publishes
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _smollm() -> _Splitting:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return _Splitting(pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]))


def _gpt2() -> _Splitting:
    return _Splitting(pre_tokenizers.ByteLevel(add_prefix_space=False))


def _llama3() -> _Splitting:
    split = pre_tokenizers.Split(tokenizers.Regex(_LLAMA3_PATTERN), behavior="isolated")
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _Splitting(pre_tokenizers.Sequence([split, bytes_alone]), ignores_merges=True, adds_bos=True)


# By `tokenizer.ggml.pre`; each was compared with llama.cpp on tests/golden/tokenizer_corpus.json
_SPLITTINGS: Mapping[str, Callable[[], _Splitting]] = {
    "smollm": _smollm,
    "gpt-2": _gpt2,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
}


def load_vocabulary(source: GgufVocabulary | TokenizerFile) -> Vocabulary:
    """Build the tokenizer that `source` describes; ModelError naming the field if it is not supported."""
    if isinstance(source, GgufVocabulary):
        with _named_errors("tokenizer.ggml"):
            return _from_gguf(source)
    with _named_errors(str(source.path)):
        return _from_file(source)


# GGUF ---------------------------------------------------------------------------------------------------------


def _from_gguf(source: GgufVocabulary) -> Vocabulary:
    if source.model != "gpt2":
        raise ModelError(f'tokenizer.ggml.model is "{source.model}"; only "gpt2" (byte-level BPE) is supported')
    if source.pre not in _SPLITTINGS:
        raise ModelError(f'tokenizer.ggml.pre is "{source.pre}"; supported are {", ".join(sorted(_SPLITTINGS))}')
    if len(source.types) != len(source.tokens):
        raise ModelError(f"tokenizer.ggml has {len(source.tokens)} tokens but {len(source.types)} token types")
    splitting = _SPLITTINGS[source.pre]()
    vocab = {token: index for index, token in enumerate(source.tokens)}
    with _named_errors("tokenizer.ggml.merges"):
        model = models.BPE(vocab, _merge_pairs(source.merges), ignore_merges=splitting.ignores_merges)
    added = {
        index: tokenizers.AddedToken(source.tokens[index], special=kind != USER_DEFINED, normalized=False)
        for index, kind in enumerate(source.types)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and vocab[source.tokens[index]] == index
    }
    parsing = _assemble(model, None, splitting.pre_tokenizer, added)
    anchor = _new_anchor()
    bos_id = _id_in_range("bos_token_id", source.bos_id, source)
    eos_id = _id_in_range("eos_token_id", source.eos_id, source)
    adds_bos = splitting.adds_bos if source.add_bos is None else source.add_bos
    named = {"bos_token": bos_id, "eos_token": eos_id, "unk_token": source.unk_id, "pad_token": source.pad_id}
    return Vocabulary(
        parsing=parsing,
        plain=_without_special(parsing, added, anchor),
        anchor=anchor,
        token_bytes=tuple(
            token.encode("utf-8", "replace") if index in added else _byte_level(token)
            for index, token in enumerate(source.tokens)
        ),
        special_ids=frozenset(index for index, token in added.items() if token.special),
        prefix_ids=_edge_ids("bos", bos_id, is_added=adds_bos),
        suffix_ids=_edge_ids("eos", eos_id, is_added=bool(source.add_eos)),
        bos_id=bos_id,
        named_tokens={
            name: source.tokens[index]
            for name, index in named.items()
            if index is not None and 0 <= index < len(source.tokens)
        },
        has_space_prefix=False,
    )


def _merge_pairs(merges: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = []
    for index, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise ModelError(f"tokenizer.ggml.merges[{index}] is {merge!r}; it must be two tokens with a space between")
        pairs.append((left, right))
    return pairs


def _id_in_range(name: str, index: int | None, source: GgufVocabulary) -> int | None:
    if index is not None and not 0 <= index < len(source.tokens):
        raise ModelError(f"tokenizer.ggml.{name} is {index}; the vocabulary has {len(source.tokens)} tokens")
    return index


def _edge_ids(name: str, index: int | None, *, is_added: bool) -> tuple[int, ...]:
    if not is_added:
        return ()
    if index is None:
        raise ModelError(f"the model asks for its {name} token around every text but names none")
    return (index,)


# tokenizer.json -----------------------------------------------------------------------------------------------


def _from_file(source: TokenizerFile) -> Vocabulary:
    parsing = _read(source.path)
    check_pipeline(source.path, parsing)
    if not isinstance(parsing.model, models.BPE):
        raise ModelError(f"{source.path}: the model is {type(parsing.model).__name__}; only BPE is supported")
    bytes_of, has_space_prefix = _token_alphabet(source.path, parsing)
    anchor = _new_anchor()
    added = dict(sorted(parsing.get_added_tokens_decoder().items()))
    vocab = parsing.get_vocab(with_added_tokens=True)
    if (largest := max(vocab.values(), default=-1)) >= MAX_TOKENS:
        raise ModelError(f"{source.path}: a token has the id {largest:,}; ids must be less than {MAX_TOKENS:,}")
    token_bytes = [b""] * (largest + 1)
    for token, index in vocab.items():
        token_bytes[index] = token.encode("utf-8", "replace") if index in added else bytes_of(token)
    named = {
        "bos_token": source.bos_token,
        "eos_token": source.eos_token,
        "unk_token": source.unk_token,
        "pad_token": source.pad_token,
    }
    for name, text in named.items():
        if text is not None and text not in vocab:
            raise ModelError(f"{source.path}: {name} is {text!r}, which is not in the vocabulary")
    bos_id = vocab[source.bos_token] if source.bos_token is not None else None
    eos_id = vocab[source.eos_token] if source.eos_token is not None else None
    prefix_ids, suffix_ids = _edges_of_post_processor(parsing)
    if source.add_bos is not None:
        prefix_ids = _edge_ids("bos", bos_id, is_added=source.add_bos)
    if source.add_eos is not None:
        suffix_ids = _edge_ids("eos", eos_id, is_added=source.add_eos)
    for index in (*prefix_ids, *suffix_ids):
        if index > largest:
            raise ModelError(f"{source.path}: the post_processor adds the id {index:,}; the largest is {largest:,}")
    return Vocabulary(
        parsing=parsing,
        plain=_without_special(parsing, added, anchor),
        anchor=anchor,
        token_bytes=tuple(token_bytes),
        special_ids=frozenset(index for index, token in added.items() if token.special),
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
        bos_id=bos_id,
        named_tokens={name: text for name, text in named.items() if text is not None},
        has_space_prefix=has_space_prefix,
    )


def _read(path: Path) -> tokenizers.Tokenizer:
    try:
        if (size := path.stat().st_size) > MAX_TOKENIZER_BYTES:
            raise ModelError(f"{path} has {size:,} bytes; at most {MAX_TOKENIZER_BYTES:,} are allowed")
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    parsing = tokenizers.Tokenizer.from_buffer(content)
    # A tokenizer.json may ask for both; they would cut a prompt silently
    parsing.no_truncation()
    parsing.no_padding()
    return parsing


def _token_alphabet(path: Path, parsing: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """How a token's text stands for bytes, and whether the first space of a text is not its own."""
    kinds = [step["type"] for step in steps_of(parsing.decoder)]
    if kinds == ["ByteLevel"]:
        return _byte_level, False
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return _sentence_piece, "Strip" in kinds
    raise ModelError(
        f"{path}: the decoder is {kinds or 'missing'}; supported are ByteLevel, and ByteFallback with spaces as ▁"
    )


def _edges_of_post_processor(parsing: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor puts before and after a text."""
    bare = parsing.encode("a", add_special_tokens=False).ids
    full = parsing.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    return (), ()


# Both ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _named_errors(source: str) -> Iterator[None]:
    """The library raises bare exceptions that do not say which file they are about.

    Where its Rust panics the exception derives from BaseException, lest anybody catch it by accident; here it is
    caught on purpose, since what panics is the file's fault.
    """
    try:
        yield
    except (ModelError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ModelError(f"{source}: {error}") from error


def _assemble(
    model: models.Model,
    normalizer: Any,
    pre_tokenizer: Any,
    added: dict[int, tokenizers.AddedToken],
) -> tokenizers.Tokenizer:
    assembled = tokenizers.Tokenizer(model)
    assembled.normalizer = normalizer
    assembled.pre_tokenizer = pre_tokenizer
    assembled.add_tokens(list(added.values()))
    if assembled.get_added_tokens_decoder().keys() != added.keys():
        raise ModelError("the added tokens do not have the ids that the vocabulary gives them")
    return assembled


def _without_special(
    parsing: tokenizers.Tokenizer, added: dict[int, tokenizers.AddedToken], anchor: str
) -> tokenizers.Tokenizer:
    """The same tokenizer, to which special tokens are text. Tokens that are added but not special stay tokens."""
    plain = _assemble(parsing.model, parsing.normalizer, parsing.pre_tokenizer, added)
    plain.encode_special_tokens = True
    plain.add_tokens([tokenizers.AddedToken(anchor, normalized=False)])
    return plain


def _new_anchor() -> str:
    return f"<anchor {secrets.token_hex(16)}>"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's bytes_to_unicode, read backwards: printable Latin-1 stands for itself, the other bytes for U+0100 on.

    Source: Radford et al. 2019, the encoder published with GPT-2.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF: Mapping[str, int] = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:  # padding and unused entries need not be in the alphabet; nothing encodes to them
        return token.encode("utf-8", "replace")


def _sentence_piece(token: str) -> bytes:
    if len(token) == BYTE_TOKEN_LENGTH and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes((int(token[3:5], 16),))
        except ValueError:
            pass  # "<0xZZ>" is a text like any other
    return token.replace(SPACE_MARK, " ").encode("utf-8", "replace")
