"""One answer as it grows: the engine's events in, deltas of text out, and at last a receipt of what it took.

Owns when an answer ends and what of its tokens is counted. Without I/O, so that every rule can be tested with events
made by hand. Refuses to know JSON and other answers; which token has which text is text/answer.py's.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.engine.answers import Ending, ending_of
from headrace.server.openai.errors import CUT_OFF, ENGINE_FAILED, SHUTTING_DOWN
from headrace.server.timing import Timing
from headrace.text.answer import AnswerText, TextDelta, TextOptions, TokenText
from headrace.text.tokenizer import Tokenizer
from headrace.types import Event, Finished, FinishReason, Preempted, Request, RequestError, TokenLogprobs, Tokens, Usage


class ScoredToken(msgspec.Struct, frozen=True, gc=False):
    """One token of the text, for logprobs. The pieces of an answer join to its text."""

    token: TokenText
    logprobs: TokenLogprobs | None  # None: the prompt's first token, which nothing predicts


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What was added to one choice."""

    choice: int
    text: str
    pieces: tuple[ScoredToken, ...] | None = None  # None: logprobs were not asked for
    ending: Ending | None = None  # of the choice's last delta


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one choice took. Comes last, once the engine has closed its books on it."""

    choice: int
    is_first_of_prompt: bool  # the choices of a prompt share it
    prompt_tokens: int
    completion_tokens: int  # up to the token that completed a stop string
    cached_tokens: int
    timing: Timing


Item = Delta | Receipt  # a receipt closes its choice


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, to be shown before the answer."""

    tokens: tuple[TokenText, ...]

    @classmethod
    def of(cls, tokens: array[int], tokenizer: Tokenizer, *, is_bos_hidden: bool) -> Echo:
        """`is_bos_hidden`: the prompt's first token was not written by the client."""
        shown = AnswerText(tokenizer, TextOptions(skip_special=False))
        pieces = [*shown.push(tokens[is_bos_hidden:]).tokens, *shown.finish().tokens]
        hidden = [TokenText(tokens[0], "", 0)] if is_bos_hidden else []
        return cls((*hidden, *pieces))

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


@dataclass(slots=True)
class Answer:
    """The state of one choice. take() is called with every event of its request, in order."""

    choice: int
    request: Request
    text: AnswerText
    echo: Echo | None = None
    num_preemptions: int = 0
    has_failed: bool = False  # the engine's fault
    first_us: int | None = None
    last_us: int | None = None
    gaps_us: list[int] = field(default_factory=list)  # between deliveries, whatever number of tokens each had
    ending: Ending | None = None
    receipt: Receipt | None = None
    _last_token: int | None = None
    _logprobs: deque[TokenLogprobs] = field(default_factory=deque)  # of tokens whose text is not out yet
    _prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(self, event: Event, now_us: int) -> list[Item]:
        """What an event adds, of a step that ended at `now_us`. RequestError if the engine gave the request up."""
        match event:
            case Tokens():
                return self._take_tokens(event, now_us)
            case Finished():
                return [*self._take_end(event), self._close(event.usage, now_us)]
            case Preempted():
                self.num_preemptions += 1
        return []

    @property
    def is_cut(self) -> bool:
        """Whether a stop string ended the answer and the engine does not know yet."""
        return self.ending is not None and self.receipt is None

    def _take_tokens(self, event: Tokens, now_us: int) -> list[Item]:
        self._prompt_logprobs += event.prompt_logprobs or ()
        if self.ending is not None or not event.tokens:
            return []
        if self.last_us is None:
            self.first_us = now_us
        else:
            self.gaps_us.append(now_us - self.last_us)
        self.last_us = now_us
        self._last_token = event.tokens[-1]
        self._logprobs += event.logprobs or ()
        delta = self.text.push(event.tokens)
        if delta.stop is not None:
            self.ending = Ending("stop", delta.stop)
        return self._deltas(delta)

    def _take_end(self, event: Finished) -> list[Item]:
        if self.ending is not None:
            return []  # a stop string ended it before
        if event.reason is FinishReason.ERROR:
            self.has_failed = True
            raise RequestError(event.message, None, ENGINE_FAILED)
        if event.reason is FinishReason.CANCELLED:
            raise RequestError(CUT_OFF, None, SHUTTING_DOWN)
        delta = self.text.finish()
        self.ending = ending_of(event.reason, delta.stop, self._last_token, self.request.params)
        return self._deltas(delta)

    def _close(self, usage: Usage, now_us: int) -> Receipt:
        self.receipt = Receipt(
            choice=self.choice,
            is_first_of_prompt=self.request.choice == 0,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=self.text.num_tokens,
            cached_tokens=usage.cached_tokens,
            timing=Timing(
                arrival_us=self.request.arrival_us,
                scheduled_us=usage.scheduled_us,
                first_us=self.first_us,
                last_us=now_us if self.last_us is None else self.last_us,
                num_tokens=self.text.num_tokens,
            ),
        )
        return self.receipt

    def _deltas(self, delta: TextDelta) -> list[Item]:
        """What goes out, behind the prompt if that is echoed: nothing while text is held back."""
        if not delta and self.ending is None:
            return []
        deltas: list[Item] = []
        if self.echo is not None:
            deltas.append(Delta(self.choice, self.echo.text, self._echoed(self.echo.tokens)))
            self.echo = None
        pieces = None
        if self.request.params.logprobs is not None:
            pieces = tuple(ScoredToken(token, self._logprobs.popleft()) for token in delta.tokens)
        deltas.append(Delta(self.choice, delta.text, pieces, self.ending))
        return deltas

    def _echoed(self, tokens: Sequence[TokenText]) -> tuple[ScoredToken, ...] | None:
        if self.request.params.prompt_logprobs is None:
            return None
        return tuple(map(ScoredToken, tokens, [None, *self._prompt_logprobs]))
