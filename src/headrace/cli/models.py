"""`headrace pull` and `headrace synth`: models fetched, and models made of random numbers."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from headrace.cli.flags import cache_flag
from headrace.model import hub
from headrace.model.synth import SHAPES, Quant, Recipe, synthesize


def pull_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=f"{', '.join(hub.KNOWN)}, or hf:org/name[@revision][:file]")
    cache_flag(parser)
    parser.set_defaults(run=run_pull)


def synth_flags(parser: argparse.ArgumentParser) -> None:
    kinds = [kind.value for kind in Quant]
    add = parser.add_argument
    add("name", metavar="NAME", choices=list(SHAPES), help=f"whose shape: {', '.join(SHAPES)}")
    add("--quant", choices=kinds, default=Quant.Q4.value, help="Q4_0, Q8_0 or BF16 matrices (q4)")
    head_help = "the embedding and the head, where they are to differ from the other matrices"
    add("--head-quant", choices=kinds, help=head_help)
    add("--layers", type=int, metavar="N", help="only so many of the layers")
    add("--out", type=Path, metavar="PATH", help="the file to write (one of the model's name, here)")
    parser.set_defaults(run=run_synth)


def run_pull(options: argparse.Namespace) -> int:
    path = hub.pull(options.name, options.cache_dir)
    known = hub.KNOWN.get(options.name)
    print(path)
    print(f"licence: {known.license}" if known else "licence: see the model's page", file=sys.stderr)
    return 0


def run_synth(options: argparse.Namespace) -> int:
    head_quant = None if options.head_quant is None else Quant(options.head_quant)
    recipe = Recipe(options.name, Quant(options.quant), head_quant, options.layers)
    path: Path = options.out or Path(recipe.file_name)
    began = time.perf_counter()
    synthesize(recipe, path)
    print(path)
    print(f"{path.stat().st_size / 1e6:,.0f} MB in {time.perf_counter() - began:.1f} s", file=sys.stderr)
    return 0
