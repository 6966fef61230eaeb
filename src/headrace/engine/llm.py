"""LLM: the offline API. Prompts in, completions out, on the caller's thread, without a server.

Owns the loop that drives an engine until its prompts are answered. The scheduler, the kernels and the text layer are
the ones that serve.
"""

from __future__ import annotations

import itertools
import reprlib
from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from headrace.engine.answers import Asker, ending_of, fitted, text_options
from headrace.engine.config import EngineConfig
from headrace.engine.load import Loaded, load
from headrace.model import hub
from headrace.text.answer import AnswerText
from headrace.text.chat import ChatTemplate, Message, encode_chat
from headrace.text.stops import StopStrings
from headrace.types import (
    Event,
    Finished,
    FinishReason,
    InvariantError,
    Request,
    RequestError,
    SamplingParams,
    TokenLogprobs,
    Tokens,
    Usage,
)

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]]  # text or token ids


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt's answer."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]  # as drawn: an end token that stopped the answer is the last
    text: str
    finish_reason: str  # "stop" or "length"
    stop_reason: str | int | None  # the stop string, or the id of stop_token_ids, that ended it
    logprobs: tuple[TokenLogprobs, ...] | None  # one per token, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] | None  # one per prompt token after the first
    usage: Usage


@dataclass(slots=True)
class _Growing:
    """A completion that is not finished."""

    request: Request
    answer: AnswerText
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: Finished | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.finished = event
            self.pieces.append(self.answer.finish().text)
        elif isinstance(event, Tokens) and self.answer.stop is None:
            self.prompt_logprobs += event.prompt_logprobs or ()
            self.pieces.append(self.answer.push(event.tokens).text)
            num_kept = self.answer.num_tokens - len(self.tokens)
            self.tokens += event.tokens[:num_kept]
            self.logprobs += (event.logprobs or ())[:num_kept]

    def completion(self, finished: Finished) -> Completion:
        params = self.request.params
        ending = ending_of(finished.reason, self.answer.stop, self.tokens[-1] if self.tokens else None, params)
        return Completion(
            prompt_tokens=tuple(self.request.prompt),
            tokens=tuple(self.tokens),
            text="".join(self.pieces),
            finish_reason=ending.reason,
            stop_reason=ending.stop_reason,
            logprobs=None if params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if params.prompt_logprobs is None else tuple(self.prompt_logprobs),
            usage=finished.usage,
        )


class LLM:
    """A loaded model for programs. Not thread-safe; close it, or use it as a context manager.

    `model` is a known name (pulled once), `hf:org/name`, a GGUF file or a directory. `cache_dir` is where models are
    kept, and looked for packed.
    """

    def __init__(
        self,
        model: str | Path = hub.DEFAULT_MODEL,
        config: EngineConfig | None = None,
        *,
        cache_dir: Path | None = None,
    ) -> None:
        folder = cache_dir or hub.default_cache_dir()
        path = hub.pull(str(model), folder)
        chosen = config or EngineConfig()
        if chosen.packed_dir is None:
            chosen = replace(chosen, packed_dir=hub.packed_dir(folder))
        self._loaded: Loaded = load(path, chosen)
        self._engine = self._loaded.engine
        self._asker = Asker(itertools.count(1).__next__, self._loaded.files.end_ids)
        self._is_closed = False
        self._open: dict[int, _Growing] = {}

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads that compute. What is asked for afterwards, of streams under way too, is a RequestError."""
        self._is_closed = True
        self._loaded.close()

    @property
    def loaded(self) -> Loaded:
        return self._loaded

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
    ) -> list[Completion]:
        """Answer all prompts, batched together; completions come in the order of the prompts.

        A prompt is text or token ids. `params` is one for all or one for each; None: what the model's authors
        recommend. Raises RequestError, before anything runs, where an argument is something else, or a prompt and its
        max_tokens do not fit.
        """
        each, stops = _as_prompts(prompts), _as_stops(stop)
        growing = [
            self._growing(prompt, p, stops) for prompt, p in zip(each, self._params(params, len(each)), strict=True)
        ]
        self._submit(growing)
        try:
            while any(one.finished is None for one in growing):
                self._step()
        finally:
            self._withdraw(growing)
        return [_completed(one) for one in growing]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, stop: str | Sequence[str] = ()
    ) -> Generator[str, None, None]:
        """The answer to one prompt, piece by piece. Leaving the loop early ends the work."""
        if params is not None and not isinstance(params, SamplingParams):
            raise _wrong_type("params", params, "SamplingParams")
        one = self._growing(_as_prompt(prompt), params or self._loaded.defaults, _as_stops(stop))
        num_given = 0
        self._submit([one])
        try:
            while one.finished is None or num_given < len(one.pieces):
                if num_given == len(one.pieces):
                    self._step()
                fresh = one.pieces[num_given:]
                num_given += len(fresh)  # before the yield: while it is out, another stream's steps may add pieces
                yield from filter(None, fresh)
        finally:
            self._withdraw([one])
        _completed(one)

    def chat_prompt(self, messages: Sequence[Message], template: ChatTemplate | None = None) -> list[int]:
        """Token ids of a conversation, by `template` or else the model's own; RequestError if it has none."""
        if (chosen := template or self._loaded.chat_template) is None:
            raise RequestError("the model has no chat template; give one with --chat-template FILE", "messages")
        return encode_chat(self._loaded.tokenizer, chosen, messages)

    def _growing(self, prompt: str | list[int], params: SamplingParams, stops: StopStrings) -> _Growing:
        tokenizer, spec = self._loaded.tokenizer, self._loaded.files.spec
        params.check_vocabulary(spec.vocab_size)
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else [tokenizer.check_id(i) for i in prompt]
        params = fitted(params, len(ids), self._loaded.limits.max_len)
        (request,) = self._asker.requests(array("i", ids), params, arrival_us=self._engine.clock())
        return _Growing(request, AnswerText(tokenizer, text_options(request, stops)))

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self._loaded.defaults] * count
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise _wrong_type("params", params, "SamplingParams or a sequence of them, one for each prompt")
        if len(params) != count:
            raise RequestError(f"{count} prompts, but {len(params)} params", "params")
        return params

    def _submit(self, growing: Sequence[_Growing]) -> None:
        """Hand all to the engine, or none: a request that can never run is an error before anything runs."""
        self._check_open()
        for i, one in enumerate(growing):
            if (rejection := self._engine.add(one.request)) is not None:
                self._withdraw(growing[:i])
                raise RequestError(rejection.message, rejection.param, rejection.code)
            self._open[one.request.id] = one

    def _withdraw(self, growing: Sequence[_Growing]) -> None:
        """Take back what is not finished, so that nothing is computed for nobody."""
        for one in growing:
            self._route(self._engine.cancel(one.request.id))
            self._open.pop(one.request.id, None)

    def _step(self) -> None:
        """One step for all that are open; several streams may take turns."""
        self._check_open()
        self._route(self._engine.step())

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestError("the LLM is closed; make another", None, "closed")

    def _route(self, events: Sequence[Event]) -> None:
        for event in events:
            if (one := self._open.get(event.request_id)) is None:
                continue
            was_stopped = one.answer.stop is not None
            one.take(event)
            if one.answer.stop is not None and not was_stopped and one.finished is None:
                self._route(self._engine.cancel(event.request_id))


def _completed(one: _Growing) -> Completion:
    if one.finished is None:
        raise InvariantError(f"request {one.request.id} was given up before it ended")
    if one.finished.reason is FinishReason.ERROR:
        raise RequestError(one.finished.message, None, "engine_failed")
    return one.completion(one.finished)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """One prompt or many."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_sequence(prompts):
        raise _wrong_type("prompts", prompts, "text, token ids or a sequence of these")
    are_ids = [_is_id(one) for one in prompts]
    if any(are_ids) and not all(are_ids):
        raise RequestError("prompts mixes token ids with prompts; give one prompt or a list of them", "prompts")
    return [_as_prompt(prompts)] if any(are_ids) else [_as_prompt(one) for one in prompts]


def _as_prompt(prompt: object) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if not _is_sequence(prompt):
        raise _wrong_type("prompt", prompt, "text or token ids")
    ids = []
    for i, one in enumerate(prompt):
        if not _is_id(one):
            raise _wrong_type(f"prompt[{i}]", one, "an integer, as prompt is to be text or token ids")
        ids.append(int(one))
    return ids


def _is_sequence(value: object) -> TypeGuard[Sequence[object]]:
    """Bytes are none: nobody means those numbers as token ids."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview)


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _wrong_type(name: str, value: object, wanted: str) -> RequestError:
    return RequestError(f"{name} is {reprlib.repr(value)}; it must be {wanted}", name, "invalid_type")


def _as_stops(stop: str | Sequence[str]) -> StopStrings:
    """One stop string or many."""
    many = (stop,) if isinstance(stop, str) else stop
    if not isinstance(many, Sequence) or not all(isinstance(one, str) for one in many):
        raise _wrong_type("stop", stop, "a string or a sequence of strings")
    return StopStrings(tuple(many))
