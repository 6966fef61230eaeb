"""`headrace generate` and `headrace chat`: one prompt, or a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib
import sys
import time
from collections.abc import Generator
from pathlib import Path

from headrace.cli.flags import chat_template_of, engine_config, engine_flags
from headrace.engine.llm import LLM
from headrace.text.chat import Message
from headrace.types import SamplingParams


def generate_flags(parser: argparse.ArgumentParser) -> None:
    engine_flags(parser)
    _sampling_flags(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the text to go on from; - reads it from standard input")
    parser.set_defaults(run=run_generate)


def chat_flags(parser: argparse.ArgumentParser) -> None:
    engine_flags(parser)
    _sampling_flags(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="a Jinja template, instead of the model's")
    parser.set_defaults(run=run_chat)


def _sampling_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--temperature",
        type=float,
        metavar="T",
        help="0 takes the likeliest token (what generation_config.json says, else 1)",
    )
    add("--top-p", type=float, metavar="P", help="draw from the likeliest tokens that make up this probability")
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    add("--min-p", type=float, metavar="P", help="draw from tokens at least this likely beside the likeliest")
    add("--seed", type=int, help="the same seed gives the same answer (another one each time)")
    add("--max-tokens", type=int, metavar="N", help="tokens of the answer (what the context has room for)")


def run_generate(options: argparse.Namespace) -> int:
    with LLM(options.model, engine_config(options), cache_dir=options.cache_dir) as llm:
        gc.enable()
        params = _params(options, llm.loaded.defaults)
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
        began, counts = time.perf_counter(), llm.loaded.engine.counts
        for piece in llm.stream(prompt, params):
            print(piece, end="", flush=True)
        print(flush=True)
        print(f"{counts.steps} steps in {time.perf_counter() - began:.2f} s, {llm.loaded.device}", file=sys.stderr)
    return 0


def run_chat(options: argparse.Namespace) -> int:
    template = chat_template_of(options)
    with LLM(options.model, engine_config(options), cache_dir=options.cache_dir) as llm:
        gc.enable()
        params = _params(options, llm.loaded.defaults)
        messages: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # input() edits lines where it is; not every Python has it
        print(f"{llm.loaded.files.name} on {llm.loaded.device}. Ctrl-C cuts an answer, Ctrl-D ends.", file=sys.stderr)
        while (text := _ask()) is not None:
            messages.append({"role": "user", "content": text})
            answer = say(llm.stream(llm.chat_prompt(messages, template), params))
            messages.append({"role": "assistant", "content": answer})
    return 0


def say(pieces: Generator[str, None, None]) -> str:
    """Print an answer as it comes; Ctrl-C ends the answer, not the conversation."""
    answer = ""
    with contextlib.closing(pieces), contextlib.suppress(KeyboardInterrupt):
        for piece in pieces:
            answer += piece
            print(piece, end="", flush=True)
    print()
    return answer


def _ask() -> str | None:
    """The next line that says something; None at the end."""
    try:
        while not (text := input("> ").strip()):
            continue
    except EOFError:
        return None
    return text


def _params(options: argparse.Namespace, default: SamplingParams) -> SamplingParams:
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return dataclasses.replace(default, **given)
