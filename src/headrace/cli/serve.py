"""`headrace serve`: a model behind OpenAI's API."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from headrace import __version__
from headrace.cli.flags import api_key_of_environment, chat_template_of, engine_config, engine_flags
from headrace.engine.config import OrderKind
from headrace.engine.load import Loaded, load
from headrace.engine.memory import Ledger, mib
from headrace.engine.stream import AsyncEngine
from headrace.model import ModelFiles, hub
from headrace.server.admission import Admission
from headrace.server.app import build_app
from headrace.server.auth import Access
from headrace.server.serve import bind, check_reach, serve
from headrace.server.serving import Serving, UnknownFields
from headrace.text.chat import ChatTemplate
from headrace.types import RequestError

DEFAULT_PORT = 8000
SWITCH_INTERVAL_S = 0.0005  # the engine's thread gets the interpreter back soon after a step


def serve_flags(parser: argparse.ArgumentParser) -> None:
    engine_flags(parser)
    add = parser.add_argument
    add("named", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    parser.set_defaults(model=None)
    add("--host", default="127.0.0.1", help="address to listen on; one that others reach needs --api-key (127.0.0.1)")
    add("--port", type=int, default=DEFAULT_PORT, help=f"0 takes one that is free ({DEFAULT_PORT})")
    add("--served-model-name", action="append", metavar="NAME", help="what clients call the model; repeatable")
    add("--chat-template", type=Path, metavar="FILE", help="a Jinja chat template, instead of the model's")
    add("--api-key", default=api_key_of_environment(), help="clients must send it (also: HEADRACE_API_KEY)")
    add("--allowed-host", action="append", default=[], metavar="HOST", help="a Host header to accept; repeatable")
    kinds = [kind.value for kind in UnknownFields]
    add(
        "--unknown-fields",
        choices=kinds,
        default=UnknownFields.IGNORE.value,
        help="what to do with fields that no API defines (ignore)",
    )
    parser.set_defaults(run=run_serve)


def run_serve(options: argparse.Namespace) -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    began = time.perf_counter()
    api_key = checked_api_key(options.api_key)
    check_reach(options.host, api_key)
    template, config = chat_template_of(options), engine_config(options)
    with contextlib.closing(bind(options.host, options.port)) as sock:
        print(f"headrace {__version__}", flush=True)
        model = _model(options)
        path = hub.pull(model, options.cache_dir)
        fetched = time.perf_counter() - began
        loaded = load(path, config, on_ledger=_print_ledger)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        names = tuple(options.served_model_name or [served_name(model, loaded.files)])
        serving = _serving(loaded, names, template, options)
        admission = Admission()
        app = build_app(serving, Access.of(options.host, api_key, tuple(options.allowed_host)), admission)
        gc.freeze()  # what was loaded lives as long as the server: no collection need look at it
        gc.enable()

        def on_ready() -> None:
            host = f"[{options.host}]" if ":" in options.host else options.host
            url = f"http://{host}:{sock.getsockname()[1]}"
            _print_start([("fetch", fetched), *loaded.stages], time.perf_counter() - began)
            _print_ready(url, loaded, names[0], has_key=api_key is not None)

        try:
            with contextlib.closing(loaded):
                serve(app, admission, sock, on_ready)
        finally:
            gc.unfreeze()  # or the interpreter's last collection leaves it all, and the core reports leaks
    return 0


def checked_api_key(given: str | None) -> str | None:
    """The key without the space that a file or a shell left around it; RequestError for one that is nothing else."""
    if given is not None and not given.strip():
        raise RequestError("the API key is empty: give one with --api-key KEY, or unset HEADRACE_API_KEY", "api_key")
    return None if given is None else given.strip()


def _model(options: argparse.Namespace) -> str:
    """The model to serve, given in one of two ways or not at all."""
    if None not in (options.named, options.model):
        raise RequestError(f"two models are given, {options.named} and --model {options.model}; give one", "model")
    given = [name for name in (options.named, options.model) if name is not None]
    return given[0] if given else hub.DEFAULT_MODEL


def served_name(model: str, files: ModelFiles) -> str:
    """A known name as it is, a repository by its own; a path by its last part."""
    if model.startswith("hf:"):
        return model.removeprefix("hf:").partition(":")[0].partition("@")[0]
    return model if model in hub.KNOWN else files.name


def _serving(
    loaded: Loaded, names: tuple[str, ...], template: ChatTemplate | None, options: argparse.Namespace
) -> Serving:
    return Serving(
        engine=AsyncEngine(loaded.engine, loaded.lender),
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
    if loaded.packed is not None:
        print(f"weights  mapped from {loaded.packed}")
    print(
        f"limits   {limits.max_seqs} sequences of {limits.max_len:,} tokens, {limits.max_step_tokens} tokens a step, "
        f"{limits.num_blocks[0]:,} KV blocks of {limits.block_size} tokens"
    )
    print(f"serving  {url} as {name}; try:\n")
    messages = '"messages": [{"role": "user", "content": "What is gravity?"}]'
    print(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\")
    print(f'  -d \'{{"model": "{name}", {messages}, "max_tokens": 100}}\'\n', flush=True)
