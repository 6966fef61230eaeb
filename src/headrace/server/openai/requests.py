"""Checked requests: what a body means once it is decoded, ranges and meaning included.

Owns the way from a typed body to SamplingParams, prompts and messages. Knows no tokenizer and no engine; whatever needs
the model's own numbers (vocabulary, context) is checked by prompts.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.server.limits import (
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_OBJECT_BYTES,
    MAX_PARTS,
    MAX_SEQUENCES_PER_REQUEST,
    MAX_TEMPLATE_KWARGS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
)
from headrace.server.openai.bodies import (
    AnyObject,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    Part,
    TemplateBody,
    TokenizeBody,
    ToolCall,
    Unheeded,
    decode,
    decode_body,
    json_object,
    token_id_lists,
    token_ids,
)
from headrace.server.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS
from headrace.text.chat import joined_parts
from headrace.text.stops import StopStrings, check_stops
from headrace.types import MAX_LOGIT_BIAS, RequestError, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's for /v1/completions; a chat's default is the room that is left
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class Generation:
    """What both APIs ask of an answer."""

    params: SamplingParams
    n: int
    stops: StopStrings
    is_stop_included: bool
    is_special_skipped: bool
    is_streamed: bool
    has_usage_chunk: bool
    cache_salt: bytes
    priority: int  # lower runs first
    model: str | None
    unheeded: Unheeded


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    generation: Generation
    prompts: tuple[str | tuple[int, ...], ...]
    is_echoed: bool
    add_special: bool
    parse_special: bool
    has_default_length: bool  # max_tokens was left out


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and how the template shall render them."""

    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_bytes: int = dataclasses.field(default=0, compare=False)  # of the body: how long the template may take with it


@dataclass(frozen=True, slots=True)
class ChatRequest:
    generation: Generation
    conversation: Conversation


def completion_request(body: bytes, defaults: SamplingParams) -> CompletionRequest:
    """A body of /v1/completions; RequestError names what is wrong with it."""
    typed, unheeded = decode_body(body, CompletionBody, COMPLETION_FIELDS)
    prompts = _prompts(typed.prompt)
    generation = _generation(typed, _sampling(typed, defaults, typed.max_tokens, typed.logprobs), unheeded)
    if len(prompts) * generation.n > MAX_SEQUENCES_PER_REQUEST:
        raise RequestError(
            f"{len(prompts)} prompts with n = {generation.n} are {len(prompts) * generation.n} answers; "
            f"at most {MAX_SEQUENCES_PER_REQUEST} are allowed in one request",
            "prompt" if generation.n == 1 else "n",
        )
    return CompletionRequest(
        generation=generation,
        prompts=prompts,
        is_echoed=bool(typed.echo),
        add_special=typed.add_special_tokens is not False,
        parse_special=typed.parse_special is not False,
        has_default_length=typed.max_tokens is None,
    )


def chat_request(body: bytes, defaults: SamplingParams) -> ChatRequest:
    """A body of /v1/chat/completions; RequestError names what is wrong with it."""
    typed, unheeded = decode_body(body, ChatBody, CHAT_FIELDS)
    _check_format(typed)
    conversation = conversation_of(typed, len(body))
    params = _sampling(typed, defaults, _chat_length(typed), _chat_logprobs(typed))
    return ChatRequest(_generation(typed, params, unheeded), conversation)


def conversation_of(body: ChatBody | TemplateBody | TokenizeBody, num_bytes: int) -> Conversation:
    """The messages of a body of so many bytes, checked."""
    if not body.messages:
        raise RequestError("messages is missing or empty; at least one message is needed", "messages")
    _check_count(body.messages, MAX_MESSAGES, "messages")
    kwargs = json_object(body.chat_template_kwargs, "chat_template_kwargs")
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise RequestError(f"chat_template_kwargs has more than {MAX_TEMPLATE_KWARGS} entries", "chat_template_kwargs")
    is_continued = bool(body.continue_final_message)
    if is_continued and body.add_generation_prompt:
        raise RequestError(
            "continue_final_message goes on in the last message, add_generation_prompt begins a new one; set one",
            "continue_final_message",
        )
    if is_continued and body.messages[-1].role != "assistant":
        raise RequestError(
            f"continue_final_message needs a last message of the role assistant; it is {body.messages[-1].role!r}",
            "continue_final_message",
        )
    return Conversation(
        messages=_messages(body.messages),
        add_generation_prompt=body.add_generation_prompt is not False and not is_continued,
        continue_final_message=is_continued,
        template_kwargs=kwargs,
        num_bytes=num_bytes,
    )


def _generation(body: GenerationBody, params: SamplingParams, unheeded: Unheeded) -> Generation:
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_SEQUENCES_PER_REQUEST:
        raise RequestError(f"n is {n}; it must be at least 1 and at most {MAX_SEQUENCES_PER_REQUEST}", "n")
    if body.best_of is not None and body.best_of != n:
        raise RequestError(
            f"best_of is {body.best_of} and n is {n}; answers are not ranked here, leave best_of out", "best_of"
        )
    options = body.stream_options
    if options is not None and not body.stream:
        raise RequestError("stream_options is for streams; set stream to true or leave it out", "stream_options")
    return Generation(
        params=params,
        n=n,
        stops=_stops(body.stop),
        is_stop_included=bool(body.include_stop_str_in_output),
        is_special_skipped=body.skip_special_tokens is not False,
        is_streamed=bool(body.stream),
        has_usage_chunk=options is not None and bool(options.include_usage),
        cache_salt=_cache_salt(body.cache_salt),
        priority=body.priority or 0,
        model=body.model,
        unheeded=unheeded,
    )


_COPIED = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")


def _sampling(
    body: GenerationBody, defaults: SamplingParams, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    given: dict[str, Any] = {name: getattr(body, name) for name in _COPIED if getattr(body, name) is not None}
    if body.top_k is not None:
        given["top_k"] = 0 if body.top_k == -1 else body.top_k  # vLLM's off is -1, others' is 0
    if body.logit_bias is not None:
        if len(body.logit_bias) > MAX_LOGIT_BIAS:  # before they are sorted: there may be a million
            raise RequestError(
                f"logit_bias has {len(body.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed", "logit_bias"
            )
        given["logit_bias"] = tuple(sorted(body.logit_bias.items()))
    if body.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(dict.fromkeys(body.stop_token_ids))
    return dataclasses.replace(
        defaults,
        **given,
        seed=_seed(body.seed),
        max_tokens=max_tokens,
        logprobs=logprobs,
        ignore_eos=bool(body.ignore_eos),
    )


def _seed(seed: int | None) -> int | None:
    """OpenAI's seed is a signed 64-bit integer, others send an unsigned one; both are keys of 64 bits here."""
    if seed is None:
        return None
    if not -(2**63) <= seed < 2**64:
        raise RequestError(f"seed is {seed}; it must be at least -2^63 and less than 2^64", "seed")
    return seed % 2**64


def _stops(stop: str | list[str] | None) -> StopStrings:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    check_stops(stops)
    return StopStrings(tuple(dict.fromkeys(stops)))


def _cache_salt(salt: str | None) -> bytes:
    if salt is None:
        return b""
    if not 0 < len(salt) <= MAX_NAME_CHARS:
        raise RequestError(f"cache_salt must have at least 1 and at most {MAX_NAME_CHARS} characters", "cache_salt")
    return salt.encode()


# Completions --------------------------------------------------------------------------------------------------

_IDS = re.compile(rb"\s*\[\s*-?\d")
_LISTS = re.compile(rb"\s*\[\s*\[")


def _prompts(raw: msgspec.Raw) -> tuple[str | tuple[int, ...], ...]:
    """Text, token ids, or a list of one of them: told apart by how it begins, then decoded strictly."""
    text = bytes(raw)
    if text.strip() == b"null":
        raise RequestError("prompt is missing: give text, token ids, or a list of either", "prompt", "missing")
    if _LISTS.match(text):
        return tuple(tuple(ids) for ids in token_id_lists(raw, "prompt"))
    if _IDS.match(text):
        return (tuple(token_ids(raw, "prompt")),)
    prompts = decode(raw, str | list[str], "prompt")
    if prompts == []:
        raise RequestError("prompt is an empty list; give text, token ids, or a list of either", "prompt")
    return (prompts,) if isinstance(prompts, str) else tuple(prompts)


# Chat ---------------------------------------------------------------------------------------------------------


def _chat_length(body: ChatBody) -> int | None:
    if body.max_tokens is None or body.max_completion_tokens is None:
        return body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if body.max_tokens != body.max_completion_tokens:
        raise RequestError(
            f"max_completion_tokens is {body.max_completion_tokens} and max_tokens, its older name, is "
            f"{body.max_tokens}; give one of them",
            "max_completion_tokens",
        )
    return body.max_tokens


def _chat_logprobs(body: ChatBody) -> int | None:
    count = body.top_logprobs or 0
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise RequestError(
            f"top_logprobs is {count}; it must be at least 0 and at most {MAX_TOP_LOGPROBS}", "top_logprobs"
        )
    if count and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    return count if body.logprobs else None


def _check_format(body: ChatBody) -> None:
    """What this version does not do: constrained output and tool calls."""
    if body.response_format is not None and body.response_format.type != "text":
        raise RequestError(
            f"response_format of the type {body.response_format.type!r} is not supported yet; only text is",
            "response_format",
            "unsupported_parameter",
        )
    _check_count(body.tools, MAX_TOOLS, "tools")
    for i, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            raise RequestError(f"tools[{i}].type is {tool.type!r}; only function is known", f"tools[{i}].type")
        if not tool.function.name:
            raise RequestError(f"tools[{i}].function.name is empty", f"tools[{i}].function.name")
    if body.tool_choice == "none" or (not body.tools and body.tool_choice in (None, "auto")):
        return
    if body.tools:
        raise RequestError(
            'tools are not supported yet; with tool_choice: "none" they are left out', "tools", "unsupported_parameter"
        )
    raise RequestError(
        f"tool_choice is {_shown(body.tool_choice)}, but there are no tools", "tool_choice", "unsupported_parameter"
    )


def _shown(choice: str | AnyObject | None) -> str:
    return repr(choice[:64]) if isinstance(choice, str) else "an object"


def _check_count(entries: Sequence[object] | None, limit: int, at: str) -> None:
    if entries is not None and len(entries) > limit:
        raise RequestError(f"{at} has {len(entries):,} entries; at most {limit:,} are allowed", at)


def _messages(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """The messages as templates expect them. All arguments are bounded together: each may be a tree of any kind."""
    calls = [call for message in messages for call in message.tool_calls or ()]
    size = sum(len(bytes(call.function.arguments)) for call in calls)
    if size > MAX_OBJECT_BYTES:
        raise RequestError(
            f"the arguments of all tool_calls have {size:,} bytes; at most {MAX_OBJECT_BYTES:,} are allowed", "messages"
        )
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: Message, at: str) -> dict[str, Any]:
    """A message as templates expect it: content always text."""
    if message.role not in ROLES:
        raise RequestError(
            f"{at}.role is {message.role[:64]!r}; it must be one of {', '.join(ROLES)}", f"{at}.role", "invalid_value"
        )
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise RequestError(
            f"{at}.content is missing; only an assistant's message with tool_calls may have none", f"{at}.content"
        )
    fields: dict[str, Any] = {"role": message.role, "content": _text(message.content, at)}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        _check_count(message.tool_calls, MAX_TOOL_CALLS, f"{at}.tool_calls")
        fields["tool_calls"] = [
            _tool_call(call, f"{at}.tool_calls[{i}].function.arguments") for i, call in enumerate(message.tool_calls)
        ]
    return fields


def _text(content: str | list[Part] | None, at: str) -> str:
    if content is None:
        return ""  # templates put content and text together, which None would break
    if isinstance(content, str):
        return content
    _check_count(content, MAX_PARTS, f"{at}.content")
    return joined_parts([{"type": part.type, "text": part.text} for part in content], f"{at}.content")


def _tool_call(call: ToolCall, at: str) -> dict[str, Any]:
    """A call of the history. Templates expect the arguments as an object; clients send them as JSON text."""
    raw = call.function.arguments
    arguments: dict[str, Any] | str
    if bytes(raw).lstrip().startswith(b'"'):
        arguments = text = str(decode(raw, str, at))
        with contextlib.suppress(RequestError):  # a model may have written no JSON: the template shows it as it is
            arguments = json_object(msgspec.Raw(text.encode()), at)
    else:
        arguments = json_object(raw, at)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type or "function", "function": function}
