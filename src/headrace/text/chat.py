"""Chat templates: messages to a prompt in which only the template itself writes control tokens.

Owns how messages are shown to a template and how its text becomes tokens. Refuses to know HTTP, the shape that an API
allows messages to have, and how a template is kept within limits (sandbox.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypedDict, Unpack

import jinja2
import jinja2.meta

from headrace.text.controls import Marks
from headrace.text.sandbox import TemplateEnvironment
from headrace.text.tokenizer import Tokenizer
from headrace.types import ModelError, RequestError

MAX_TEMPLATE_CHARS = 256 * 2**10  # the longest template known has some 20,000

_OWN_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token"}
)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a rendered prompt."""

    text: str
    is_control: bool  # a special token that the template wrote; else text, whatever it looks like


class ChatOptions(TypedDict, total=False):
    """What a request may say about its conversation's prompt, as vLLM names it."""

    add_generation_prompt: bool  # open the assistant's answer, so that the model writes one; by default
    continue_final_message: bool  # end the prompt inside the last message instead, as transformers cuts it
    tools: Sequence[Mapping[str, Any]] | None
    extra: Mapping[str, Any] | None  # the template's own variables (`chat_template_kwargs`)


class ChatTemplate:
    """A model's template, or an operator's; never a client's. May be shared by threads."""

    def __init__(
        self, source: str, *, now: Callable[[], datetime] = datetime.now, name: str = "the chat template"
    ) -> None:
        """`now` is the clock of `strftime_now`; ModelError, naming `name`, if `source` is no template."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"{name} has {len(source):,} characters; at most {MAX_TEMPLATE_CHARS:,} are allowed")
        self._environment = TemplateEnvironment(now)
        try:
            self._template = self._environment.from_string(source)
            used = jinja2.meta.find_undeclared_variables(self._environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"{name}, line {error.lineno}: {error.message}") from error
        except Exception as error:  # nesting too deep for Jinja's or Python's compiler, and what else they may raise
            raise ModelError(f"{name} cannot be compiled: {type(error).__name__}: {error}") from error
        self.source = source
        self.variables = frozenset(used - _OWN_VARIABLES - self._environment.globals.keys())  # for `extra` to set

    def render(self, variables: Mapping[str, Any]) -> str:
        """The template's text; RequestError if it does not take the variables, or takes more than it may."""
        try:
            return self._environment.render(self._template, variables, time.thread_time)
        except Exception as error:  # a template may provoke any error; it is the request that fails
            raise RequestError(f"the chat template failed: {_ADDRESS.sub('', str(error))}", "messages") from error


def render_pieces(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message], **options: Unpack[ChatOptions]
) -> tuple[Piece, ...]:
    """The prompt that `messages` make, control tokens apart from text; RequestError if the template refuses them."""
    continues = options.get("continue_final_message", False)
    opens = options.get("add_generation_prompt", not continues)
    if opens and continues:
        raise RequestError(
            "add_generation_prompt and continue_final_message exclude each other; set one of them to false",
            "continue_final_message",
        )
    tools, extra = options.get("tools"), options.get("extra")
    if extra and (taken := _OWN_VARIABLES.intersection(extra)):
        raise RequestError(f"chat_template_kwargs may not set {', '.join(sorted(taken))}", "chat_template_kwargs")
    written = {"messages": [plain_message(message) for message in messages], "tools": tools or None, **(extra or {})}
    try:
        marks = Marks(tokenizer.controls, written, [template.source, *tokenizer.named_tokens.values()])
        shown = marks.protect(written)
    except RecursionError:
        raise RequestError("the messages or tools are nested too deeply", "messages") from None
    if continues:
        shown["messages"] = _with_end_mark(shown["messages"], marks.end)
    text = template.render({"documents": None, **shown, **tokenizer.named_tokens, "add_generation_prompt": opens})
    if continues:
        text = _cut_at_end_mark(text, marks.end)
    return tuple(
        Piece(part if is_control else marks.restore(part), is_control)
        for part, is_control in tokenizer.controls.split(text)
    )


def render_chat(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message], **options: Unpack[ChatOptions]
) -> str:
    """The prompt that `messages` make, as text."""
    return "".join(piece.text for piece in render_pieces(tokenizer, template, messages, **options))


def encode_chat(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message], **options: Unpack[ChatOptions]
) -> list[int]:
    """The prompt that `messages` make, as token ids. No BOS is added: the template writes one if there is to be one."""
    return encode_pieces(tokenizer, render_pieces(tokenizer, template, messages, **options))


def encode_pieces(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> list[int]:
    """The token ids of a rendered prompt."""
    ids: list[int] = []
    for piece in pieces:
        if piece.is_control:
            ids.append(tokenizer.control_id(piece.text))
        elif ids:
            ids += tokenizer.encode_after_control(piece.text)
        else:
            ids += tokenizer.encode(piece.text, add_special=False, parse_special=False)
    return ids


def plain_message(message: Message) -> dict[str, Any]:
    """`message` as templates expect it: no fields that are null, a content of text parts joined by newlines."""
    plain = {name: value for name, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        plain["content"] = joined_parts(content)
    return plain


def joined_parts(parts: Sequence[Any], at: str = "content") -> str:
    """The text of a content in parts, a line each, as vLLM joins them; RequestError, below `at`, if one is no text."""
    return "\n".join(_part_text(part, f"{at}[{j}]") for j, part in enumerate(parts))


def _part_text(part: Any, at: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        shown = repr(kind)[:64]
        raise RequestError(f"{at} is of the type {shown}; only text is supported", f"{at}.type")
    if not isinstance(text := part.get("text"), str):
        raise RequestError(f"{at}.text is missing", f"{at}.text")
    return text


# Continuing the last message ----------------------------------------------------------------------------------


def _with_end_mark(messages: list[dict[str, Any]], end: str) -> list[dict[str, Any]]:
    """`messages` with `end` after the last one's content, and a space: it shows whether the template strips those."""
    if not messages or not isinstance(content := messages[-1].get("content"), str):
        raise RequestError("continue_final_message needs a last message with a text to continue", "messages")
    return [*messages[:-1], {**messages[-1], "content": f"{content}{end} "}]


def _cut_at_end_mark(text: str, end: str) -> str:
    before, found, after = text.rpartition(end)
    if not found:
        raise RequestError(
            "continue_final_message is set, but the chat template leaves out the last message", "continue_final_message"
        )
    return before if after.startswith(" ") else before.rstrip()
