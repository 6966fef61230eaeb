"""Checked requests of the text routes: llama.cpp's and vLLM's forms of asking what the tokenizer and the template do.

Owns which fields belong to which form. Knows no tokenizer and no engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.server.limits import MAX_TOKENIZED_CHARS
from headrace.server.openai.bodies import (
    ABSENT,
    DetokenizeBody,
    TemplateBody,
    TokenizeBody,
    Unheeded,
    decode_body,
    token_ids,
)
from headrace.server.openai.fields import DETOKENIZE_FIELDS, TEMPLATE_FIELDS, TOKENIZE_FIELDS
from headrace.server.openai.requests import Conversation, conversation_of
from headrace.types import RequestError

_FOR_TEXT = ("add_special", "add_special_tokens", "parse_special")
_FOR_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class PlainText:
    """A text to be tokenized as it is."""

    text: str
    add_special: bool
    parse_special: bool


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    source: PlainText | Conversation
    model: str | None
    unheeded: Unheeded


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    ids: list[int]
    model: str | None
    unheeded: Unheeded


@dataclass(frozen=True, slots=True)
class TemplateRequest:
    conversation: Conversation
    model: str | None
    unheeded: Unheeded


def tokenize_request(body: bytes) -> TokenizeRequest:
    """A body of /tokenize; RequestError names what is wrong with it."""
    typed, unheeded = decode_body(body, TokenizeBody, TOKENIZE_FIELDS)
    if sum(source is not None for source in (typed.content, typed.prompt, typed.messages)) != 1:
        raise RequestError("give one of content, prompt and messages", "prompt")
    if typed.messages is None:
        _refuse(typed, _FOR_MESSAGES, "goes with messages")
        return TokenizeRequest(_plain_text(typed), typed.model, unheeded)
    _refuse(typed, _FOR_TEXT, "goes with content or prompt; what the template writes is what a chat gets")
    return TokenizeRequest(conversation_of(typed, len(body)), typed.model, unheeded)


def detokenize_request(body: bytes) -> DetokenizeRequest:
    """A body of /detokenize."""
    typed, unheeded = decode_body(body, DetokenizeBody, DETOKENIZE_FIELDS)
    return DetokenizeRequest(token_ids(typed.tokens, "tokens"), typed.model, unheeded)


def template_request(body: bytes) -> TemplateRequest:
    """A body of /apply-template."""
    typed, unheeded = decode_body(body, TemplateBody, TEMPLATE_FIELDS)
    return TemplateRequest(conversation_of(typed, len(body)), typed.model, unheeded)


def _plain_text(body: TokenizeBody) -> PlainText:
    """llama.cpp's `content` gets no BOS by default, vLLM's `prompt` does; either may say so under either name."""
    name, text = ("content", body.content or "") if body.prompt is None else ("prompt", body.prompt)
    if len(text) > MAX_TOKENIZED_CHARS:
        raise RequestError(f"{name} has {len(text):,} characters; at most {MAX_TOKENIZED_CHARS:,} are allowed", name)
    if body.add_special is not None and body.add_special_tokens is not None:
        raise RequestError("add_special and add_special_tokens are one thing; give one of them", "add_special")
    add_special = body.add_special if body.add_special_tokens is None else body.add_special_tokens
    return PlainText(
        text=text,
        add_special=body.prompt is not None if add_special is None else add_special,
        parse_special=body.parse_special is not False,
    )


def _refuse(body: TokenizeBody, names: tuple[str, ...], why: str) -> None:
    """RequestError if one of `names` is given, which the form that was chosen has no use for."""
    for name in names:
        if getattr(body, name) not in (None, ABSENT):
            raise RequestError(f"{name} {why}", name, "unsupported_parameter")
