"""Flags that several commands share, and what is made of them.

The one reader of the environment: HEADRACE_HOME and XDG_CACHE_HOME (where models are kept), HEADRACE_API_KEY,
HEADRACE_ISA (forces an instruction set).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from headrace.engine.config import BackendKind, EngineConfig, OrderKind
from headrace.model import hub
from headrace.text.chat import ChatTemplate
from headrace.types import ModelError

THREADS_HELP = "threads that compute (all that this process may use)"


def api_key_of_environment() -> str | None:
    return os.environ.get("HEADRACE_API_KEY")


def cache_flag(parser: argparse.ArgumentParser) -> None:
    home = hub.default_cache_dir(os.environ.get("HEADRACE_HOME"), os.environ.get("XDG_CACHE_HOME"))
    parser.add_argument("--cache-dir", type=Path, default=home, help="where models are kept (also: HEADRACE_HOME)")


def model_flags(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(hub.KNOWN)
    parser.add_argument(
        "-m",
        "--model",
        default=hub.DEFAULT_MODEL,
        help=f"{known}, hf:org/name, a GGUF file or a directory ({hub.DEFAULT_MODEL})",
    )
    cache_flag(parser)


def isa_flag(parser: argparse.ArgumentParser) -> None:
    isa_help = "instruction set: avx512, avx2, neon or scalar; also HEADRACE_ISA (the best there is)"
    parser.add_argument("--isa", default=os.environ.get("HEADRACE_ISA") or None, help=isa_help)


def engine_flags(parser: argparse.ArgumentParser) -> None:
    default = EngineConfig()
    add = parser.add_argument
    model_flags(parser)
    add("--max-len", type=int, metavar="N", help="tokens of a prompt and its answer together (the model's context)")
    add("--max-seqs", type=int, default=default.max_seqs, metavar="N", help=f"answers at once ({default.max_seqs})")
    steps = default.max_step_tokens
    add("--max-step-tokens", type=int, default=steps, metavar="N", help=f"tokens computed in one step ({steps})")
    chunk_help = f"of them of prompts, while others get their answers ({default.max_chunk_tokens})"
    add("--max-chunk-tokens", type=int, default=default.max_chunk_tokens, metavar="N", help=chunk_help)
    kv_help = "what the KV cache may take at most, as 512M or 2G (half of the free memory, at most 2G)"
    add("--max-kv-bytes", type=parse_size, metavar="SIZE", help=kv_help)
    add("--threads", type=int, metavar="N", help=THREADS_HELP)
    isa_flag(parser)
    add("--exact", action="store_true", help="compute in f32 throughout: slow, to compare with other implementations")
    backends = [kind.value for kind in BackendKind]
    add("--backend", choices=backends, default=default.backend.value, help="reference is numpy: the oracle, slow (cpu)")
    orders = [kind.value for kind in OrderKind]
    order_help = "who runs first; static is the textbook baseline: a batch runs until its longest answer ends (fcfs)"
    add("--order", choices=orders, default=default.order.value, help=order_help)
    add("--no-prefix-cache", action="store_true", help="compute every prompt from its beginning")


def parse_size(text: str) -> int:
    """A number of bytes: 1500000, 512M, 2G."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    scales = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
    if unit not in scales or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 1500000, 512M or 2G")
    return int(number) * scales[unit]


def engine_config(options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        max_len=options.max_len,
        max_seqs=options.max_seqs,
        max_step_tokens=options.max_step_tokens,
        max_chunk_tokens=options.max_chunk_tokens,
        max_kv_bytes=options.max_kv_bytes,
        threads=options.threads,
        isa=options.isa,
        backend=BackendKind(options.backend),
        is_exact=options.exact,
        has_prefix_cache=not options.no_prefix_cache,
        order=OrderKind(options.order),
        packed_dir=hub.packed_dir(options.cache_dir),
    )


def chat_template_of(options: argparse.Namespace) -> ChatTemplate | None:
    """The operator's own, if there is one."""
    if options.chat_template is None:
        return None
    try:
        return ChatTemplate(options.chat_template.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"--chat-template {options.chat_template}: cannot be read: {error}") from None
