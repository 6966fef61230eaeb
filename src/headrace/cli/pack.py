"""`headrace pack`: a large model's weights packed once, so that later starts only map them."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time

from headrace.cli.flags import THREADS_HELP, cache_flag, isa_flag
from headrace.engine.config import EngineConfig
from headrace.engine.load import load
from headrace.model import hub

FEWEST_TOKENS = 2  # nothing is run: little memory beside the weights


def pack_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", metavar="MODEL", help=f"{', '.join(hub.KNOWN)}, hf:org/name, a GGUF file or a directory")
    cache_flag(parser)
    add("--threads", type=int, metavar="N", help=THREADS_HELP)
    isa_flag(parser)
    add("--exact", action="store_true", help="for starts with --exact")
    parser.set_defaults(run=run_pack)


def run_pack(options: argparse.Namespace) -> int:
    config = EngineConfig(
        max_len=FEWEST_TOKENS,
        max_seqs=1,
        max_step_tokens=FEWEST_TOKENS,
        threads=options.threads,
        isa=options.isa,
        is_exact=options.exact,
        packed_dir=hub.packed_dir(options.cache_dir),
        is_packed_kept=True,
    )
    began = time.perf_counter()
    with contextlib.closing(load(hub.pull(options.name, options.cache_dir), config)) as loaded:
        print(loaded.packed)
        print(f"{loaded.ledger.weights / 1e6:,.0f} MB in {time.perf_counter() - began:.1f} s", file=sys.stderr)
        for other in loaded.packed_beside():
            print(
                f"Beside it lies {other} ({other.stat().st_size / 1e6:,.0f} MB): of a model of that name before it "
                "changed, of another instruction set or form, or of another version. Delete it if none is in use.",
                file=sys.stderr,
            )
    return 0
