"""From checked requests to answers: one stream of deltas per request, whatever the number of prompts and choices.

Owns the way of a request through admission, prompts, the engine and back, and what the metrics hear of it. Leaving a
generator early ends its sequences in the engine. Refuses to know HTTP and JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass

from headrace.engine.answers import Asker, text_options
from headrace.engine.stream import Stream
from headrace.server.admission import Admission
from headrace.server.answer import Answer, Delta, Receipt
from headrace.server.metrics import RequestMetrics
from headrace.server.openai.requests import ChatRequest, CompletionRequest, Generation
from headrace.server.prompts import Prompt, Prompts
from headrace.server.serving import Serving
from headrace.text.answer import AnswerText
from headrace.types import Event

Item = Delta | Receipt  # a receipt closes its choice


@dataclass(frozen=True, slots=True)
class Generator:
    """Makes answers. Used on the event loop alone."""

    serving: Serving
    prompts: Prompts
    admission: Admission
    metrics: RequestMetrics

    def completion(self, request: CompletionRequest, arrival_us: int) -> AsyncGenerator[list[Item], None]:
        """The answers to every prompt, choice i * n + j being the j-th to the i-th."""
        prompts = functools.partial(self.prompts.of_completion, request)
        return self._run(prompts, len(request.prompts), request.generation, arrival_us)

    def chat(self, request: ChatRequest, arrival_us: int) -> AsyncGenerator[list[Item], None]:
        """The choices of the next message."""
        prompts = functools.partial(self.prompts.of_chat, request)
        return self._run(prompts, 1, request.generation, arrival_us)

    async def _run(
        self, make: Callable[[], Awaitable[list[Prompt]]], num_prompts: int, generation: Generation, arrival_us: int
    ) -> AsyncGenerator[list[Item], None]:
        """Let the engine work on all answers; what they give, as much at a time as there is."""
        with self.admission.places(num_prompts * generation.n), contextlib.ExitStack() as under_way:
            with self.serving.engine.expecting():
                prompts = await make()
            answers = [
                answer
                for i, prompt in enumerate(prompts)
                for answer in self._answers(generation, prompt, i * generation.n, arrival_us)
            ]
            gathered = Gathered(len(answers))
            for answer in answers:
                under_way.enter_context(self._answering(answer, gathered))
            while items := await gathered.take():
                yield items

    def _answers(self, generation: Generation, prompt: Prompt, index: int, arrival_us: int) -> list[Answer]:
        """The n answers to one prompt; their indices begin at `index`."""
        serving, echo = self.serving, prompt.echo
        asker = Asker(serving.engine.next_id, serving.end_ids)
        requests = asker.requests(
            prompt.ids,
            prompt.params,
            generation.n,
            cache_salt=generation.cache_salt,
            priority=generation.priority,
            arrival_us=arrival_us,
        )
        options = text_options(
            requests[0],
            generation.stops,
            is_stop_included=generation.is_stop_included,
            is_special_skipped=generation.is_special_skipped,
        )
        offset = 0 if echo is None else len(echo.text)
        return [
            Answer(index + i, request, AnswerText(serving.tokenizer, options, offset=offset), echo)
            for i, request in enumerate(requests)
        ]

    @contextlib.contextmanager
    def _answering(self, answer: Answer, gathered: Gathered) -> Iterator[None]:
        """Have the engine work on one answer for as long as the context is open."""
        listener = AnswerListener(answer, gathered)
        stream = listener.stream = self.serving.engine.stream(answer.request, listener)
        try:
            with self.admission.under_way(stream), stream:
                yield
        finally:
            self.metrics.count(answer)


class Gathered:
    """What the answers to one request gave, kept until it is taken. Used on one event loop."""

    def __init__(self, num_answers: int) -> None:
        self._num_open = num_answers
        self._items: list[Item] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[Item]:
        """All that has come since the last time, at least one item; none once all answers have ended.

        Raises the first error, once what came before it has been taken.
        """
        if not self._items and self._error is None and self._num_open:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._items and self._error is not None:
            raise self._error
        items, self._items = self._items, []
        return items

    def add(self, items: list[Item]) -> None:
        if items and self._error is None:
            self._items += items
            self._num_open -= isinstance(items[-1], Receipt)
            self._wake()

    def fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AnswerListener:
    """Makes items of what the engine tells of one answer."""

    stream: Stream

    def __init__(self, answer: Answer, gathered: Gathered) -> None:
        self._answer = answer
        self._gathered = gathered

    def take(self, event: Event, now_us: int) -> None:
        was_cut = self._answer.is_cut
        try:
            items = self._answer.take(event, now_us)
        except Exception as error:
            self.fail(error)
            return
        self._gathered.add(items)
        if self._answer.is_cut and not was_cut:
            self.stream.cancel()

    def fail(self, error: Exception) -> None:
        self._gathered.fail(error)
