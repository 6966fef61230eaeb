"""Token ids to text while they arrive: only whole characters leave.

Owns the bytes of a character that is not complete yet. Refuses to know where an answer ends (answer.py).
"""

from __future__ import annotations

import codecs

from headrace.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one answer. The pieces join to the decoding of all its tokens' bytes.

    Bytes that are no UTF-8 become U+FFFD by Python's rule (Unicode 16, section 3.9, "substitution of maximal
    subparts"), a character that is merely split never does, unless the answer ends inside it.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, hidden_ids: frozenset[int] = frozenset()
    ) -> None:
        """Special tokens (if `skip_special`) and `hidden_ids` give no text."""
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids | hidden_ids if skip_special else hidden_ids
        self._begun = b""  # a character whose other bytes are still to come

    def push(self, token: int) -> str:
        """The characters that `token` completes."""
        if token in self._skipped:
            return ""
        content = self._begun + self._token_bytes[token]
        text, num_used = codecs.utf_8_decode(content, "replace", False)
        self._begun = content[num_used:]
        return text

    def finish(self) -> str:
        """U+FFFD if the answer ended inside a character, else nothing."""
        begun, self._begun = self._begun, b""
        return begun.decode("utf-8", "replace")

    @property
    def is_inside_character(self) -> bool:
        """Whether bytes wait for the rest of their character."""
        return bool(self._begun)
