"""From checked requests to answers: one stream of deltas per request, whatever the number of prompts and choices.

Owns the way of a request through admission, prompts, the engine and back, and what the metrics hear of it. Leaving a
generator early ends its sequences in the engine. Refuses to know HTTP and JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.server.admission import Admission
from headrace.server.answer import Answer, Delta, Echo, Ledger
from headrace.server.metrics import RequestMetrics
from headrace.server.openai.requests import DEFAULT_COMPLETION_TOKENS, ChatRequest, CompletionRequest, Generation
from headrace.server.prompts import Prompt, Prompts
from headrace.server.serving import Serving
from headrace.text.answer import AnswerText, TextOptions
from headrace.types import Request

T = TypeVar("T")

Item = Delta | Ledger  # a ledger closes its choice


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
            answers = []
            for i, prompt in enumerate(await self.prompts.of_completion(request)):
                params = self.prompts.fitted(
                    generation.params, prompt, default=DEFAULT_COMPLETION_TOKENS if request.has_default_length else None
                )
                echo = self._echo(prompt) if request.is_echoed else None
                if echo is not None:
                    params = dataclasses.replace(params, prompt_logprobs=params.logprobs)
                fitted = dataclasses.replace(generation, params=params)
                answers += self._answers(fitted, prompt, i * generation.n, arrival_us, echo)
            async with contextlib.aclosing(merged([self._run(answer) for answer in answers])) as items:
                async for item in items:
                    yield item

    async def chat(self, request: ChatRequest, arrival_us: int) -> AsyncGenerator[Item, None]:
        """The choices of the next message."""
        with self.admission.places(request.generation.n):
            prompt = await self.prompts.of_chat(request.conversation)
            params = self.prompts.fitted(request.generation.params, prompt)
            fitted = dataclasses.replace(request.generation, params=params)
            answers = self._answers(fitted, prompt, 0, arrival_us, None)
            async with contextlib.aclosing(merged([self._run(answer) for answer in answers])) as items:
                async for item in items:
                    yield item

    def _echo(self, prompt: Prompt) -> Echo:
        """The prompt as the client wrote it: without the BOS that only we put there."""
        tokenizer, first = self.serving.tokenizer, prompt.ids[0]
        is_bos_hidden = (
            first == tokenizer.bos_id
            and prompt.text is not None
            and not prompt.text.startswith(tokenizer.token_text(first))
        )
        return Echo.of(prompt.ids, tokenizer, is_bos_hidden=is_bos_hidden)

    def _answers(
        self, generation: Generation, prompt: Prompt, index: int, arrival_us: int, echo: Echo | None
    ) -> list[Answer]:
        """The n answers to one prompt; their indices begin at `index`, their randomness differs by the choice alone."""
        params = generation.params
        seed = secrets.randbits(64) if generation.seed is None else generation.seed
        end_ids = frozenset() if params.ignore_eos else self.serving.end_ids
        stop_ids = end_ids.union(params.stop_token_ids)
        options = TextOptions(
            stops=generation.stops,
            stop_ids=stop_ids,
            include_stop=generation.is_stop_included,
            skip_special=generation.is_special_skipped,
            min_tokens=params.min_tokens,
        )
        return [
            Answer(
                choice=index + choice,
                request=Request(
                    id=self.serving.engine.next_id(),
                    prompt=prompt.ids,
                    params=params,
                    seed=seed,
                    stop_ids=stop_ids,
                    choice=choice,
                    cache_salt=generation.cache_salt,
                    arrival_us=arrival_us,
                ),
                text=AnswerText(self.serving.tokenizer, options, offset=len(echo.text) if echo is not None else 0),
                echo=echo,
            )
            for choice in range(generation.n)
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
