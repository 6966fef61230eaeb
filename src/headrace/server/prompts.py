"""Prompts: from checked requests to token ids that fit into the model's context.

Owns when tokenizing leaves the event loop, and the refusal of what is too long. Refuses to know how text becomes ids
(text/).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from headrace.server.limits import INLINE_CHARS
from headrace.server.openai.errors import printable
from headrace.server.openai.requests import CompletionRequest, Conversation
from headrace.server.serving import Serving
from headrace.text.chat import ChatOptions, ChatTemplate, Message, encode_chat, render_chat
from headrace.types import RequestError, SamplingParams

T = TypeVar("T")

# A text of more than this many characters per token of context is measured by its beginning first: so megabytes are
# refused without tokenizing them all, which would take seconds.
PROBE_CHARS_PER_TOKEN = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: array[int]
    text: str | None  # as the client wrote it; None for token ids


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes prompts, on threads of `pool` where that takes long."""

    serving: Serving
    pool: ThreadPoolExecutor

    async def of_completion(self, request: CompletionRequest) -> list[Prompt]:
        """The request's prompts, in order."""
        prompts = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                await self._refuse_if_hopeless(prompt, "prompt")
                ids = await self.encode(prompt, add_special=request.add_special, parse_special=request.parse_special)
                prompts.append(Prompt(array("i", ids), prompt))
            elif len(prompt) > self.serving.max_len:
                raise _too_long(f"the prompt has {len(prompt):,} tokens", self.serving.max_len)
            else:
                prompts.append(Prompt(checked_ids(prompt, self.serving.vocab_size, "prompt"), None))
        return prompts

    async def of_chat(self, conversation: Conversation) -> Prompt:
        """The conversation through the model's template."""
        for message in conversation.messages:
            await self._refuse_if_hopeless(message["content"], "messages")
        template, messages, options = self._for_template(conversation)
        encode = functools.partial(encode_chat, self.serving.tokenizer, template, messages, **options)
        return Prompt(array("i", await self._run(conversation.num_bytes, encode)), None)

    async def rendered(self, conversation: Conversation) -> str:
        """The conversation's text, as the template writes it."""
        template, messages, options = self._for_template(conversation)
        render = functools.partial(render_chat, self.serving.tokenizer, template, messages, **options)
        return await self._run(conversation.num_bytes, render)

    async def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        encode = self.serving.tokenizer.encode
        return await self._run(len(text), lambda: encode(text, add_special=add_special, parse_special=parse_special))

    def fitted(self, params: SamplingParams, prompt: Prompt, *, default: int | None = None) -> SamplingParams:
        """`params` with a max_tokens that the context has room for; RequestError with the numbers if it has not.

        Where max_tokens was left out it is the room that is left, or `default` if that is less.
        """
        num_prompt, max_len = len(prompt.ids), self.serving.max_len
        if num_prompt == 0:
            raise RequestError("the prompt has no tokens; it must have at least 1", "prompt")
        room = max_len - num_prompt
        asked = params.max_tokens
        if room < 0 or (room == 0 and asked != 0):
            raise _too_long(f"the prompt has {num_prompt:,} tokens", max_len)
        if asked is not None and asked > room:
            raise RequestError(
                f"the prompt has {num_prompt:,} tokens and max_tokens is {asked:,}, together {num_prompt + asked:,}; "
                f"the context is {max_len:,} tokens, so there is room for {room:,}: lower max_tokens, shorten the "
                "prompt or raise --max-len",
                "max_tokens",
                "context_length_exceeded",
            )
        if asked is None:
            params = dataclasses.replace(params, max_tokens=room if default is None else min(default, room))
        params.check_vocabulary(self.serving.vocab_size)
        return params

    def _for_template(self, conversation: Conversation) -> tuple[ChatTemplate, Sequence[Message], ChatOptions]:
        """The model's template and what it is given. RequestError if there is none, or if it uses no such variables."""
        template = self.serving.chat_template
        if template is None:
            raise RequestError(
                f"the model {self.serving.model} has no chat template; start the server with --chat-template FILE, or "
                "use /v1/completions",
                "messages",
                "no_chat_template",
            )
        if unused := [name for name in conversation.template_kwargs if name not in template.variables]:
            uses = ", ".join(sorted(template.variables)) or "none"
            raise RequestError(
                f"chat_template_kwargs has {printable(unused[0])!r}; the model's template uses {uses}",
                "chat_template_kwargs",
            )
        messages = conversation.messages
        if "developer" not in template.source:  # OpenAI's newer name for system, which most templates do not know
            messages = tuple({**m, "role": "system"} if m["role"] == "developer" else m for m in messages)
        options: ChatOptions = {
            "add_generation_prompt": conversation.add_generation_prompt,
            "continue_final_message": conversation.continue_final_message,
            "extra": conversation.template_kwargs,
        }
        return template, messages, options

    async def _refuse_if_hopeless(self, text: str, param: str) -> None:
        """Raise RequestError if the beginning of a very long text is too long already."""
        probe = self.serving.max_len * PROBE_CHARS_PER_TOKEN
        if len(text) <= 2 * probe:
            return
        count = len(await self.encode(text[:probe], add_special=False, parse_special=False))
        if count > self.serving.max_len:
            raise _too_long(
                f"the first {probe:,} characters of {len(text):,} have {count:,} tokens", self.serving.max_len, param
            )

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        """Do `work` on a text of `size` characters: here if that is quick, on a thread otherwise."""
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)


def checked_ids(ids: Sequence[int], vocab_size: int, param: str) -> array[int]:
    """Token ids of a client, each one in the vocabulary."""
    for i, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise RequestError(f"{param}[{i}] is {token}; token ids are 0 to {vocab_size - 1}", param)
    return array("i", ids)


def _too_long(what: str, max_len: int, param: str = "prompt") -> RequestError:
    message = f"{what}; the context is {max_len:,} tokens for prompt and answer: shorten the prompt or raise --max-len"
    return RequestError(message, param, "context_length_exceeded")
