"""From checked requests to answers: one stream of deltas per request, whatever the number of prompts and choices.

Owns the way of a request through admission, prompts, the engine and back, and what the metrics hear of it. Leaving a
generator early ends its sequences in the engine. Refuses to know HTTP and JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from headrace.engine.answers import Asker, text_options
from headrace.server.admission import Admission
from headrace.server.answer import Answer, Item, Receipt
from headrace.server.limits import GATHERED_ITEMS
from headrace.server.metrics import RequestMetrics
from headrace.server.openai.requests import ChatRequest, CompletionRequest, Generation
from headrace.server.prompts import Prompt, Prompts
from headrace.server.serving import Serving
from headrace.text.answer import AnswerText
from headrace.types import Event


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
                self._start(answer, gathered, under_way)
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

    def _start(self, answer: Answer, gathered: Gathered, under_way: contextlib.ExitStack) -> None:
        """Have the engine work on one answer, until it has ended or `under_way` does."""
        work = under_way.enter_context(contextlib.ExitStack())
        work.callback(self.metrics.count, answer)
        cancel = functools.partial(self.serving.engine.cancel, answer.request.id)
        stream = self.serving.engine.stream(answer.request, AnswerListener(answer, gathered, cancel, work.close))
        work.enter_context(self.admission.under_way(stream))
        work.enter_context(stream)


class Gathered:
    """What the answers to one request gave, kept until it is taken. Used on one event loop."""

    def __init__(self, num_answers: int) -> None:
        self._num_open = num_answers
        self._items: list[Item] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[Item]:
        """What has come since the last time, at least one item; none once all answers have ended.

        Where much has come, as for a client that reads slowly, it is some of it, and others have their turn before
        more is. Raises the first error, once what came before it has been taken.
        """
        if self._items:
            await asyncio.sleep(0)
        elif self._error is None and self._num_open:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._items and self._error is not None:
            raise self._error
        items, self._items = self._items[:GATHERED_ITEMS], self._items[GATHERED_ITEMS:]
        return items

    def add(self, items: list[Item]) -> None:
        if items and self._error is None:
            self._items += items
            self._num_open -= isinstance(items[-1], Receipt)
            self._wake()

    def fail(self, error: Exception) -> None:
        if self._error is None and self._num_open:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AnswerListener:
    """Makes items of what the engine tells of one answer."""

    def __init__(
        self, answer: Answer, gathered: Gathered, cancel: Callable[[], None], close: Callable[[], None]
    ) -> None:
        """`cancel` asks the engine to end the answer; `close` is called when it has."""
        self._answer = answer
        self._gathered = gathered
        self._cancel = cancel
        self._close = close

    def take(self, event: Event, now_us: int) -> None:
        was_cut = self._answer.is_cut
        try:
            self._gathered.add(self._answer.take(event, now_us))
            if self._answer.is_cut and not was_cut:
                self._cancel()
            if self._answer.receipt is not None:
                self._close()
        except Exception as error:  # this request's alone: others are still to be told of the step
            self.fail(error)

    def fail(self, error: Exception) -> None:
        self._gathered.fail(error)
