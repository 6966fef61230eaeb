"""From checked requests to answers: one stream of deltas per request, whatever the number of prompts and choices.

Owns the way of a request through admission, prompts, the engine and back, and what the metrics hear of it. Leaving a
generator early ends its sequences in the engine. Refuses to know HTTP and JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.engine.answers import Asker, text_options
from headrace.server.admission import Admission
from headrace.server.answer import Answer, Delta, Receipt
from headrace.server.metrics import RequestMetrics
from headrace.server.openai.requests import ChatRequest, CompletionRequest, Generation
from headrace.server.prompts import Prompt, Prompts
from headrace.server.serving import Serving
from headrace.text.answer import AnswerText

T = TypeVar("T")

Item = Delta | Receipt  # a receipt closes its choice


@dataclass(frozen=True, slots=True)
class Generator:
    """Makes answers. Used on the event loop alone."""

    serving: Serving
    prompts: Prompts
    admission: Admission
    metrics: RequestMetrics

    async def completion(self, request: CompletionRequest, arrival_us: int) -> AsyncGenerator[Item, None]:
        """The answers to every prompt, choice i * n + j being the j-th to the i-th."""
        generation = request.generation
        with self.admission.places(len(request.prompts) * generation.n):
            with self.serving.engine.expecting():
                prompts = await self.prompts.of_completion(request)
            answers = [
                answer
                for i, prompt in enumerate(prompts)
                for answer in self._answers(generation, prompt, i * generation.n, arrival_us)
            ]
            async with contextlib.aclosing(merged([self._run(answer) for answer in answers])) as items:
                async for item in items:
                    yield item

    async def chat(self, request: ChatRequest, arrival_us: int) -> AsyncGenerator[Item, None]:
        """The choices of the next message."""
        with self.admission.places(request.generation.n):
            with self.serving.engine.expecting():
                prompt = await self.prompts.of_chat(request)
            answers = self._answers(request.generation, prompt, 0, arrival_us)
            async with contextlib.aclosing(merged([self._run(answer) for answer in answers])) as items:
                async for item in items:
                    yield item

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

    async def _run(self, answer: Answer) -> AsyncGenerator[Item, None]:
        """Let the engine work on one answer."""
        stream = self.serving.engine.stream(answer.request)
        try:
            with self.admission.under_way(stream):
                async with stream:
                    async for stamped in stream:
                        was_cut = answer.is_cut
                        for item in answer.take(stamped):
                            yield item
                        if answer.is_cut and not was_cut:
                            stream.cancel()
        finally:
            self.metrics.count(answer)


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """What `sources` give, as it comes. The first exception of one ends all; so does closing this generator."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as source:
            async for item in source:
                yield item
        return
    queue: asyncio.Queue[_Given[T]] = asyncio.Queue()
    pumps = [asyncio.ensure_future(_pump(source, queue)) for source in sources]
    num_open = len(pumps)
    try:
        while num_open:
            given = await queue.get()
            if given.error is not None:
                raise given.error
            if given.has_ended:
                num_open -= 1
            for item in given.items:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Given(Generic[T]):
    """What a source put into the queue: an item, its end or its failure."""

    items: tuple[T, ...] = ()
    has_ended: bool = False
    error: Exception | None = None


async def _pump(source: AsyncGenerator[T, None], queue: asyncio.Queue[_Given[T]]) -> None:
    try:
        async with contextlib.aclosing(source):
            async for item in source:
                queue.put_nowait(_Given((item,)))
    except Exception as error:
        queue.put_nowait(_Given(error=error))
    else:
        queue.put_nowait(_Given(has_ended=True))
