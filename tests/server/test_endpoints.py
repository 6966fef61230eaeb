"""Completions and chats over real HTTP: what comes back for what was asked, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from echoing import MODEL, VOCAB_SIZE, Running, running, tiny_tokenizer

from headrace.server.serving import UnknownFields
from headrace.text.chat import ChatTemplate
from headrace.types import SamplingParams

PROMPT = "Hello the world and the rest of it, in one line. "


def streamed(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that ended as it should."""
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)


def logprobs_of(events: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The logprobs of a stream's chunks, put together."""
    joined: dict[str, list[Any]] = {}
    for event in events:
        for choice in event["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                joined.setdefault(name, []).extend(values or [])
    return joined


CASES: list[dict[str, Any]] = [
    {"prompt": PROMPT, "max_tokens": 40, "temperature": 0},
    {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop": ["ne l", "xyz"]},
    {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop": "ne l", "include_stop_str_in_output": True},
    {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop": "H", "logprobs": 3},
    {"prompt": PROMPT, "max_tokens": 9, "temperature": 0, "logprobs": 2},
    {"prompt": PROMPT, "max_tokens": 9, "temperature": 0, "logprobs": 2, "echo": True},
    {"prompt": PROMPT, "max_tokens": 9, "temperature": 0, "echo": True, "stop": "world"},
    {"prompt": PROMPT, "max_tokens": 0, "logprobs": 1, "echo": True},
    {"prompt": PROMPT, "max_tokens": 0},
    {"prompt": "日本語と👩‍🚀 emoji", "max_tokens": 33, "temperature": 0},
    {"prompt": "日本語と👩‍🚀 emoji", "max_tokens": 34, "temperature": 0, "logprobs": 0},
    {"prompt": PROMPT, "max_tokens": 20, "temperature": 1, "seed": 7, "n": 3},
    {"prompt": [PROMPT, "Two"], "max_tokens": 20, "temperature": 1, "seed": 7, "n": 2, "echo": True},
    {"prompt": "a<|im_end|>b", "max_tokens": 20, "temperature": 0, "logprobs": 1},
    {"prompt": "a<|im_end|>b", "max_tokens": 20, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False},
    {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "stop_token_ids": [70]},
]


@pytest.mark.parametrize("fields", CASES, ids=range(len(CASES)))
def test_a_stream_folds_to_the_answer_that_is_not_streamed(server: Running, fields: dict[str, Any]) -> None:
    whole = server.completion(**fields).json()
    events = streamed(server.completion(**fields, stream=True, stream_options={"include_usage": True}))
    for choice in whole["choices"]:
        index = choice["index"]
        assert text_of(events, index) == choice["text"]
        ends = [c for e in events for c in e["choices"] if c["index"] == index and c["finish_reason"] is not None]
        assert [(e["finish_reason"], e["stop_reason"]) for e in ends] == [
            (choice["finish_reason"], choice["stop_reason"])
        ]
    if len(whole["choices"]) == 1:
        assert logprobs_of(events) == (whole["choices"][0]["logprobs"] or {})
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert all(events[-1]["usage"][name] == whole["usage"][name] for name in names)
    assert events[-1]["choices"] == [] and not any(event.get("usage") for event in events[:-1])
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert "\ufffd" not in text_of(events)[:-1]


@pytest.mark.parametrize("fields", [{"logprobs": True, "top_logprobs": 2}, {"n": 2, "temperature": 1, "seed": 3}, {}])
def test_a_chat_stream_folds_to_the_chat_that_is_not_streamed(server: Running, fields: dict[str, Any]) -> None:
    asked = {"max_tokens": 30, "temperature": 0, **fields}
    whole = server.chat("Count to three", **asked).json()
    events = streamed(server.chat("Count to three", **asked, stream=True))
    for choice in whole["choices"]:
        assert choice["message"]["role"] == "assistant"
        assert text_of(events, choice["index"]) == choice["message"]["content"]
    if "logprobs" in fields:
        assert logprobs_of(events)["content"] == whole["choices"][0]["logprobs"]["content"]


def test_a_chat_stream_begins_with_the_role_and_ends_with_an_empty_delta(server: Running) -> None:
    events = streamed(server.chat("Count", max_tokens=4, temperature=0, stream=True))
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] == "length"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert all(event["object"] == "chat.completion.chunk" for event in events)


# Length and stops ---------------------------------------------------------------------------------------------


def test_a_stop_string_cuts_the_text_and_the_usage(server: Running) -> None:
    free = server.completion(prompt=PROMPT, max_tokens=30, temperature=0, logprobs=0).json()["choices"][0]
    cut = server.completion(prompt=PROMPT, max_tokens=30, temperature=0, stop="rld").json()
    assert cut["choices"][0]["text"] == free["text"].partition("rld")[0]
    assert (cut["choices"][0]["finish_reason"], cut["choices"][0]["stop_reason"]) == ("stop", "rld")
    num_tokens, text = 0, ""
    while "rld" not in text:
        text += free["logprobs"]["tokens"][num_tokens]
        num_tokens += 1
    assert cut["usage"]["completion_tokens"] == num_tokens


def test_an_end_token_ends_the_answer_and_is_not_shown(server: Running) -> None:
    answer = server.completion(prompt="ab<|im_end|>", max_tokens=9, temperature=0).json()
    assert answer["choices"][0]["text"] == "ab" and answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] is None and answer["usage"]["completion_tokens"] == 3


def test_a_stop_token_of_the_request_is_the_stop_reason(server: Running) -> None:
    ids = server.client.post("/tokenize", json={"content": "abc"}).json()["tokens"]
    answer = server.completion(prompt=ids, max_tokens=9, temperature=0, stop_token_ids=[ids[2]]).json()
    assert answer["choices"][0]["text"] == "ab" and answer["choices"][0]["stop_reason"] == ids[2]


def test_completions_have_16_tokens_by_default_and_chats_the_room_that_is_left(server: Running) -> None:
    assert server.completion(prompt=PROMPT, temperature=0).json()["usage"]["completion_tokens"] == 16
    usage = server.chat("Hi", temperature=0, ignore_eos=True).json()["usage"]
    assert usage["total_tokens"] == server.serving.max_len


def test_what_does_not_fit_is_refused_with_the_numbers(server: Running) -> None:
    for response in (
        server.completion(prompt=[5] * 500, max_tokens=13),
        server.completion(prompt=[5] * 512, max_tokens=1),
        server.completion(prompt=[5] * 600),
        server.chat("xyz" * 400),
    ):
        error = response.json()["error"]
        assert response.status_code == 400 and error["code"] == "context_length_exceeded"
        assert "512" in error["message"] and "--max-len" in error["message"]
    assert server.completion(prompt=[5] * 500, max_tokens=12, temperature=0).json()["usage"]["total_tokens"] == 512
    assert "there is room for 12" in server.completion(prompt=[5] * 500, max_tokens=13).text


def test_megabytes_of_prompt_are_refused_quickly(server: Running) -> None:
    for response in (server.completion(prompt="alpha beta " * 500_000), server.chat("alpha beta " * 500_000)):
        assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
        assert response.elapsed.total_seconds() < 1


def test_an_empty_prompt_is_refused(server: Running) -> None:
    for prompt in ("", [""]):
        assert server.completion(prompt=prompt, max_tokens=2).status_code == 400


def test_a_vocabulary_has_borders(server: Running) -> None:
    for fields in (
        {"prompt": [5, VOCAB_SIZE]},
        {"prompt": [5, -1]},
        {"prompt": [5279552648203111001]},
        {"prompt": "x", "stop_token_ids": [99999999]},
        {"prompt": "x", "stop_token_ids": [-7]},
        {"prompt": "x", "logit_bias": {str(VOCAB_SIZE): 1}},
    ):
        response = server.completion(**fields)
        assert response.status_code == 400 and f"{VOCAB_SIZE - 1}" in response.json()["error"]["message"]


# Several answers ----------------------------------------------------------------------------------------------


def test_prompts_are_answered_in_order_each_as_if_alone(server: Running) -> None:
    prompts = ["one two", "three four", "five six"]
    both = server.completion(prompt=prompts, max_tokens=6, temperature=1, seed=5).json()
    alone = [server.completion(prompt=prompt, max_tokens=6, temperature=1, seed=5).json() for prompt in prompts]
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2]
    assert [c["text"] for c in both["choices"]] == [answer["choices"][0]["text"] for answer in alone]
    for name in ("prompt_tokens", "completion_tokens"):
        assert both["usage"][name] == sum(answer["usage"][name] for answer in alone)


def test_choices_differ_and_repeat_with_one_seed(server: Running) -> None:
    first, second = (server.completion(prompt=PROMPT, n=3, max_tokens=8, seed=9).json() for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) > 1 and texts == [choice["text"] for choice in second["choices"]]
    assert first["usage"]["completion_tokens"] == 24
    assert first["usage"]["prompt_tokens"] == len(tiny_tokenizer().encode(PROMPT))


def test_without_a_seed_answers_differ(server: Running) -> None:
    texts = {server.completion(prompt=PROMPT, max_tokens=12).json()["choices"][0]["text"] for _ in range(8)}
    assert len(texts) > 1


def test_greedy_choices_are_alike(server: Running) -> None:
    choices = server.completion(prompt=PROMPT, n=3, max_tokens=8, temperature=0).json()["choices"]
    assert len({choice["text"] for choice in choices}) == 1


# Logprobs -----------------------------------------------------------------------------------------------------


def test_completion_logprobs_join_to_the_text_with_right_offsets(server: Running) -> None:
    for fields in ({}, {"echo": True}, {"stop": "orld an"}, {"echo": True, "max_tokens": 0}):
        asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 3, **fields}
        choice = server.completion(**asked).json()["choices"][0]
        found = choice["logprobs"]
        assert "".join(found["tokens"]) == choice["text"]
        ends = [offset + len(token) for offset, token in zip(found["text_offset"], found["tokens"], strict=True)]
        assert found["text_offset"] == [0, *ends[:-1]] or not fields.get("echo")
        assert all(b == a for a, b in zip(ends, found["text_offset"][1:], strict=False))
        assert all(len(top) >= 3 for top in found["top_logprobs"][1:])
        assert (found["token_logprobs"][0] is None) == ("echo" in fields)


def test_the_scoring_call_returns_the_prompt_and_its_logprobs_alone(server: Running) -> None:
    answer = server.completion(prompt=PROMPT, max_tokens=0, echo=True, logprobs=1).json()
    choice = answer["choices"][0]
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0


def test_chat_logprobs_have_names_bytes_and_as_many_alternatives_as_asked(server: Running) -> None:
    for count in (0, 3):
        answer = server.chat("Héé", max_tokens=12, temperature=0, logprobs=True, top_logprobs=count).json()
        entries = answer["choices"][0]["logprobs"]["content"]
        assert len(entries) == answer["usage"]["completion_tokens"]
        assert all(len(entry["top_logprobs"]) == count for entry in entries)
        for entry in entries:
            assert [top["token"] for top in entry["top_logprobs"]][:1] == [entry["token"]][:count]
        shown = b"".join(bytes(entry["bytes"]) for entry in entries[1:])  # behind <|im_start|>
        assert shown.decode("utf-8", "ignore").startswith("user\nHé")


def test_a_bos_that_only_we_added_is_not_echoed() -> None:
    with running(tokenizer=tiny_tokenizer(bos_id=1)) as server:
        asked = {"max_tokens": 0, "echo": True, "logprobs": 0}
        added = server.completion(prompt="Hi", **asked).json()
        written = server.completion(prompt="<|im_start|>Hi", **asked).json()
        assert added["choices"][0]["text"] == "Hi" and added["choices"][0]["logprobs"]["tokens"] == ["", "H", "i"]
        assert written["choices"][0]["text"] == "<|im_start|>Hi"
        assert added["usage"]["prompt_tokens"] == written["usage"]["prompt_tokens"] == 3


# Usage and times ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1}, {"stop": "world"}, {"max_tokens": 1}])
def test_e2e_is_ttft_and_the_rest_of_the_tokens_times_tpot(server: Running, fields: dict[str, Any]) -> None:
    answer = server.completion(**{"prompt": PROMPT, "max_tokens": 20, "temperature": 0, **fields}).json()
    timing, n = answer["timing"], answer["usage"]["completion_tokens"] // fields.get("n", 1)
    assert 0 <= timing["queue_ms"] <= timing["ttft_ms"] <= timing["e2e_ms"]
    if n == 1:
        assert timing["tpot_ms"] is None and timing["e2e_ms"] == timing["ttft_ms"]
    else:
        assert timing["e2e_ms"] == pytest.approx(timing["ttft_ms"] + (n - 1) * timing["tpot_ms"], rel=1e-12)


def test_the_sum_of_the_requests_usage_is_what_the_metrics_say() -> None:
    with running() as server:
        totals = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
        for fields in (
            {"prompt": PROMPT * 3},
            {"prompt": PROMPT * 3, "n": 3},
            {"prompt": PROMPT * 3, "stop": "rld"},
            {"prompt": ["a", "b"]},
        ):
            usage = server.completion(**fields, max_tokens=9, temperature=0).json()["usage"]
            totals["cached_tokens"] += usage.pop("prompt_tokens_details")["cached_tokens"]
            for name in ("prompt_tokens", "completion_tokens"):
                totals[name] += usage[name]
        assert totals["cached_tokens"] > 0
        assert server.metric("headrace_prompt_tokens_total") == totals["prompt_tokens"]
        assert server.metric("headrace_generation_tokens_total") == totals["completion_tokens"]
        assert server.metric("headrace_cached_tokens_total") == totals["cached_tokens"]
        assert server.metric("vllm:prompt_tokens_total") == totals["prompt_tokens"]
        assert server.metric("headrace_answers_total") == 7
        assert server.metric("headrace_e2e_latency_seconds_count") == 7


# Fields that change nothing -----------------------------------------------------------------------------------


def test_fields_without_effect_are_named_in_a_header(server: Running) -> None:
    response = server.chat("Hi", max_tokens=2, num_ctx=4096, reasoning_effort="low")
    assert response.status_code == 200 and response.headers["x-ignored-fields"] == "num_ctx, reasoning_effort"
    assert "x-ignored-fields" not in server.chat("Hi", max_tokens=2, user="bob").headers


def test_the_header_stays_small_and_clean_whatever_the_names(server: Running) -> None:
    names = {f"x{i}" * 200: 1 for i in range(100)} | {"\r\nset-cookie: a": 1, "ü": 1}
    response = server.completion(prompt="Hi", max_tokens=1, **names)
    assert response.status_code == 200 and "set-cookie" not in response.headers
    assert len(response.headers["x-ignored-fields"]) < 6000


def test_where_the_server_is_told_so_unknown_fields_are_refused() -> None:
    with running(unknown_fields=UnknownFields.REFUSE) as server:
        response = server.chat("Hi", max_tokens=2, flurb=1)
        assert response.status_code == 400 and response.json()["error"]["param"] == "flurb"
        assert server.chat("Hi", max_tokens=2, reasoning_effort="low").status_code == 200


def test_the_text_routes_name_ignored_fields_and_refuse_them_where_told_so() -> None:
    message = {"role": "user", "content": "Hi", "flurb": 1}
    asked = {
        "/tokenize": {"content": "a", "x": 1},
        "/detokenize": {"tokens": [5], "x": 1},
        "/apply-template": {"messages": [message], "x": 1},
    }
    for mode in UnknownFields:
        with running(unknown_fields=mode) as server:
            for path, body in asked.items():
                response = server.client.post(path, json=body)
                if mode is UnknownFields.REFUSE:
                    assert response.status_code == 400 and response.json()["error"]["code"] == "unknown_parameter"
                else:
                    assert response.headers["x-ignored-fields"].endswith("x") and response.status_code == 200


def test_the_models_defaults_hold_where_a_request_says_nothing() -> None:
    with running(defaults=SamplingParams(temperature=0)) as server:
        assert server.completion(prompt="abc", max_tokens=3).json()["choices"][0]["text"] == "abc"


# Text routes --------------------------------------------------------------------------------------------------


def test_tokenize_takes_llama_cpps_and_vllms_forms(server: Running) -> None:
    ids = tiny_tokenizer().encode("Hi<|im_end|>")
    assert server.client.post("/tokenize", json={"content": "Hi<|im_end|>"}).json()["tokens"] == ids
    vllm = server.client.post("/tokenize", json={"model": MODEL, "prompt": "Hi<|im_end|>"}).json()
    assert vllm["tokens"] == ids and vllm["count"] == len(ids) and vllm["max_model_len"] == server.serving.max_len
    plain = server.client.post("/tokenize", json={"content": "<|im_end|>", "parse_special": False}).json()
    assert len(plain["tokens"]) > 5
    assert server.client.post("/tokenize", json={"content": "a", "prompt": "b"}).status_code == 400
    assert server.client.post("/tokenize", json={}).status_code == 400
    assert server.client.post("/tokenize", json={"content": ""}).json()["tokens"] == []


def test_bos_is_added_by_vllms_form_and_on_demand_by_llama_cpps() -> None:
    with running(tokenizer=tiny_tokenizer(bos_id=1)) as server:

        def first(**fields: Any) -> int:
            return int(server.client.post("/tokenize", json=fields).json()["tokens"][0])

        assert first(prompt="Hi") == first(content="Hi", add_special=True) == 1
        assert first(content="Hi") != 1 and first(prompt="Hi", add_special_tokens=False) != 1


@pytest.mark.parametrize(
    "text", ["  two", "tab\tand\n\n", "🌶️👩‍🚀", "Ünï\u00a0x", "日本語", "x  y   z    ", "<|im_end|>"]
)
def test_detokenize_gives_the_tokenized_text_back(server: Running, text: str) -> None:
    ids = server.client.post("/tokenize", json={"content": text}).json()["tokens"]
    back = server.client.post("/detokenize", json={"tokens": ids}).json()
    assert back["content"] == back["prompt"] == text
    assert server.client.post("/detokenize", json={"tokens": [VOCAB_SIZE]}).status_code == 400


def test_apply_template_shows_the_prompt(server: Running) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    prompt = server.client.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    bare = server.client.post("/apply-template", json={"messages": messages, "add_generation_prompt": False}).json()
    assert bare["prompt"] == "<|im_start|>user\nHi<|im_end|>\n"
    chat = server.client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert chat == tiny_tokenizer().encode(prompt)


def test_a_chat_equals_the_same_prompt_written_by_hand(server: Running) -> None:
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    chat = server.chat("Hi", max_tokens=5, temperature=0).json()
    written = server.completion(prompt=prompt, max_tokens=5, temperature=0).json()
    assert chat["usage"]["prompt_tokens"] == written["usage"]["prompt_tokens"]
    assert chat["choices"][0]["message"]["content"] == written["choices"][0]["text"]


def test_the_template_gets_the_variables_that_it_declares_and_no_others(server: Running) -> None:
    unused = server.chat("Hi", chat_template_kwargs={"enable_thinking": True})
    assert unused.status_code == 400 and unused.json()["error"]["param"] == "chat_template_kwargs"
    template = ChatTemplate("{{ messages[0].role }}{% if enable_thinking %} thinks{% endif %}")
    with running(chat_template=template) as thinker:
        for kwargs, prompt in (({"enable_thinking": True}, "user thinks"), ({}, "user")):
            body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": kwargs}
            assert thinker.client.post("/apply-template", json=body).json()["prompt"] == prompt


@pytest.mark.parametrize(
    ("source", "role"),
    [("{{ messages[0].role }}", "system"), ("developer {{ messages[0].role }}", "developer developer")],
)
def test_a_developer_is_the_system_where_the_template_knows_no_developer(source: str, role: str) -> None:
    with running(chat_template=ChatTemplate(source)) as server:
        body = {"messages": [{"role": "developer", "content": "Be terse."}]}
        assert server.client.post("/apply-template", json=body).json()["prompt"] == role


def test_control_strings_in_a_message_are_text(server: Running) -> None:
    def count(content: str) -> int:
        return int(server.chat(content, max_tokens=1).json()["usage"]["prompt_tokens"])

    assert count("x<|im_end|>") - count("x") > 5


def test_a_model_without_a_template_refuses_chats_and_says_what_to_do() -> None:
    with running(chat_template=None) as server:
        response = server.chat("Hi")
        assert response.status_code == 400 and "--chat-template FILE" in response.json()["error"]["message"]
        assert server.completion(prompt="Hi", max_tokens=1).status_code == 200
