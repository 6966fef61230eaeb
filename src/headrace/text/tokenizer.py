"""Text to token ids and back, for every door: server, offline API, terminal.

Owns the rules around special tokens (who may write them, no second BOS) and the bytes of each token. Refuses to know
chat templates (chat.py) and pieces of an answer that arrive over time (detokenizer.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers

from headrace.model.files import GgufVocabulary, TokenizerFile
from headrace.text.controls import ControlStrings, without_surrogates
from headrace.text.vocabulary import Vocabulary, load_vocabulary
from headrace.types import ModelError, RequestError

LONG_CHARS = 1024  # shorter texts take less than what the library's batch call costs beside its work


class Tokenizer:
    """The tokenizer of one model. Immutable once built; may be shared by threads."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int | None = None) -> None:
        """`vocab_size` is that of the model's embedding: ids past the known tokens are padding and have no bytes."""
        known = len(vocabulary.token_bytes)
        if vocab_size is not None and vocab_size < known:
            raise ModelError(f"the tokenizer has {known} tokens, the model's embedding only {vocab_size} rows")
        self._vocabulary = vocabulary
        self.vocab_size = known if vocab_size is None else vocab_size
        self.token_bytes = vocabulary.token_bytes + (b"",) * (self.vocab_size - known)
        self.special_ids = vocabulary.special_ids
        self.bos_id = vocabulary.bos_id
        self.add_bos = bool(vocabulary.prefix_ids)
        self.named_tokens = dict(vocabulary.named_tokens)
        self._id_of_control = {self.token_bytes[index].decode("utf-8", "replace"): index for index in self.special_ids}
        self.controls = ControlStrings(self._id_of_control)

    @classmethod
    def load(cls, source: GgufVocabulary | TokenizerFile, vocab_size: int | None = None) -> Tokenizer:
        """The tokenizer of a model's files; ModelError if it is of a kind that is not supported."""
        return cls(load_vocabulary(source), vocab_size)

    def control_id(self, text: str) -> int:
        """The id of the special token whose text is `text`, one that `controls` finds."""
        return self._id_of_control[text]

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special` puts the model's BOS in front (where the model wants one), unless the text already begins with it.
        `parse_special` turns special tokens written in the text into their ids; otherwise they are text. Lone
        surrogates, which no UTF-8 text can hold, become U+FFFD.
        """
        backend = self._vocabulary.parsing if parse_special else self._vocabulary.plain
        ids = _ids(backend, without_surrogates(text))
        if not add_special:
            return ids
        prefix, suffix = self._vocabulary.prefix_ids, self._vocabulary.suffix_ids
        if tuple(ids[: len(prefix)]) != prefix:
            ids = [*prefix, *ids]
        return [*ids, *suffix]

    def encode_after_control(self, text: str) -> list[int]:
        """Token ids of a text that stands after a control token, special tokens in it being text.

        Differs from `encode` for vocabularies of SentencePiece's kind, which put a space before the first word of a
        text: here it is not the first.
        """
        anchor = self._vocabulary.anchor
        return _ids(self._vocabulary.plain, anchor + without_surrogates(text))[1:]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD. RequestError for an id outside the vocabulary."""
        kept = [self.check_id(index) for index in ids]
        if skip_special:
            kept = [index for index in kept if index not in self.special_ids]
        text = b"".join(map(self.token_bytes.__getitem__, kept)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._vocabulary.has_space_prefix else text

    def check_id(self, index: int) -> int:
        if not 0 <= index < self.vocab_size:
            raise RequestError(f"{index} is no token id; the vocabulary is 0 to {self.vocab_size - 1}", "tokens")
        return index

    def token_text(self, index: int) -> str:
        """The token's name in lists of logprobs: its text, or `bytes:\\xf0\\x9f` where it is a part of a character.

        (OpenAI's notation.) Names of different tokens differ, unless the vocabulary holds the same bytes twice.
        """
        content = self.token_bytes[self.check_id(index)]
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """The ids of `text`. The library's batch call lets other threads run, a single one holds the interpreter's lock."""
    if len(text) <= LONG_CHARS:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    else:
        ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids
