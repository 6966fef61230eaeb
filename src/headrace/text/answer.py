"""The text of one answer as its tokens arrive: where it ends, and which token each character belongs to.

Owns the composition of detokenizer and stop strings, and the rule that the texts of the tokens join to the text of the
answer. Refuses to know why an answer ended otherwise (end tokens and lengths are the scheduler's) and how it is sent.

What is made for every token is a msgspec.Struct: a frozen dataclass takes seven times as long to make, and the core
that makes it is one that computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from headrace.text.detokenizer import Detokenizer
from headrace.text.stops import StopMatcher, StopStrings
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a request wants its answer written."""

    stops: StopStrings = StopStrings()
    stop_ids: frozenset[int] = frozenset()  # tokens at which the scheduler ends the answer
    include_stop: bool = False  # whether the stop string or token that ended the answer is part of its text
    skip_special: bool = True
    min_tokens: int = 0  # a stop string may begin only in the text that comes after this many tokens


class TokenText(msgspec.Struct, frozen=True, gc=False):
    """A token of the answer and the characters that it completed."""

    token: int
    text: str  # empty for a token that only began a character, and for a hidden one
    offset: int  # in characters, of the whole answer


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """A piece of the answer. `text` is exactly what the texts of `tokens` join to."""

    text: str
    tokens: tuple[TokenText, ...]
    stop: str | None = None  # the stop string that ended the answer with this piece

    def __bool__(self) -> bool:
        return bool(self.tokens) or self.stop is not None


class AnswerText:
    """Turns the tokens of one answer into text.

    Text leaves in whole tokens, so that logprobs can travel with the text that they are about: a token is held back
    while it ends inside a character, while its text may begin a stop string, and while there is no text to send with
    it. The pieces join to the same text however the tokens were grouped.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions, *, offset: int = 0) -> None:
        """`offset` is where the answer begins in what the client sees: after the prompt, if that is echoed."""
        hidden = frozenset() if options.include_stop else options.stop_ids
        self._detokenizer = Detokenizer(tokenizer, skip_special=options.skip_special, hidden_ids=hidden)
        self._matcher = StopMatcher(options.stops, is_included=options.include_stop)
        self._min_tokens = options.min_tokens
        self._held: list[TokenText] = []
        self._end = offset  # of the text so far
        self._safe = offset  # where the text begins that may still become a stop string
        self.num_tokens = 0  # of the answer: up to the one that completed a stop string
        self.stop: str | None = None  # the stop string that ended the answer

    def push(self, tokens: Iterable[int]) -> TextDelta:
        """The text that may leave after `tokens`. Those after the token that completed a stop string are dropped."""
        for token in tokens:
            if self.stop is not None:
                break
            self._append(token, self._detokenizer.push(token))
        return self._release()

    def finish(self) -> TextDelta:
        """The rest of the text, after the last token. Nothing if a stop string ended the answer before."""
        if self.stop is None and (tail := self._detokenizer.finish()):
            last = self._held[-1]  # it ended inside a character, so it was held back
            self._held[-1] = TokenText(last.token, last.text + tail, last.offset)
            self._match(tail)
        return self._give(len(self._held))

    def _append(self, token: int, text: str) -> None:
        self.num_tokens += 1
        self._held.append(TokenText(token, text, self._end))
        self._end += len(text)
        if self.num_tokens <= self._min_tokens:
            self._safe = self._end
        else:
            self._match(text)

    def _match(self, text: str) -> None:
        found = self._matcher.push(text)
        self._safe += len(found.text)
        self.stop = found.stop

    def _release(self) -> TextDelta:
        if self.stop is not None:
            return self._give(len(self._held))
        count = len(self._held) - self._detokenizer.is_inside_character
        if count == 1 == len(self._held) and self._safe == self._end and self._held[0].text:  # the usual case, quickly
            (token,), self._held = self._held, []
            return TextDelta(token.text, (token,))
        while count and self._held[count - 1].offset + len(self._held[count - 1].text) > self._safe:
            count -= 1
        has_text = any(token.text for token in self._held[:count])
        return self._give(count if has_text else 0)

    def _give(self, count: int) -> TextDelta:
        given, self._held = self._held[:count], self._held[count:]
        if self.stop is not None:  # cut away the stop string and what came after it
            given = [
                TokenText(token.token, token.text[: max(self._safe - token.offset, 0)], min(token.offset, self._safe))
                for token in given
            ]
        return TextDelta("".join(token.text for token in given), tuple(given), self.stop if given else None)
