"""The command line: serve, generate, chat and pull.

Owns the flags, and is the one reader of the environment: HEADRACE_HOME and XDG_CACHE_HOME (where models are
kept), HEADRACE_API_KEY, HEADRACE_ISA (forces an instruction set).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib
import logging
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from headrace import __version__
from headrace.engine.config import BackendKind, EngineConfig, OrderKind
from headrace.engine.llm import LLM
from headrace.engine.load import Loaded, load
from headrace.engine.memory import Ledger, mib
from headrace.engine.stream import AsyncEngine
from headrace.model import ModelFiles, hub
from headrace.server.admission import Admission
from headrace.server.app import build_app
from headrace.server.auth import Access
from headrace.server.serve import bind, check_reach, serve
from headrace.server.serving import Serving, UnknownFields
from headrace.text.chat import ChatTemplate, Message
from headrace.types import HeadraceError, ModelError, RequestError, SamplingParams

DEFAULT_PORT = 8000
SWITCH_INTERVAL_S = 0.0005  # the engine's thread gets the interpreter back soon after a step


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. Mistakes of the user end in one line on standard error."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except HeadraceError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads: nothing more to flush to
        return 141


# Flags ----------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headrace", description="An LLM inference server for CPUs.")
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _serve_flags(commands.add_parser("serve", help="serve a model to OpenAI clients"))
    _generate_flags(commands.add_parser("generate", help="complete one prompt"))
    _chat_flags(commands.add_parser("chat", help="talk to a model in the terminal"))
    _pull_flags(commands.add_parser("pull", help="fetch a model"))
    return parser


def _serve_flags(parser: argparse.ArgumentParser) -> None:
    _engine_flags(parser)
    add = parser.add_argument
    add("named", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    parser.set_defaults(model=None)
    add("--host", default="127.0.0.1", help="address to listen on; one that others reach needs --api-key (127.0.0.1)")
    add("--port", type=int, default=DEFAULT_PORT, help=f"0 takes one that is free ({DEFAULT_PORT})")
    add("--served-model-name", action="append", metavar="NAME", help="what clients call the model; repeatable")
    add("--chat-template", type=Path, metavar="FILE", help="a Jinja chat template, instead of the model's")
    add("--api-key", default=os.environ.get("HEADRACE_API_KEY"), help="clients must send it (also: HEADRACE_API_KEY)")
    add("--allowed-host", action="append", default=[], metavar="HOST", help="a Host header to accept; repeatable")
    kinds = [kind.value for kind in UnknownFields]
    add(
        "--unknown-fields",
        choices=kinds,
        default=UnknownFields.IGNORE.value,
        help="what to do with fields that no API defines (ignore)",
    )
    parser.set_defaults(run=run_serve)


def _generate_flags(parser: argparse.ArgumentParser) -> None:
    _engine_flags(parser)
    _sampling_flags(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the text to go on from; - reads it from standard input")
    parser.set_defaults(run=run_generate)


def _chat_flags(parser: argparse.ArgumentParser) -> None:
    _engine_flags(parser)
    _sampling_flags(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="a Jinja template, instead of the model's")
    parser.set_defaults(run=run_chat)


def _pull_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=f"{', '.join(hub.KNOWN)}, or hf:org/name[@revision][:file]")
    _cache_flag(parser)
    parser.set_defaults(run=run_pull)


def _cache_flag(parser: argparse.ArgumentParser) -> None:
    home = hub.default_cache_dir(os.environ.get("HEADRACE_HOME"), os.environ.get("XDG_CACHE_HOME"))
    parser.add_argument("--cache-dir", type=Path, default=home, help="where models are kept (also: HEADRACE_HOME)")


def _engine_flags(parser: argparse.ArgumentParser) -> None:
    default = EngineConfig()
    add = parser.add_argument
    known = ", ".join(hub.KNOWN)
    add(
        "-m",
        "--model",
        default=hub.DEFAULT_MODEL,
        help=f"{known}, hf:org/name, a GGUF file or a directory ({hub.DEFAULT_MODEL})",
    )
    _cache_flag(parser)
    add("--max-len", type=int, metavar="N", help="tokens of a prompt and its answer together (the model's context)")
    add("--max-seqs", type=int, default=default.max_seqs, metavar="N", help=f"answers at once ({default.max_seqs})")
    steps = default.max_step_tokens
    add("--max-step-tokens", type=int, default=steps, metavar="N", help=f"tokens computed in one step ({steps})")
    kv_help = "size of the KV cache, as 512M or 2G (half of the free memory, at most 2G)"
    add("--max-kv-bytes", type=_size, metavar="SIZE", help=kv_help)
    add("--threads", type=int, metavar="N", help="threads that compute (all that this process may use)")
    isa_help = "instruction set: avx512, avx2 or scalar; also HEADRACE_ISA (the best there is)"
    add("--isa", default=os.environ.get("HEADRACE_ISA") or None, help=isa_help)
    add("--exact", action="store_true", help="compute in f32 throughout: slow, to compare with other implementations")
    backends = [kind.value for kind in BackendKind]
    add("--backend", choices=backends, default=default.backend.value, help="reference is numpy: the oracle, slow (cpu)")
    orders = [kind.value for kind in OrderKind]
    order_help = "who runs first; static is the textbook baseline: a batch runs until its longest answer ends (fcfs)"
    add("--order", choices=orders, default=default.order.value, help=order_help)
    add("--no-prefix-cache", action="store_true", help="compute every prompt from its beginning")


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


def _size(text: str) -> int:
    """A number of bytes: 1500000, 512M, 2G."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    scales = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
    if unit not in scales or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 1500000, 512M or 2G")
    return int(number) * scales[unit]


def _config(options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        max_len=options.max_len,
        max_seqs=options.max_seqs,
        max_step_tokens=options.max_step_tokens,
        max_kv_bytes=options.max_kv_bytes,
        threads=options.threads,
        isa=options.isa,
        backend=BackendKind(options.backend),
        is_exact=options.exact,
        has_prefix_cache=not options.no_prefix_cache,
        order=OrderKind(options.order),
    )


def _params(options: argparse.Namespace, default: SamplingParams) -> SamplingParams:
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return dataclasses.replace(default, **given)


def _api_key(given: str | None) -> str | None:
    """The key without the space that a file or a shell left around it; RequestError for one that is nothing else."""
    if given is not None and not given.strip():
        raise RequestError("the API key is empty: give one with --api-key KEY, or unset HEADRACE_API_KEY", "api_key")
    return None if given is None else given.strip()


def _template(options: argparse.Namespace) -> ChatTemplate | None:
    """The operator's own, if there is one."""
    if options.chat_template is None:
        return None
    try:
        return ChatTemplate(options.chat_template.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"--chat-template {options.chat_template}: cannot be read: {error}") from None


# Commands -------------------------------------------------------------------------------------------------------


def run_pull(options: argparse.Namespace) -> int:
    path = hub.pull(options.name, options.cache_dir)
    known = hub.KNOWN.get(options.name)
    print(path)
    print(f"licence: {known.license}" if known else "licence: see the model's page", file=sys.stderr)
    return 0


def run_serve(options: argparse.Namespace) -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    began = time.perf_counter()
    api_key = _api_key(options.api_key)
    check_reach(options.host, api_key)
    template, config = _template(options), _config(options)
    with contextlib.closing(bind(options.host, options.port)) as sock:
        print(f"headrace {__version__}", flush=True)
        model = _model(options)
        path = hub.pull(model, options.cache_dir)
        fetched = time.perf_counter() - began
        loaded = load(path, config, on_ledger=_print_ledger)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.collect()
        gc.freeze()  # what was loaded lives as long as the server: no collection need look at it
        names = tuple(options.served_model_name or [_served_name(model, loaded.files)])
        serving = _serving(loaded, names, template, options)
        admission = Admission()
        app = build_app(serving, Access.of(options.host, api_key, tuple(options.allowed_host)), admission)

        def on_ready() -> None:
            host = f"[{options.host}]" if ":" in options.host else options.host
            url = f"http://{host}:{sock.getsockname()[1]}"
            _print_start([("fetch", fetched), *loaded.stages], time.perf_counter() - began)
            _print_ready(url, loaded, names[0], has_key=api_key is not None)

        with contextlib.closing(loaded):
            serve(app, admission, sock, on_ready)
    return 0


def _model(options: argparse.Namespace) -> str:
    """The model to serve, given in one of two ways or not at all."""
    if None not in (options.named, options.model):
        raise RequestError(f"two models are given, {options.named} and --model {options.model}; give one", "model")
    given = [name for name in (options.named, options.model) if name is not None]
    return given[0] if given else hub.DEFAULT_MODEL


def _served_name(model: str, files: ModelFiles) -> str:
    """A known name as it is, a repository by its own; a path by its last part."""
    if model.startswith("hf:"):
        return model.removeprefix("hf:").partition(":")[0].partition("@")[0]
    return model if model in hub.KNOWN else files.name


def _serving(
    loaded: Loaded, names: tuple[str, ...], template: ChatTemplate | None, options: argparse.Namespace
) -> Serving:
    return Serving(
        engine=AsyncEngine(loaded.engine),
        tokenizer=loaded.tokenizer,
        chat_template=template or loaded.chat_template,
        model_names=names,
        max_len=loaded.limits.max_len,
        num_blocks=loaded.limits.num_blocks,
        vocab_size=loaded.files.spec.vocab_size,
        end_ids=loaded.files.end_ids,
        version=__version__,
        created_s=int(time.time()),
        defaults=loaded.defaults,
        unknown_fields=UnknownFields(options.unknown_fields),
        has_priorities=options.order == OrderKind.PRIORITY.value,
    )


def _print_ledger(files: ModelFiles, ledger: Ledger) -> None:
    spec = files.spec
    print(
        f"model    {files.name}: {spec.architecture}, {files.parameters / 1e6:,.1f} M parameters, "
        f"{mib(files.weight_bytes)} on disk, licence {files.license or 'not said'}"
    )
    print("memory   " + ", ".join(f"{name} {mib(size)}" for name, size in ledger.rows()), flush=True)


def _print_start(stages: Sequence[tuple[str, float]], seconds: float) -> None:
    rest = seconds - sum(taken for _, taken in stages)
    parts = ", ".join(f"{stage} {taken:.2f}" for stage, taken in [*stages, ("server", rest)])
    print(f"start    {seconds:.2f} s: {parts}")


def _print_ready(url: str, loaded: Loaded, name: str, *, has_key: bool) -> None:
    limits = loaded.limits
    key = " -H 'Authorization: Bearer KEY'" if has_key else ""
    print(f"device   {loaded.device}")
    print(
        f"limits   {limits.max_seqs} sequences of {limits.max_len:,} tokens, {limits.max_step_tokens} tokens a step, "
        f"{limits.num_blocks[0]:,} KV blocks of {limits.block_size} tokens"
    )
    print(f"serving  {url} as {name}; try:\n")
    messages = '"messages": [{"role": "user", "content": "What is gravity?"}]'
    print(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\")
    print(f'  -d \'{{"model": "{name}", {messages}, "max_tokens": 100}}\'\n', flush=True)


def run_generate(options: argparse.Namespace) -> int:
    with LLM(options.model, _config(options), cache_dir=options.cache_dir) as llm:
        params = _params(options, llm.loaded.defaults)
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
        began, counts = time.perf_counter(), llm.loaded.engine.counts
        for piece in llm.stream(prompt, params):
            print(piece, end="", flush=True)
        print(flush=True)
        print(f"{counts.steps} steps in {time.perf_counter() - began:.2f} s, {llm.loaded.device}", file=sys.stderr)
    return 0


def run_chat(options: argparse.Namespace) -> int:
    template = _template(options)
    with LLM(options.model, _config(options), cache_dir=options.cache_dir) as llm:
        params = _params(options, llm.loaded.defaults)
        messages: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # input() edits lines where it is; not every Python has it
        print(f"{llm.loaded.files.name} on {llm.loaded.device}. Ctrl-C cuts an answer, Ctrl-D ends.", file=sys.stderr)
        while (text := _ask()) is not None:
            messages.append({"role": "user", "content": text})
            answer = _say(llm.stream(llm.chat_prompt(messages, template), params))
            messages.append({"role": "assistant", "content": answer})
    return 0


def _say(pieces: Generator[str, None, None]) -> str:
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
