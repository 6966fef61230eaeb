"""Whatever the body, the answer is never a server error, and the server lives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from echoing import Running
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.server.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS

SETTINGS = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(["", "user", "none", "auto", "<|im_end|>", "echo", "text", "\x00", "🌶️"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool", "x"]) | scalars},
        optional={"content": values, "name": values, "tool_calls": values, "tool_call_id": values},
    ),
    max_size=4,
)


def bodies(names: list[str], **needed: Any) -> Any:
    fields = st.dictionaries(st.sampled_from(names) | st.text(max_size=8), values, max_size=5)
    return st.builds(lambda extra, base: {"max_tokens": 3, **base, **extra}, fields, st.fixed_dictionaries(needed))


def check(server: Running, path: str, content: bytes) -> None:
    response = server.client.post(path, content=content)
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@SETTINGS
@given(body=bodies(sorted(COMPLETION_FIELDS), prompt=values | st.just("Hello the world")))
def test_completions_survive_any_fields(server: Running, body: dict[str, Any]) -> None:
    check(server, "/v1/completions", json.dumps(body).encode("utf-8", "surrogatepass"))


@SETTINGS
@given(body=bodies(sorted(CHAT_FIELDS), messages=messages | values))
def test_chats_survive_any_fields(server: Running, body: dict[str, Any]) -> None:
    check(server, "/v1/chat/completions", json.dumps(body).encode("utf-8", "surrogatepass"))


@SETTINGS
@given(path=st.sampled_from(["/tokenize", "/detokenize", "/apply-template"]), body=values | messages)
def test_text_routes_survive_any_body(server: Running, path: str, body: Any) -> None:
    wrapped = body if isinstance(body, dict) else {"messages": body, "tokens": body}
    check(server, path, json.dumps(wrapped).encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@SETTINGS
@given(content=st.binary(max_size=60))
def test_bodies_of_any_bytes_are_400(server: Running, path: str, content: bytes) -> None:
    response = server.client.post(path, content=content)
    assert response.status_code == 400 and response.json()["error"]["message"]
