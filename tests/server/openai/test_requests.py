"""Bodies of both APIs: what is applied, what is refused, and that every refusal names its field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace.server.limits import (
    MAX_BODY_BYTES,
    MAX_BODY_STRINGS,
    MAX_MESSAGES,
    MAX_OBJECT_BYTES,
    MAX_PARTS,
    MAX_SEQUENCES_PER_REQUEST,
    MAX_TOKEN_IDS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
)
from headrace.server.openai.requests import ChatRequest, CompletionRequest, chat_request, completion_request
from headrace.text.stops import MAX_STOPS
from headrace.types import MAX_LOGPROBS, RequestError, SamplingParams

USER = {"role": "user", "content": "Hi"}
PART = {"type": "text", "text": "x"}
CALLS = {"role": "assistant", "content": ""}
CALL = {"function": {"name": "f", "arguments": "{}"}}


def completion(**fields: Any) -> CompletionRequest:
    return completion_request(json.dumps({"prompt": "Hi", **fields}).encode(), SamplingParams())


def chat(*messages: Any, **fields: Any) -> ChatRequest:
    return chat_request(json.dumps({"messages": list(messages) or [USER], **fields}).encode(), SamplingParams())


def refusal(make: Any, *args: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make(*args, **fields)
    return caught.value


# JSON ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", 5.0),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("max_tokens", [2]),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", [1]),
        ("stream", "false"),
        ("stream", 1),
        ("n", "two"),
        ("n", 1.5),
        ("stop", 5),
        ("stop", [5]),
        ("stop", [None]),
        ("seed", 1.0),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5.0": 1}),
        ("logit_bias", {"5": True}),
        ("stop_token_ids", ["5"]),
        ("logprobs", True),
        ("prompt", {"a": 1}),
        ("prompt", [True, False]),
        ("prompt", [1.5, 2]),
        ("prompt", ["hello", 5, [6, 7]]),
        ("prompt", [5, "hello"]),
        ("prompt", [[5], "hello"]),
        ("prompt", 7),
        ("model", 7),
    ],
)
def test_a_wrong_type_is_refused_and_names_the_field(field: str, value: Any) -> None:
    error = refusal(completion, **{field: value})
    assert error.param is not None and error.param.startswith(field)
    assert error.code == "invalid_type"
    assert "expected" in str(error)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"prompt=hello&max_tokens=3",
        b"<xml/>",
        b'{"prompt": "hi"',
        b'{"prompt": "hi"} x',
        b"[1]",
        b"5",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "hi", "temperature": NaN}',
        b'{"prompt": "hi", "top_p": Infinity}',
        b'{"prompt": "hi", "presence_penalty": -Infinity}',
        b'{"prompt": "hi", "temperature": 1e999}',
        b'{"prompt": "hi", "unknown": NaN}',
        b'{"prompt": "hi", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "hi", "metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b'{"prompt": "bad \\ud83d end"}',
        b'{"prompt": "hi", "user": "\\udc00"}',
        b'{"\\ud83d": 1, "prompt": "hi"}',
    ],
)
def test_what_is_not_strict_json_of_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        completion_request(body, SamplingParams())


def test_a_lone_surrogate_is_explained() -> None:
    with pytest.raises(RequestError, match="without its other half"):
        completion_request(b'{"prompt": "bad \\ud83d end"}', SamplingParams())


def test_a_pair_of_surrogates_is_one_character() -> None:
    assert completion_request(b'{"prompt": "\\ud83d\\ude00"}', SamplingParams()).prompts == ("😀",)


def test_null_is_the_same_as_leaving_a_field_out() -> None:
    fields = dict.fromkeys(
        [
            "max_tokens",
            "temperature",
            "top_p",
            "n",
            "seed",
            "stop",
            "stream",
            "logprobs",
            "logit_bias",
            "echo",
            "suffix",
        ]
    )
    assert completion(**fields) == completion()
    assert chat(**dict.fromkeys(["tools", "tool_choice", "response_format", "top_logprobs", "chat_template"])) == chat()


# Sampling -----------------------------------------------------------------------------------------------------


def test_fields_left_out_take_the_models_defaults() -> None:
    defaults = SamplingParams(temperature=0.3, top_k=7, top_p=0.5)
    params = completion_request(b'{"prompt": "Hi", "top_p": 1}', defaults).generation.params
    assert (params.temperature, params.top_k, params.top_p) == (0.3, 7, 1.0)


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_of_zero_and_minus_one_are_off(top_k: int) -> None:
    assert completion(top_k=top_k).generation.params.top_k == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", -5),
        ("min_p", 2),
        ("top_p", 0),
        ("top_p", 1.5),
        ("temperature", -1),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("max_tokens", -5),
        ("min_tokens", -1),
        ("logprobs", 2_000_000_000),
        ("logprobs", -1),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {str(i): 1 for i in range(2000)}),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("n", 0),
        ("n", -1),
        ("n", 5_000_000),
        ("best_of", 3),
        ("stop", [""]),
        ("stop", ["x" * 5000]),
        ("stop", ["x"] * (MAX_STOPS + 1)),
        ("cache_salt", ""),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_a_value_out_of_range_is_refused_and_names_the_field(field: str, value: Any) -> None:
    assert refusal(completion, **{field: value}).param == field


def test_negative_seeds_are_keys_too() -> None:
    assert completion(seed=-42).generation.params.seed == 2**64 - 42
    assert completion(seed=2**63 - 1).generation.params.seed == 2**63 - 1
    assert completion(seed=0).generation.params.seed == 0
    assert completion().generation.params.seed is None


def test_prompts_times_choices_are_bounded() -> None:
    assert refusal(completion, prompt=["a"] * 3, n=MAX_SEQUENCES_PER_REQUEST // 2).param == "n"
    assert refusal(completion, prompt=["a"] * (MAX_SEQUENCES_PER_REQUEST + 1)).param == "prompt"
    assert (
        completion(prompt=["a", "b"], n=MAX_SEQUENCES_PER_REQUEST // 2).generation.n == MAX_SEQUENCES_PER_REQUEST // 2
    )


def test_best_of_equal_to_n_changes_nothing() -> None:
    assert completion(n=2, best_of=2).generation.n == 2


def test_one_stop_string_is_a_list_of_one() -> None:
    assert completion(stop="x").generation.stops.strings == ("x",)
    assert completion(stop=[]).generation.stops.strings == ()
    assert completion(stop=["b", "a", "b"]).generation.stops.strings == ("b", "a")


# Prompts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        ([-1], ((-1,),)),
        ([5279552648203111001], ((5279552648203111001,),)),
        ("[1, 2]", ("[1, 2]",)),
    ],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_either(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize("prompt", [None, []])
def test_a_prompt_is_needed(prompt: Any) -> None:
    assert refusal(completion, prompt=prompt).param == "prompt"


# Chat ---------------------------------------------------------------------------------------------------------


def test_text_parts_are_the_text_they_join_to() -> None:
    assert chat({"role": "user", "content": [{"type": "text", "text": "Hi"}]}) == chat(USER)
    parts = {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}
    assert chat(parts) == chat({"role": "user", "content": "H\ni"})  # a line each, as vLLM joins them


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hello", "messages[0]"),
        ({"content": "no role"}, "messages[0]"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 12}, "messages[0].content"),
        ({"role": 5, "content": "hi"}, "messages[0].role"),
        ({"role": "robot", "content": "hi"}, "messages[0].role"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages[0].tool_calls[0]"),
    ],
)
def test_a_message_of_the_wrong_shape_is_refused_by_its_path(message: Any, param: str) -> None:
    assert refusal(chat, message).param == param


@pytest.mark.parametrize("messages", [None, [], "hello", 5, {}])
def test_messages_must_be_a_list_with_something_in_it(messages: Any) -> None:
    body = json.dumps({"messages": messages}).encode()
    with pytest.raises(RequestError) as caught:
        chat_request(body, SamplingParams())
    assert caught.value.param == "messages"


def test_a_history_with_calls_is_rendered_with_arguments_as_objects() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    request = chat(
        USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "21"}
    )
    assert request.conversation.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}],
    }


def test_arguments_that_are_no_json_are_shown_as_they_are() -> None:
    call = {"function": {"name": "f", "arguments": "{broken"}}
    messages = chat(USER, {"role": "assistant", "content": "", "tool_calls": [call]}).conversation.messages
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == "{broken"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": "hello", "tool_choice": "none"}, "tools"),
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"parameters": {}}}], "tool_choice": "none"}, "tools[0].function"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": "text"}, "response_format"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"functions": []}, "functions"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 16384}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ],
)
def test_what_chat_does_not_do_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refusal(chat, **fields).param == param


@pytest.mark.parametrize("fields", [{"tools": [TOOL]}, {}, {"tools": []}])
def test_with_tool_choice_none_an_answer_is_text(fields: dict[str, Any]) -> None:
    assert chat(tool_choice="none", **fields) == chat()


def test_max_completion_tokens_is_the_newer_name_of_max_tokens() -> None:
    assert chat(max_completion_tokens=7).generation.params.max_tokens == 7
    assert chat(max_completion_tokens=7, max_tokens=7).generation.params.max_tokens == 7


def test_logprobs_true_alone_asks_for_no_alternatives() -> None:
    assert chat(logprobs=True).generation.params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=MAX_LOGPROBS).generation.params.logprobs == MAX_LOGPROBS
    assert chat(logprobs=False).generation.params.logprobs is None


def test_continuing_a_message_begins_no_new_one() -> None:
    assistant = {"role": "assistant", "content": "Well"}
    assert not chat(USER, assistant, continue_final_message=True).conversation.add_generation_prompt
    error = refusal(chat, USER, assistant, continue_final_message=True, add_generation_prompt=True)
    assert error.param == "continue_final_message"


# Fields that change nothing -----------------------------------------------------------------------------------


def test_fields_that_nobody_defines_are_named() -> None:
    request = chat({**USER, "name": "bob", "flurb": 1}, num_ctx=4096, extra_body={"x": 1}, reasoning_effort="low")
    assert request.generation.unheeded.unknown == ("messages[0].flurb", "num_ctx", "extra_body")
    assert request.generation.unheeded.hints == ("reasoning_effort",)


def test_fields_of_objects_inside_are_named_by_their_paths() -> None:
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "x": 1}, "index": 0, "y": 2}
    tool = {**TOOL, "z": 1}
    request = chat(
        {"role": "user", "content": [part]},
        {"role": "assistant", "content": "a", "tool_calls": [call], "reasoning_content": "so", "annotations": [{}]},
        {"role": "assistant", "content": "b", "refusal": "no", "audio": None, "function_call": None},
        tools=[tool],
        tool_choice="none",
        response_format={"type": "text", "w": 1},
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False, "v": 1},
    )
    assert request.generation.unheeded.unknown == (
        "messages[0].content[0].cache_control",
        "messages[1].tool_calls[0].function.x",
        "messages[1].tool_calls[0].y",
        "tools[0].z",
        "response_format.w",
        "stream_options.v",
    )
    assert request.generation.unheeded.hints == (
        "messages[1].reasoning_content",
        "messages[1].annotations",
        "messages[2].refusal",
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("function_call", {"name": "f", "arguments": "{}"}), ("audio", {"id": "a"}), ("refusal", 5)],
)
def test_fields_of_messages_that_would_change_the_prompt_are_refused_by_path(field: str, value: Any) -> None:
    assert refusal(chat, {"role": "assistant", "content": "a", field: value}).param == f"messages[0].{field}"


# Sizes --------------------------------------------------------------------------------------------------------


def test_a_body_of_too_many_strings_is_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for hostile in (
        {f"x{i}": 1 for i in range(2 * MAX_BODY_STRINGS)},
        {"logit_bias": {str(i): 1 for i in range(2 * MAX_BODY_STRINGS)}},
        {"x": ["\\"] * (2 * MAX_BODY_STRINGS)},
    ):
        assert refusal(completion, **hostile).code == "too_many_strings"
    monkeypatch.setattr("headrace.server.openai.bodies.MAX_BODY_STRINGS", 20)
    assert completion(prompt='say "yes" or "no", ' * 100).prompts == ('say "yes" or "no", ' * 100,)


def test_lists_of_numbers_and_free_objects_are_bounded_by_what_they_take() -> None:
    assert refusal(completion, prompt=[1] * (MAX_TOKEN_IDS + 1)).param == "prompt"
    assert refusal(completion, prompt=[[1]] * (MAX_TOKEN_IDS + 1)).param == "prompt"
    nested: list[Any] = [[]] * MAX_OBJECT_BYTES
    assert refusal(chat, chat_template_kwargs={"x": nested}).param == "chat_template_kwargs"
    call = {"function": {"name": "f", "arguments": {"x": nested}}}
    message = {"role": "assistant", "tool_calls": [call]}
    assert refusal(chat, message).param == "messages"
    assert refusal(chat, service_tier=nested).param == "service_tier"


@pytest.mark.parametrize(
    ("at", "limit", "fields"),
    [
        ("messages", MAX_MESSAGES, lambda count: {"messages": [USER] * count}),
        ("tools", MAX_TOOLS, lambda count: {"tools": [TOOL] * count, "tool_choice": "none"}),
        ("messages[0].content", MAX_PARTS, lambda count: {"messages": [{**USER, "content": [PART] * count}]}),
        (
            "messages[0].tool_calls",
            MAX_TOOL_CALLS,
            lambda count: {"messages": [{**CALLS, "tool_calls": [CALL] * count}]},
        ),
    ],
)
def test_lists_in_a_chat_are_bounded(at: str, limit: int, fields: Callable[[int], dict[str, Any]]) -> None:
    chat(**fields(limit))
    refused = refusal(chat, **fields(limit + 1))
    assert refused.param == at and f"{limit + 1:,}" in str(refused) and f"{limit:,}" in str(refused)


def test_the_arguments_of_all_tool_calls_are_bounded_together() -> None:
    call = {"function": {"name": "f", "arguments": {"x": [1] * 30_000}}}  # 90,000 bytes
    message = {**CALLS, "tool_calls": [call] * 6}
    chat(message)
    refused = refusal(chat, *[message] * 2)
    assert refused.param == "messages" and f"{MAX_OBJECT_BYTES:,}" in str(refused)


def test_a_body_of_300_kb_is_read() -> None:
    assert completion(metadata={"pad": "0123456789" * 30_000}).prompts == ("Hi",)
    assert MAX_BODY_BYTES > 1e6
