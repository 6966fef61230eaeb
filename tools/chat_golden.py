"""Writes tests/golden/chat.json: conversations as transformers' apply_chat_template renders and encodes them.

    python tools/chat_golden.py SmolLM2-135M-Instruct.Q4_1.gguf

The templates are the default model's own and small ones (tools/templates) that use, between them, whatever real
templates use.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import transformers  # type: ignore[import-not-found]
from oracle import SMOLLM2_SHA256, check_is_smollm2, load_tokenizer

ROOT = Path(__file__).parent.parent
TEMPLATES = ROOT / "tools" / "templates"

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a <place> & time; é 🙂",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Łódź", "days": 2}}}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [message("user", "Hello, how are you?")],
    "system and history": [
        message("system", "  You are terse.\n"),
        message("user", "1 + 1?"),
        message("assistant", "2"),
        message("user", "and + 1?\n\n"),
    ],
    "spaces around": [message("user", "  two before, newline after\n"), message("assistant", "\n So: ")],
    "an answer to continue": [message("user", "Count."), message("assistant", "one, two, \n")],
    "many languages": [message("user", "日本語 🙂 é e\u0301 العربية\t\u00a0x"), message("assistant", "</think>ok")],
    "looks like markup": [message("user", "a < b > c <b>bold</b> {{ x }} {% y %} <call> </s> [INST] | <| |> im_end")],
    "empty": [message("user", "")],
    "private use": [
        message("user", "\ue000 \uf8ff \U000f0000 \U000f0001\U0010fffd"),
        message("assistant", "\U000f0000"),
    ],
    "tool calls": [
        message("user", "Weather?"),
        message("assistant", "", tool_calls=[CALL, CALL]),
        message("tool", '{"temperature": 21.5}', name="get_weather"),
    ],
}


def template_files() -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))}


def cases(tokenizer: Any) -> list[dict[str, Any]]:
    templates = {"own": tokenizer.chat_template, **template_files()}
    rows = []
    for (template, source), (name, messages) in itertools.product(templates.items(), CONVERSATIONS.items()):
        ways: list[dict[str, Any]] = [{"add_generation_prompt": True}, {"add_generation_prompt": False}]
        if messages[-1]["role"] == "assistant" and template not in ("tools", "filters"):  # they cut content away
            ways.append({"add_generation_prompt": False, "continue_final_message": True})
        if template == "tools":
            ways.append({"add_generation_prompt": True, "tools": [TOOL]})
        if template == "filters":
            ways.append({"add_generation_prompt": False, "custom": "sét"})
        for options in ways:
            text = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
            ids = tokenizer.encode(text, add_special_tokens=False)
            rows.append({"template": template, "name": name, "options": options, "text": text, "ids": ids})
    return rows


def main() -> None:
    path = Path(sys.argv[1])
    check_is_smollm2(path)
    tokenizer = load_tokenizer(path)
    golden = {
        "source": f"transformers {transformers.__version__}, apply_chat_template",
        "sha256": SMOLLM2_SHA256,
        "templates": template_files(),
        "conversations": CONVERSATIONS,
    }
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in cases(tokenizer))
    head = json.dumps(golden, separators=(",", ":"))
    output = ROOT / "tests" / "golden" / "chat.json"
    output.write_text(f'{head[:-1]},\n"cases": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    main()
