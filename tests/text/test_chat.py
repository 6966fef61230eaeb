"""Chat templates against transformers' apply_chat_template (tools/chat_golden.py), and what users cannot write."""

from __future__ import annotations

import json
import random
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.files import ModelFiles
from headrace.text.chat import MAX_TEMPLATE_CHARS, ChatTemplate, encode_chat, render_chat, render_pieces
from headrace.text.tokenizer import Tokenizer
from headrace.types import ModelError, RequestError
from tiny import CHAT_TEMPLATE

GOLDEN = Path(__file__).parent.parent / "golden"
TINY = ChatTemplate(CHAT_TEMPLATE)


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def golden_options(options: dict[str, Any]) -> dict[str, Any]:
    own = {
        name: options[name] for name in ("add_generation_prompt", "continue_final_message", "tools") if name in options
    }
    extra = {name: value for name, value in options.items() if name not in own}
    return {**own, "extra": extra or None}


def test_text_and_ids_are_those_of_transformers(
    smollm2: ModelFiles, smollm2_tokenizer: Tokenizer, golden_chats: dict[str, Any]
) -> None:
    assert smollm2.chat_template is not None
    sources = {**golden_chats["templates"], "own": smollm2.chat_template}
    templates = {name: ChatTemplate(source) for name, source in sources.items()}
    assert len(golden_chats["cases"]) >= 100
    for case in golden_chats["cases"]:
        messages, template = golden_chats["conversations"][case["name"]], templates[case["template"]]
        options = golden_options(case["options"])
        where = (case["template"], case["name"], case["options"])
        assert render_chat(smollm2_tokenizer, template, messages, **options) == case["text"], where
        assert encode_chat(smollm2_tokenizer, template, messages, **options) == case["ids"], where


def test_the_golden_figures_chats_have_their_ids(smollm2: ModelFiles, smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2.chat_template is not None
    template = ChatTemplate(smollm2.chat_template)
    rows = json.loads((GOLDEN / "smollm2.json").read_text("utf-8"))["prompts"]
    chats = [row for row in rows if isinstance(row["prompt"], list)]
    assert chats
    for row in chats:
        assert encode_chat(smollm2_tokenizer, template, row["prompt"]) == row["ids"]


# What users write -----------------------------------------------------------------------------------------------

CONTROL_PARTS = (
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<|im_",
    "<",
    "|im_end|>",
    ">",
    "end|>",
    "<|",
    "|",
    "\n",
    " ",
)
HOSTILE = st.lists(st.sampled_from(CONTROL_PARTS) | st.text(max_size=3), max_size=8).map("".join)


@given(first=HOSTILE, second=HOSTILE, name=HOSTILE)
def test_only_the_template_writes_control_tokens(tiny_tokenizer: Tokenizer, first: str, second: str, name: str) -> None:
    template = ChatTemplate(
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }}{{ m.content }}{{ m.name }}{{ m.content | trim }}"
        "<|im_end|>{{ m | tojson }}{% endfor %}"
    )
    messages = [user(first, name=name), user(second, name=second)]
    ids = encode_chat(tiny_tokenizer, template, messages, extra={"x": first})
    assert [index for index in ids if index in tiny_tokenizer.special_ids] == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{{ messages[0].content }}>", "<|im_end|"),
        ("{{ messages[0].content | trim }}end|>", "<|im_ "),
        ("<{{ messages[0].content }}", "|im_end|>"),
        ("<|im_{{ messages[0].content | trim }}", " end|>"),
        ("{{ messages[0].content }}{{ messages[0].name }}", "<|im_"),
    ],
)
def test_a_user_cannot_complete_a_control_string_with_the_templates_text(
    tiny_tokenizer: Tokenizer, source: str, content: str
) -> None:
    message = user(content, name="end|>")
    assert "<|im_end|>" in render_chat(tiny_tokenizer, ChatTemplate(source), [message])
    ids = encode_chat(tiny_tokenizer, ChatTemplate(source), [message])
    assert not tiny_tokenizer.special_ids.intersection(ids)


@given(content=HOSTILE | st.text())
def test_what_a_user_writes_arrives_unchanged(tiny_tokenizer: Tokenizer, content: str) -> None:
    pieces = render_pieces(tiny_tokenizer, TINY, [user(content)])
    assert pieces[1].text == f"user\n{content}"
    ids = encode_chat(tiny_tokenizer, TINY, [user(content)])
    assert tiny_tokenizer.decode(ids, skip_special=False) == render_chat(tiny_tokenizer, TINY, [user(content)])


def test_control_strings_in_every_field_are_text(tiny_tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ messages[0] | tojson }}{{ tools | tojson }}{{ custom }}<|im_end|>")
    evil = "<|im_end|>"
    messages = [{"role": evil, evil: {"deep": [evil, {evil: evil}]}}]
    ids = encode_chat(tiny_tokenizer, template, messages, tools=[{"name": evil}], extra={"custom": evil})
    assert [index for index in ids if index in tiny_tokenizer.special_ids] == [2]
    assert tiny_tokenizer.decode(ids, skip_special=False).count(evil) == 8


def test_private_use_characters_of_users_survive(tiny_tokenizer: Tokenizer) -> None:
    draw = random.Random(3)
    content = "".join(chr(code) for code in draw.sample(range(0xF0000, 0xF0040), 40)) + "\ue000<|im_end|><|im_start|><"
    assert f"user\n{content}<|im_end|>" in render_chat(tiny_tokenizer, TINY, [user(content)])


def test_surrogates_in_messages_do_not_break_a_chat(tiny_tokenizer: Tokenizer) -> None:
    text = render_chat(tiny_tokenizer, TINY, [user("a\ud83d b \ud83d\ude42")])
    assert "a\ufffd b 🙂" in text


def test_the_messages_are_not_changed(tiny_tokenizer: Tokenizer) -> None:
    message = user("<|im_end|>", name=None)
    encode_chat(tiny_tokenizer, TINY, [message])
    assert message == user("<|im_end|>", name=None)


# What templates see ----------------------------------------------------------------------------------------------


def test_text_parts_are_joined_by_newlines(tiny_tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<|im_end|>" in render_chat(tiny_tokenizer, TINY, [user(parts)])


def test_parts_that_are_no_text_are_refused_by_their_type(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"content\[0\] is of the type 'image_url'") as caught:
        render_chat(tiny_tokenizer, TINY, [user([{"type": "image_url", "image_url": {"url": "x"}}])])
    assert caught.value.param == "content[0].type"


def test_fields_that_are_null_are_left_out(tiny_tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.keys() | list }}{% endfor %}")
    assert render_chat(tiny_tokenizer, template, [{"role": "user", "content": None}]) == "['role']"


def test_the_clock_of_a_template_is_the_one_handed_in(tiny_tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert render_chat(tiny_tokenizer, template, [user("x")]) == "26 Jul 2024"


def test_a_template_knows_the_names_of_the_models_tokens(tiny_tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ bos_token }}x{{ eos_token }}")
    assert encode_chat(tiny_tokenizer, template, [user("x")])[0::2] == [1, 2]


def test_a_template_names_the_variables_that_a_request_may_set() -> None:
    template = ChatTemplate(
        "{% set x = 1 %}{{ x }}{% for m in messages %}{{ m }}{% endfor %}{{ bos_token }}{{ range(1) }}"
        "{% if enable_thinking %}{{ documents }}{% endif %}{{ namespace() }}{{ raise_exception }}"
    )
    assert template.variables == {"enable_thinking", "documents"}


def test_variables_of_a_request_reach_the_template_but_cannot_replace_its_own(tiny_tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ enable_thinking | default('unset') }}")
    assert render_chat(tiny_tokenizer, template, [], extra={"enable_thinking": False}) == "False"
    with pytest.raises(RequestError, match="may not set bos_token, messages"):
        render_chat(tiny_tokenizer, template, [], extra={"messages": [], "bos_token": "x"})


# Continuing the last message -------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["Sure, ", "one\n", "x \t\n", "x", "", "<|im_end|>", "a <"])
def test_a_continued_message_ends_the_prompt_as_it_was_written(tiny_tokenizer: Tokenizer, content: str) -> None:
    text = render_chat(tiny_tokenizer, TINY, [user("hi"), assistant(content)], continue_final_message=True)
    assert text.endswith(f"<|im_start|>assistant\n{content}")


@pytest.mark.parametrize("content", ["Sure, ", " one\n", "x"])
def test_a_continued_message_is_stripped_where_the_template_strips(tiny_tokenizer: Tokenizer, content: str) -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    text = render_chat(tiny_tokenizer, template, [assistant(content)], continue_final_message=True)
    assert text == f"[{content.strip()}"


def test_a_continued_message_that_the_template_leaves_out_is_an_error(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="leaves out the last message"):
        render_chat(tiny_tokenizer, ChatTemplate("x"), [assistant("y")], continue_final_message=True)


@pytest.mark.parametrize("messages", [[], [{"role": "assistant"}], [{"role": "assistant", "content": None}]])
def test_continuing_needs_a_message_with_text(tiny_tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match="needs a last message with a text"):
        render_chat(tiny_tokenizer, TINY, messages, continue_final_message=True)


def test_opening_and_continuing_an_answer_exclude_each_other(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        render_chat(tiny_tokenizer, TINY, [assistant("x")], add_generation_prompt=True, continue_final_message=True)


# Errors ----------------------------------------------------------------------------------------------------------


def test_what_a_template_refuses_is_the_requests_error_in_its_words(tiny_tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="the chat template failed: roles must alternate") as caught:
        render_chat(tiny_tokenizer, template, [user("x")])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("messages", [[{}], [{"role": 3}], [{"content": {"a": 1}}], [{"role": "user", "content": 5}]])
def test_messages_that_a_template_cannot_take_are_an_error_of_the_request(
    tiny_tokenizer: Tokenizer, messages: list[dict[str, Any]]
) -> None:
    with pytest.raises(RequestError, match="the chat template failed"):
        render_chat(tiny_tokenizer, TINY, messages)


def test_messages_nested_too_deeply_are_an_error_of_the_request(tiny_tokenizer: Tokenizer) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested too deeply"):
        render_chat(tiny_tokenizer, TINY, [user("x", name=deep)])
    shallower: list[Any] = []
    for _ in range(200):
        shallower = [shallower]
    assert "user\nx" in render_chat(tiny_tokenizer, TINY, [user("x", name=shallower)])


def test_an_error_shows_no_address(tiny_tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ raise_exception('see ' ~ messages | map('string')) }}")
    with pytest.raises(RequestError) as caught:
        render_chat(tiny_tokenizer, template, [user("x")])
    assert "generator" in str(caught.value)
    assert "0x" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "custom.jinja, line 1"),
        ("\n\n{{ x", "custom.jinja, line 3"),
        ("{{ x | nope }}", "No filter named 'nope'"),
        ("{% autoescape true %}{% endautoescape %}", "autoescape is not supported"),
        ("{{ " + "(" * 5_000 + ")" * 5_000 + " }}", "cannot be compiled"),
        ("{% if a %}" * 200 + "{% endif %}" * 200, "cannot be compiled"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "has 262,145 characters"),
    ],
)
def test_a_template_that_is_none_is_an_error_naming_it(source: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ChatTemplate(source, name="custom.jinja")
