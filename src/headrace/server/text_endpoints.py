"""The routes that show what the tokenizer and the template do: exact ids, exact text.

Owns llama.cpp's and vLLM's forms of asking. Refuses to know how text becomes ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from headrace.server.endpoints import check_model
from headrace.server.openai.bodies import DetokenizeBody, TemplateBody, TokenizeBody, decode
from headrace.server.openai.requests import conversation_of
from headrace.server.prompts import Prompts, checked_ids
from headrace.server.serving import Serving
from headrace.server.wire import json_response, read_body
from headrace.types import RequestError


@dataclass(frozen=True, slots=True)
class TextEndpoints:
    """Handlers of /tokenize, /detokenize and /apply-template."""

    serving: Serving
    prompts: Prompts

    async def tokenize(self, http: Request) -> Response:
        """llama.cpp's `content` adds no BOS by default, vLLM's `prompt` does; `messages` go through the template."""
        content = await read_body(http)
        body: TokenizeBody = decode(content, TokenizeBody)
        check_model(self.serving, body.model)
        if sum(source is not None for source in (body.content, body.prompt, body.messages)) != 1:
            raise RequestError("give one of content, prompt and messages", "prompt")
        if body.messages is not None:
            tokens = list((await self.prompts.of_chat(conversation_of(body, len(content)))).ids)
        else:
            tokens = await self._encode(body)
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self.serving.max_len})

    async def detokenize(self, http: Request) -> Response:
        """The text of token ids, special ones shown, under llama.cpp's name and vLLM's."""
        body: DetokenizeBody = decode(await read_body(http), DetokenizeBody)
        check_model(self.serving, body.model)
        ids = checked_ids(body.tokens, self.serving.vocab_size, "tokens")
        text = self.serving.tokenizer.decode(ids, skip_special=False)
        return json_response({"content": text, "prompt": text})

    async def apply_template(self, http: Request) -> Response:
        """The prompt that the template writes for messages."""
        content = await read_body(http)
        body: TemplateBody = decode(content, TemplateBody)
        check_model(self.serving, body.model)
        return json_response({"prompt": await self.prompts.rendered(conversation_of(body, len(content)))})

    async def _encode(self, body: TokenizeBody) -> list[int]:
        is_vllm = body.prompt is not None
        add_special = body.add_special_tokens if is_vllm else body.add_special
        return await self.prompts.encode(
            (body.prompt if is_vllm else body.content) or "",
            add_special=is_vllm if add_special is None else add_special,
            parse_special=body.parse_special is not False,
        )
