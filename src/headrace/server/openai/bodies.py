"""Bodies as they are typed on the wire, and their strict decoding.

Owns JSON to typed values, and messages that name the field when that fails: "5" is not 5, 5.0 is not 5, true is not 1,
NaN and infinity are not JSON. `null` means that a field was left out. Ranges and meaning are requests.py's.

The decoder keeps the interpreter's lock, so nothing here makes millions of objects: what a body may hold is bounded
before it is decoded, and what is not used is skipped rather than made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from headrace.server.limits import MAX_BODY_STRINGS, MAX_OBJECT_BYTES, MAX_TOKEN_IDS
from headrace.server.openai.fields import Field, Table, Use
from headrace.types import RequestError

T = TypeVar("T", bound=msgspec.Struct)

Fields = dict[str, msgspec.Raw]

ABSENT = msgspec.Raw(b"null")


class AnyObject(msgspec.Struct, frozen=True):
    """An object of whatever fields, which are skipped."""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


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
    priority: int | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    prompt: msgspec.Raw = ABSENT
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None


class ToolFunction(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: AnyObject | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    type: str
    function: ToolFunction


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: msgspec.Raw = ABSENT  # an object, or its JSON in a string


class ToolCall(msgspec.Struct, frozen=True):
    function: CalledFunction
    id: str | None = None
    type: str | None = None


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
    tool_choice: str | AnyObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: msgspec.Raw = ABSENT


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
    chat_template_kwargs: msgspec.Raw = ABSENT


class DetokenizeBody(msgspec.Struct, frozen=True):
    tokens: msgspec.Raw
    model: str | None = None


class TemplateBody(msgspec.Struct, frozen=True):
    messages: list[Message] | None = None
    model: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: msgspec.Raw = ABSENT


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


def decode_body(body: bytes, kind: type[T], table: Table) -> tuple[T, Unheeded]:
    """A body as a `kind`, and what of it has no effect; RequestError for a field that is refused."""
    # The opening quote of a string never stands behind a backslash: so many strings there are at least, half at most.
    if body.count(b'"') - body.count(b'\\"') > 2 * MAX_BODY_STRINGS:
        message = f"the body has more than {MAX_BODY_STRINGS:,} names and strings"
        raise RequestError(message, None, "too_many_strings")
    typed: T = decode(body, kind)
    walk = _Walk()
    walk.check(body, table, "")
    return typed, Unheeded(tuple(walk.unknown), tuple(walk.hints))


@dataclass(frozen=True, slots=True)
class _Walk:
    """A walk over the fields of a body, objects inside it included."""

    unknown: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def check(self, raw: bytes | msgspec.Raw, table: Table, at: str) -> None:
        """Check every field of the object at `at`; RequestError for one that is refused."""
        for name, value in decode(raw, Fields, at).items():
            path = f"{at}.{name}" if at else name
            if bytes(value).strip() == b"null":
                continue
            if (known := table.get(name)) is None:
                self.unknown.append(path)
            elif known.use is Use.REFUSED:
                raise RequestError(f"{path} is not supported: {known.reason}", path, "unsupported_parameter")
            elif known.use is not Use.APPLIED:
                _check_accepted(known, value, path)
                if known.use is Use.HINT:
                    self.hints.append(path)
            elif known.inside is not None:
                self._check_inside(value, known.inside, path)

    def _check_inside(self, value: msgspec.Raw, table: Table, path: str) -> None:
        """An object, or a list with objects in it; whether it may be something else is its type's to say."""
        match bytes(value).lstrip()[:1]:
            case b"{":
                self.check(value, table, path)
            case b"[":
                for i, item in enumerate(decode(value, list[msgspec.Raw], path)):
                    if bytes(item).lstrip()[:1] == b"{":
                        self.check(item, table, f"{path}[{i}]")


_DECODED: Mapping[type, Any] = {str: str, bool: bool, int: int, dict: AnyObject}


def _check_accepted(known: Field, value: msgspec.Raw, path: str) -> None:
    if known.kind is not None:
        decode(value, _DECODED[known.kind], path)
    elif known.values and not known.takes(_small(value, Any, path)):
        raise RequestError(f"{path}: only {known.allowed} is supported", path, "unsupported_value")


def token_ids(raw: msgspec.Raw, at: str) -> list[int]:
    """A list of token ids, whatever they are; RequestError if it is something else or too long."""
    _check_count(raw, at)
    ids: list[int] = decode(raw, list[int], at)
    return ids


def token_id_lists(raw: msgspec.Raw, at: str) -> list[list[int]]:
    """A list of lists of token ids."""
    _check_count(raw, at)
    lists: list[list[int]] = decode(raw, list[list[int]], at)
    return lists


def _check_count(raw: msgspec.Raw, at: str) -> None:
    if bytes(raw).count(b",") >= MAX_TOKEN_IDS:  # in a list of numbers a comma stands between two of them
        raise RequestError(f"{at} has more than {MAX_TOKEN_IDS:,} token ids", at)


def json_object(raw: msgspec.Raw, at: str) -> dict[str, Any]:
    """An object of whatever fields; empty where it was left out."""
    found: dict[str, Any] | None = _small(raw, dict[str, Any] | None, at)
    return {} if found is None else found


def _small(raw: msgspec.Raw, kind: Any, at: str) -> Any:
    """A value whose parts are all made, whatever they are."""
    if len(bytes(raw)) > MAX_OBJECT_BYTES:
        raise RequestError(f"{at} has more than {MAX_OBJECT_BYTES:,} bytes", at)
    return decode(raw, kind, at)


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
