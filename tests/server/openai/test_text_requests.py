"""Bodies of /tokenize, /detokenize and /apply-template: every field is applied, refused or named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace.server.limits import MAX_TOKEN_IDS, MAX_TOKENIZED_CHARS
from headrace.server.openai.requests import Conversation
from headrace.server.openai.text_requests import (
    PlainText,
    detokenize_request,
    template_request,
    tokenize_request,
)
from headrace.types import RequestError

MESSAGES = [{"role": "user", "content": "Hi"}]


def plain(**fields: Any) -> PlainText:
    source = tokenize_request(json.dumps(fields).encode()).source
    assert isinstance(source, PlainText)
    return source


def refused(check: Callable[[bytes], Any], **fields: Any) -> str | None:
    with pytest.raises(RequestError) as caught:
        check(json.dumps(fields).encode())
    return caught.value.param


@pytest.mark.parametrize("name", ["add_special", "add_special_tokens"])
def test_either_name_of_the_bos_holds_for_either_form(name: str) -> None:
    assert plain(prompt="a", **{name: False}) == PlainText("a", add_special=False, parse_special=True)
    assert plain(content="a", **{name: True}) == PlainText("a", add_special=True, parse_special=True)
    assert plain(prompt="a").add_special and not plain(content="a").add_special
    assert refused(tokenize_request, content="a", add_special=True, add_special_tokens=True) == "add_special"


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "a", "with_pieces": True},
        {"prompt": "a", "return_token_strs": True},
        {"prompt": "a", "tools": [{}]},
        {"prompt": "a", "add_generation_prompt": False},
        {"content": "a", "continue_final_message": False},
        {"content": "a", "chat_template_kwargs": {}},
        {"messages": MESSAGES, "add_special": False},
        {"messages": MESSAGES, "add_special_tokens": True},
        {"messages": MESSAGES, "parse_special": True},
        {"messages": MESSAGES, "chat_template": "{{ x }}"},
    ],
)
def test_what_a_form_of_tokenize_does_not_do_is_refused_by_name(fields: dict[str, Any]) -> None:
    assert refused(tokenize_request, **fields) == list(fields)[1]


def test_false_and_null_are_taken_where_they_change_nothing() -> None:
    assert plain(content="a", with_pieces=False, return_token_strs=False, tools=[], chat_template=None).text == "a"
    request = tokenize_request(json.dumps({"messages": MESSAGES, "add_special": None}).encode())
    assert isinstance(request.source, Conversation)


@pytest.mark.parametrize(
    ("field", "value"), [("tools", [{"type": "function"}]), ("chat_template", "{{ x }}"), ("documents", [])]
)
def test_apply_template_refuses_what_its_template_would_not_show(field: str, value: Any) -> None:
    assert refused(template_request, messages=MESSAGES, **{field: value}) == field


def test_fields_that_nobody_defines_are_named_on_every_route() -> None:
    message = {**MESSAGES[0], "flurb": 1}
    assert tokenize_request(b'{"content": "a", "bogus": 1}').unheeded.unknown == ("bogus",)
    assert detokenize_request(b'{"tokens": [1], "bogus": 1}').unheeded.unknown == ("bogus",)
    asked = template_request(json.dumps({"messages": [message], "bogus": 1}).encode())
    assert asked.unheeded.unknown == ("messages[0].flurb", "bogus")


def test_texts_and_ids_are_bounded() -> None:
    assert refused(tokenize_request, content="a" * (MAX_TOKENIZED_CHARS + 1)) == "content"
    assert refused(tokenize_request, prompt="a" * (MAX_TOKENIZED_CHARS + 1)) == "prompt"
    assert refused(detokenize_request, tokens=[1] * (MAX_TOKEN_IDS + 1)) == "tokens"


@pytest.mark.parametrize("tokens", [None, "a", 5, [1.5], ["1"], [True], [[1]]])
def test_only_a_list_of_integers_is_detokenized(tokens: Any) -> None:
    assert (refused(detokenize_request, tokens=tokens) or "").startswith("tokens")
