"""Prompts: from checked requests to token ids that fit into the model's context.

Owns when tokenizing leaves the event loop, and the refusal of what is too long before it is tokenized. Refuses to know
how text becomes ids (text/).
"""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.answers import fitted, too_long
from headrace.server.answer import Echo
from headrace.server.limits import INLINE_CHARS, MAX_SCORES, MAX_TOKENIZED_CHARS, PROMPT_CHARS
from headrace.server.openai.errors import printable
from headrace.server.openai.requests import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    Conversation,
)
from headrace.server.openai.text_requests import PlainText
from headrace.server.serving import Serving
from headrace.server.workers import Workers
from headrace.text.chat import ChatOptions, ChatTemplate, Message, encode_pieces, render_chat, render_pieces
from headrace.types import RequestError, SamplingParams

# A text of more than this many characters per token of context is measured by its beginning first: so megabytes are
# refused without tokenizing them all, which would take seconds.
PROBE_CHARS_PER_TOKEN = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: array[int]
    params: SamplingParams  # with a max_tokens that fits behind the ids
    echo: Echo | None = None

    @property
    def num_scored(self) -> int:
        """The most tokens that have logprobs in one answer, if those were asked for."""
        return (self.params.max_tokens or 0) + (0 if self.echo is None else len(self.ids))


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes prompts, on other threads where that takes long."""

    serving: Serving
    workers: Workers

    async def of_completion(self, request: CompletionRequest) -> list[Prompt]:
        """The request's prompts, in order."""
        size = sum(PROMPT_CHARS + len(prompt) for prompt in request.prompts)
        work = functools.partial(self._of_completion, request)
        return await self.workers.run(work, is_quick=size <= INLINE_CHARS)

    async def of_chat(self, request: ChatRequest) -> list[Prompt]:
        """The conversation through the model's template: one prompt."""
        ids = array("i", await self.chat_ids(request.conversation))
        prompt = Prompt(ids, self._fitted(request.generation.params, ids))
        check_scores([prompt], request.generation.n)
        return [prompt]

    async def chat_ids(self, conversation: Conversation) -> list[int]:
        work = functools.partial(self._chat_ids, conversation)
        return await self.workers.run(work, is_quick=conversation.num_bytes <= INLINE_CHARS)

    async def rendered(self, conversation: Conversation) -> str:
        """The conversation's text, as the template writes it."""
        template, messages, options = self._for_template(conversation)
        work = functools.partial(render_chat, self.serving.tokenizer, template, messages, **options)
        return await self.workers.run(work, is_quick=conversation.num_bytes <= INLINE_CHARS)

    async def text_ids(self, source: PlainText) -> list[int]:
        work = functools.partial(
            self.serving.tokenizer.encode,
            source.text,
            add_special=source.add_special,
            parse_special=source.parse_special,
        )
        return await self.workers.run(work, is_quick=len(source.text) <= INLINE_CHARS)

    async def decoded(self, ids: list[int]) -> str:
        """The text of a client's token ids, special ones shown."""

        def work() -> str:
            checked = checked_ids(ids, self.serving.vocab_size, "tokens")
            return self.serving.tokenizer.decode(checked, skip_special=False)

        return await self.workers.run(work, is_quick=len(ids) <= INLINE_CHARS)

    def _of_completion(self, request: CompletionRequest) -> list[Prompt]:
        request.generation.params.check_vocabulary(self.serving.vocab_size)
        prompts = [self._prompt(request, source) for source in request.prompts]
        check_scores(prompts, request.generation.n)
        return prompts

    def _prompt(self, request: CompletionRequest, source: str | tuple[int, ...]) -> Prompt:
        tokenizer, max_len = self.serving.tokenizer, self.serving.max_len
        if isinstance(source, str):
            self._refuse_if_hopeless((source,), "prompt")
            encoded = tokenizer.encode(source, add_special=request.add_special, parse_special=request.parse_special)
            ids = array("i", encoded)
        elif len(source) > max_len:
            raise too_long(f"the prompt has {len(source):,} tokens", max_len)
        else:
            ids = checked_ids(source, self.serving.vocab_size, "prompt")
        default = DEFAULT_COMPLETION_TOKENS if request.has_default_length else None
        params = fitted(request.generation.params, len(ids), max_len, default=default)
        if not request.is_echoed:
            return Prompt(ids, params)
        return Prompt(ids, dataclasses.replace(params, prompt_logprobs=params.logprobs), self._echo(source, ids))

    def _echo(self, source: str | tuple[int, ...], ids: array[int]) -> Echo:
        """The prompt as the client wrote it: without the BOS that only we put there."""
        tokenizer, first = self.serving.tokenizer, ids[0]
        is_bos_hidden = (
            first == tokenizer.bos_id and isinstance(source, str) and not source.startswith(tokenizer.token_text(first))
        )
        return Echo.of(ids, tokenizer, is_bos_hidden=is_bos_hidden)

    def _chat_ids(self, conversation: Conversation) -> list[int]:
        self._refuse_if_hopeless([message["content"] for message in conversation.messages], "messages")
        template, messages, options = self._for_template(conversation)
        pieces = render_pieces(self.serving.tokenizer, template, messages, **options)
        self._refuse_if_hopeless([piece.text for piece in pieces], "messages")  # templates write tools' arguments, too
        return encode_pieces(self.serving.tokenizer, pieces)

    def _fitted(self, params: SamplingParams, ids: array[int]) -> SamplingParams:
        params.check_vocabulary(self.serving.vocab_size)
        return fitted(params, len(ids), self.serving.max_len)

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

    def _refuse_if_hopeless(self, texts: Sequence[str], param: str) -> None:
        """Raise RequestError for a prompt with too much text to tokenize, or whose beginning is too long already."""
        max_len = self.serving.max_len
        probe, size = max_len * PROBE_CHARS_PER_TOKEN, sum(map(len, texts))
        if size > MAX_TOKENIZED_CHARS:
            what = f"the prompt has {size:,} characters; at most {MAX_TOKENIZED_CHARS:,} are taken as text"
            raise too_long(what, max_len, param)
        if size <= 2 * probe:
            return
        beginning = "".join(texts)[:probe]
        count = len(self.serving.tokenizer.encode(beginning, add_special=False, parse_special=False))
        if count > max_len:
            raise too_long(f"the first {probe:,} characters of {size:,} have {count:,} tokens", max_len, param)


def check_scores(prompts: Sequence[Prompt], n: int) -> None:
    """Raise RequestError if `n` answers to each prompt would carry more logprobs than one request may have."""
    num_top = prompts[0].params.logprobs
    if num_top is None:
        return
    num_tokens = n * sum(prompt.num_scored for prompt in prompts)
    if num_tokens * (1 + num_top) > MAX_SCORES:
        raise RequestError(
            f"up to {num_tokens:,} tokens of all answers would be scored, with {num_top} alternatives each: "
            f"{num_tokens * (1 + num_top):,} logprobs; at most {MAX_SCORES:,} are allowed in one request: "
            "lower max_tokens, n or the number of alternatives",
            "logprobs",
        )


def checked_ids(ids: Sequence[int], vocab_size: int, param: str) -> array[int]:
    """Token ids of a client, each one in the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        i = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise RequestError(f"{param}[{i}] is {ids[i]}; token ids are 0 to {vocab_size - 1}", param)
    return array("i", ids)
