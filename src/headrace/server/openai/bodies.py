"""Bodies as they are typed on the wire, and their strict decoding.

Owns JSON to typed values, and messages that name the field when that fails: "5" is not 5, 5.0 is not 5, true is not 1,
NaN and infinity are not JSON. `null` means that a field was left out. Ranges and meaning are requests.py's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.server.openai.fields import Field, Use
from headrace.types import RequestError

Fields = dict[str, msgspec.Raw]

ABSENT = msgspec.Raw(b"null")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: only false
    continuous_usage_stats: bool | None = None  # vLLM's usage in every chunk: only false


class TypeOnly(msgspec.Struct, frozen=True):
    """An object that says by `type` what it is."""

    type: str


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """What /v1/completions and /v1/chat/completions share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    prompt: msgspec.Raw = ABSENT
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None


class ToolFunction(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    type: str
    function: ToolFunction


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True):
    function: CalledFunction
    id: str | None = None
    type: str | None = None
    index: int | None = None


class Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    messages: list[Message] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: TypeOnly | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(msgspec.Struct, frozen=True):
    """llama.cpp's form (`content`) and vLLM's (`prompt`, or `messages` through the template) in one."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special: bool | None = None  # llama.cpp's: false by default
    add_special_tokens: bool | None = None  # vLLM's: true by default
    parse_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True):
    tokens: list[int]
    model: str | None = None


class TemplateBody(msgspec.Struct, frozen=True):
    messages: list[Message] | None = None
    model: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def decode(body: bytes | msgspec.Raw, kind: Any, at: str = "") -> Any:
    """JSON as a `kind`; RequestError that names the field, below the field `at`, otherwise."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error), at) from None
    except msgspec.DecodeError as error:
        raise _not_json(str(error), bytes(body)) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", at or None, "nested_too_deeply") from None


@dataclass(frozen=True, slots=True)
class Unheeded:
    """Fields that were given and have no effect, to be reported."""

    unknown: tuple[str, ...] = ()  # no API defines them
    hints: tuple[str, ...] = ()


def read_fields(body: bytes, table: Mapping[str, Field]) -> Unheeded:
    """Check every top-level field against the table; RequestError for one that is refused."""
    unknown, hints = [], []
    for name, raw in decode(body, Fields).items():
        field = table.get(name)
        if (field is not None and field.use is Use.APPLIED) or bytes(raw).strip() == b"null":
            continue
        if field is None:
            unknown.append(name)
        elif field.use is Use.REFUSED:
            raise RequestError(f"{name} is not supported: {field.reason}", name, "unsupported_parameter")
        elif not field.takes(decode(raw, Any, name)):
            raise RequestError(f"{name}: only {field.allowed} is supported", name, "unsupported_value")
        elif field.use is Use.HINT:
            hints.append(name)
    return Unheeded(tuple(unknown), tuple(hints))


class _MessageFields(msgspec.Struct, frozen=True):
    messages: list[Fields] | None = None


def unknown_in_messages(body: bytes) -> tuple[str, ...]:
    """The fields of messages that no API defines, as paths."""
    known = {*Message.__struct_fields__, "refusal", "function_call", "audio", "annotations", "reasoning_content"}
    rows = decode(body, _MessageFields).messages or []
    return tuple(f"messages[{i}].{name}" for i, row in enumerate(rows) for name in row if name not in known)


# msgspec says: "Expected `int | null`, got `str` - at `$.messages[0].content`", or "... - at `key` in `$.logit_bias`".
_COMPLAINT = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_EXPECTED = re.compile(r"Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`")
_WORDS: Mapping[str, str] = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "object": "an object",
    "array": "an array",
    "null": "null",
}


def _wrong_type(complaint: str, at: str) -> RequestError:
    match = _COMPLAINT.fullmatch(complaint)
    path = at + ((match["path"] or "") if match else "")
    path = path.removeprefix(".")
    what = match["what"] if match else complaint
    if found := _EXPECTED.fullmatch(what):
        expected = " or ".join(_WORDS.get(word, word) for word in found["expected"].split(" | ") if word != "null")
        what = f"expected {expected}, got {_WORDS.get(found['got'], found['got'])}"
    if match and match["key"]:
        what += " as a key"
    return RequestError(f"{path or 'the body'}: {_lower_first(what)}", path or None, "invalid_type")


def _not_json(complaint: str, body: bytes) -> RequestError:
    reason = "it is empty" if not body.strip() else _lower_first(complaint)
    if rb"\ud" in body.lower():
        reason += "; a \\ud… escape without its other half is no character"
    return RequestError(f"the body is not valid JSON: {reason}", None, "invalid_json")


def _lower_first(text: str) -> str:
    return text if text[:4] == "JSON" else text[:1].lower() + text[1:]
