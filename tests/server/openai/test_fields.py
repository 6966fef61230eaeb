"""A walk over the whole table of fields: each with a right value, a wrong type, and null."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.server.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Message,
    Part,
    StreamOptions,
    TemplateBody,
    TokenizeBody,
    Tool,
    ToolCall,
)
from headrace.server.openai.fields import (
    CALL_FIELDS,
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    MESSAGE_FIELDS,
    PART_FIELDS,
    STREAM_OPTIONS_FIELDS,
    TEMPLATE_FIELDS,
    TOKENIZE_FIELDS,
    TOOL_FIELDS,
    Field,
    Table,
    Use,
)
from headrace.server.openai.requests import chat_request, completion_request
from headrace.types import RequestError, SamplingParams

# For every applied field a value that is right, and what must be sent beside it.
RIGHT: dict[str, Any] = {
    "model": "m",
    "prompt": "Hi",
    "messages": [{"role": "user", "content": "Hi"}],
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": -100},
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "min_tokens": 0,
    "n": 1,
    "best_of": 1,
    "seed": 7,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "stop_token_ids": [1],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "add_special_tokens": False,
    "cache_salt": "tenant",
    "priority": -5,
    "echo": True,
    "parse_special": False,
    "top_logprobs": 2,
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "add_generation_prompt": False,
    "continue_final_message": False,
    "chat_template_kwargs": {"x": 1},
}
BESIDE: dict[str, dict[str, Any]] = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}
WRONG: tuple[Any, ...] = ({"wrong": {}}, [{"wrong": []}], "wrong", 0.5, True)

TABLES = [("completions", COMPLETION_FIELDS), ("chat", CHAT_FIELDS)]
ROWS = [pytest.param(api, name, field, id=f"{api}-{name}") for api, table in TABLES for name, field in table.items()]


def send(api: str, fields: Mapping[str, Any]) -> None:
    if api == "chat":
        chat_request(json.dumps({"messages": RIGHT["messages"], **fields}).encode(), SamplingParams())
    else:
        completion_request(json.dumps({"prompt": "Hi", **fields}).encode(), SamplingParams())


def right_value(api: str, name: str, field: Field) -> Any:
    if name == "logprobs":
        return 2 if api == "completions" else True
    if field.use is Use.APPLIED:
        return RIGHT[name]
    return field.values[0] if field.values else {str: "x", bool: True, dict: {}}[field.kind or str]


@pytest.mark.parametrize(("api", "name", "field"), ROWS)
def test_a_right_value_is_taken_or_the_field_is_refused_by_name(api: str, name: str, field: Field) -> None:
    fields = {**BESIDE.get(name, {}), name: right_value(api, name, field)}
    if field.use is not Use.REFUSED:
        send(api, fields)
        return
    with pytest.raises(RequestError, match=name) as caught:
        send(api, fields)
    assert caught.value.param == name and field.reason in str(caught.value)


@pytest.mark.parametrize(("api", "name", "field"), ROWS)
def test_values_of_wrong_types_are_refused_naming_the_field(api: str, name: str, field: Field) -> None:
    refused = []
    for value in WRONG:
        try:
            send(api, {**BESIDE.get(name, {}), name: value})
        except RequestError as error:
            refused.append(value)
            assert error.param is not None and error.param.split(".")[0].split("[")[0] == name
    assert len(refused) >= 3  # every field takes at most two of the five


@pytest.mark.parametrize(("api", "name", "field"), ROWS)
def test_null_is_always_taken_except_where_a_value_is_needed(api: str, name: str, field: Field) -> None:
    if name in ("prompt", "messages"):
        with pytest.raises(RequestError, match=name):
            send(api, {name: None})
    else:
        send(api, {name: None})


PAIRS: list[tuple[Any, Table]] = [
    (CompletionBody, COMPLETION_FIELDS),
    (ChatBody, CHAT_FIELDS),
    (TokenizeBody, TOKENIZE_FIELDS),
    (DetokenizeBody, DETOKENIZE_FIELDS),
    (TemplateBody, TEMPLATE_FIELDS),
    (Message, MESSAGE_FIELDS),
    (Part, PART_FIELDS),
    (Tool, TOOL_FIELDS),
    (ToolCall, CALL_FIELDS),
    (StreamOptions, STREAM_OPTIONS_FIELDS),
]


@pytest.mark.parametrize(("body", "table"), PAIRS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_applied_field_is_decoded_and_every_decoded_field_is_in_the_table(
    body: Any, table: Mapping[str, Field]
) -> None:
    applied = {name for name, field in table.items() if field.use is Use.APPLIED}
    assert applied == set(body.__struct_fields__)


@pytest.mark.parametrize("table", [table for _, table in PAIRS], ids=[body.__name__ for body, _ in PAIRS])
def test_the_documentation_names_every_field(table: Table) -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text("utf-8")
    assert not [name for name in table if f"`{name}`" not in page]
