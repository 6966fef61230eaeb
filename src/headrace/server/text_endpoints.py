"""The routes that show what the tokenizer and the template do: exact ids, exact text.

Owns the shapes of these answers. Refuses to know how text becomes ids, and what a body may say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from headrace.server.endpoints import headers_of
from headrace.server.limits import INLINE_BYTES
from headrace.server.openai.text_requests import PlainText, detokenize_request, template_request, tokenize_request
from headrace.server.prompts import Prompts
from headrace.server.serving import Serving
from headrace.server.wire import json_response, read_body, unless_gone
from headrace.server.workers import Workers

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextEndpoints:
    """Handlers of /tokenize, /detokenize and /apply-template."""

    serving: Serving
    prompts: Prompts
    workers: Workers

    async def tokenize(self, http: Request) -> Response:
        """The ids of a text, or of messages behind the template."""
        request = await self._checked(http, tokenize_request)
        headers = headers_of(self.serving, request.model, request.unheeded)
        if isinstance(request.source, PlainText):
            work = self.prompts.text_ids(request.source)
        else:
            work = self.prompts.chat_ids(request.source)
        tokens = await unless_gone(http.receive, work)
        content = {"tokens": tokens, "count": len(tokens), "max_model_len": self.serving.max_len}
        return json_response(content, headers=headers)

    async def detokenize(self, http: Request) -> Response:
        """The text of token ids, special ones shown, under llama.cpp's name and vLLM's."""
        request = await self._checked(http, detokenize_request)
        headers = headers_of(self.serving, request.model, request.unheeded)
        text = await unless_gone(http.receive, self.prompts.decoded(request.ids))
        return json_response({"content": text, "prompt": text}, headers=headers)

    async def apply_template(self, http: Request) -> Response:
        """The prompt that the template writes for messages."""
        request = await self._checked(http, template_request)
        headers = headers_of(self.serving, request.model, request.unheeded)
        prompt = await unless_gone(http.receive, self.prompts.rendered(request.conversation))
        return json_response({"prompt": prompt}, headers=headers)

    async def _checked(self, http: Request, check: Callable[[bytes], T]) -> T:
        body = await read_body(http)
        work = functools.partial(check, body)
        return await self.workers.run_for(http.receive, work, is_quick=len(body) <= INLINE_BYTES)
