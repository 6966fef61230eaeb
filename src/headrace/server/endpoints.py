"""The two routes that generate, streamed and not, and the list of models.

Owns how an exchange over HTTP becomes a request and an answer becomes bytes. Refuses to know how answers are made.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from headrace.server.answer import Delta, Item, Receipt
from headrace.server.generate import Generator
from headrace.server.limits import INLINE_BYTES, INLINE_PIECES, MAX_REPORTED_FIELDS
from headrace.server.openai import errors
from headrace.server.openai.bodies import Unheeded
from headrace.server.openai.requests import ChatRequest, CompletionRequest, Generation, chat_request, completion_request
from headrace.server.openai.responses import Chats, Completions, Envelope
from headrace.server.serving import Serving, UnknownFields
from headrace.server.sse import DONE, event
from headrace.server.wire import EventStream, json_response, read_body, unless_gone
from headrace.server.workers import Workers
from headrace.types import RequestError, SamplingParams

log = logging.getLogger(__name__)

R = TypeVar("R", ChatRequest, CompletionRequest)


@dataclass(frozen=True, slots=True)
class OpenAIEndpoints:
    """Handlers of OpenAI's routes."""

    serving: Serving
    generator: Generator
    workers: Workers

    async def completions(self, http: Request) -> Response:
        request, arrival_us, headers = await self._checked(http, completion_request)
        shape = Completions(self._envelope("cmpl"), self.serving.tokenizer)
        return await self._respond(
            http, request.generation, self.generator.completion(request, arrival_us), shape, headers
        )

    async def chat(self, http: Request) -> Response:
        request, arrival_us, headers = await self._checked(http, chat_request)
        shape = Chats(self._envelope("chatcmpl"), self.serving.tokenizer)
        return await self._respond(http, request.generation, self.generator.chat(request, arrival_us), shape, headers)

    async def _checked(
        self, http: Request, check: Callable[[bytes, SamplingParams], R]
    ) -> tuple[R, int, dict[str, str]]:
        """The request in a body, when it had arrived, and the headers of its answer."""
        body = await read_body(http)
        arrival_us = self.serving.now_us()
        work = functools.partial(check, body, self.serving.defaults)
        request = await self.workers.run_for(http.receive, work, is_quick=len(body) <= INLINE_BYTES)
        headers = headers_of(self.serving, request.generation.model, request.generation.unheeded)
        check_priority(self.serving, request.generation.priority)
        return request, arrival_us, headers

    async def models(self, http: Request) -> Response:
        return json_response({"object": "list", "data": [self._model(name) for name in self.serving.model_names]})

    async def model(self, http: Request) -> Response:
        name = http.path_params["name"]
        check_model(self.serving, name)
        return json_response(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.serving.created_s,
            "owned_by": "headrace",
            "root": self.serving.model,
            "max_model_len": self.serving.max_len,
        }

    def _envelope(self, prefix: str) -> Envelope:
        return Envelope(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), self.serving.model)

    async def _respond(
        self,
        http: Request,
        generation: Generation,
        items: AsyncGenerator[list[Item], None],
        shape: Completions | Chats,
        headers: dict[str, str],
    ) -> Response:
        """The answer made from `items`. An error before the first one has a status of its own, streamed or not."""
        if not generation.is_streamed:
            return await unless_gone(http.receive, self._whole(items, shape, headers))
        pieces = events(items, shape, has_usage_chunk=generation.has_usage_chunk)
        first = await unless_gone(http.receive, anext(pieces))
        return EventStream(first, pieces, headers)

    async def _whole(
        self, items: AsyncGenerator[list[Item], None], shape: Completions | Chats, headers: dict[str, str]
    ) -> Response:
        choices, receipts = await fold(items)
        num_pieces = sum(len(delta.pieces or ()) for deltas in choices for delta in deltas)

        def write() -> Response:
            return json_response(shape.whole(choices, receipts), headers=headers)

        return await self.workers.run(write, is_quick=num_pieces <= INLINE_PIECES)


async def fold(items: AsyncGenerator[list[Item], None]) -> tuple[list[list[Delta]], list[Receipt]]:
    """The whole answer's choices, from the same deltas that a stream sends, and what they took."""
    choices: dict[int, list[Delta]] = {}
    receipts: dict[int, Receipt] = {}
    async with contextlib.aclosing(items):
        async for batch in items:
            for item in batch:
                if isinstance(item, Receipt):
                    receipts[item.choice] = item
                else:
                    choices.setdefault(item.choice, []).append(item)
    order = sorted(choices)
    return [choices[i] for i in order], [receipts[i] for i in order]


async def events(
    items: AsyncGenerator[list[Item], None], shape: Completions | Chats, *, has_usage_chunk: bool
) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events. An error after the first of them is the last event before [DONE]."""
    receipts: list[Receipt] = []
    has_begun = False
    async with contextlib.aclosing(items):
        try:
            async for batch in items:
                receipts += [item for item in batch if isinstance(item, Receipt)]
                chunks = [chunk for item in batch if isinstance(item, Delta) for chunk in shape.chunks(item)]
                if chunks:
                    yield b"".join(map(event, chunks))
                    has_begun = True
            if has_usage_chunk:
                yield event(shape.usage_chunk(receipts))
        except Exception as error:
            if not has_begun:
                raise
            if not isinstance(error, RequestError):
                log.exception("an answer broke off")
            yield event(errors.refusal_of(error).body)
        yield DONE


def headers_of(serving: Serving, model: str | None, unheeded: Unheeded) -> dict[str, str]:
    """Check what concerns every request; returns the answer's headers, which say what was ignored."""
    check_model(serving, model)
    if unheeded.unknown and serving.unknown_fields is UnknownFields.REFUSE:
        name = errors.printable(unheeded.unknown[0])
        raise RequestError(f"{name} is not a field of this API", name, "unknown_parameter")
    ignored = [*unheeded.unknown, *unheeded.hints]
    names = [errors.printable(name) for name in ignored[:MAX_REPORTED_FIELDS]]
    if len(ignored) > MAX_REPORTED_FIELDS:
        names.append(f"and {len(ignored) - MAX_REPORTED_FIELDS:,} more")
    return {"x-ignored-fields": ", ".join(names)} if names else {}


def check_model(serving: Serving, name: str | None) -> None:
    """Raise RequestError if `name` is not what is served here; None is whatever is."""
    if name is not None and name not in serving.model_names:
        served = ", ".join(serving.model_names)
        shown = errors.printable(name)
        raise RequestError(f"the model {shown!r} is not served here; served: {served}", "model", "model_not_found")


def check_priority(serving: Serving, priority: int) -> None:
    """Raise RequestError for a priority that would change nothing here; 0 is every request's."""
    if priority and not serving.has_priorities:
        raise RequestError(
            f"priority is {priority}, but this server runs requests in the order of their arrival; "
            "leave it out, or start the server with --order priority",
            "priority",
            "unsupported_value",
        )
