"""Token ids to text while they arrive: only whole characters leave.

Owns the bytes of a character that is not complete yet. Refuses to know where an answer ends (answer.py).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from headrace.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one answer. However its tokens are grouped, the pieces join to the decoding of all their bytes.

    Bytes that are no UTF-8 become U+FFFD by Python's rule (Unicode 16, section 3.9, "substitution of maximal
    subparts"), a character that is merely split never does, unless the answer ends inside it.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, hidden_ids: frozenset[int] = frozenset()
    ) -> None:
        """Special tokens (if `skip_special`) and `hidden_ids` give no text."""
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids | hidden_ids if skip_special else hidden_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Iterable[int]) -> str:
        """The characters that `tokens` complete."""
        kept = (self._token_bytes[index] for index in tokens if index not in self._skipped)
        return self._decoder.decode(b"".join(kept))

    def finish(self) -> str:
        """U+FFFD if the answer ended inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)

    @property
    def is_inside_character(self) -> bool:
        """Whether bytes wait for the rest of their character."""
        return bool(self._decoder.getstate()[0])
