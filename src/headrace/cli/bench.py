"""`headrace bench offline`: how fast the engine is without HTTP, and how near its roofs."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType

from headrace.bench.offline import Load, Plan, Row, measure
from headrace.cli.flags import THREADS_HELP, isa_flag, model_flags
from headrace.engine.load import Loaded
from headrace.model import hub

OFFLINE_HELP = """\
Random prompts, no two alike, answered greedily by the engine itself, step by step. Several values of --batch,
--prompt-tokens and --threads make a row each; a figure is the median of the repeats, after one that does not count.
The last line is JSON.

prefill_tokens_per_s   prompt tokens per second, from the first step to the last prompt's first token
prefill_flops_per_s    the same in operations: 2 per weight of the layers and token, what only logits need for one row
                       of each prompt, and causal attention (4 per dimension of a query head and pair of tokens)
gemm_flops_per_s       the operations of the layers' matrices alone, by the time of their phases while prompts run
decode_tokens_per_s    tokens per second of all sequences together, over the steps in which all of them decode
decode_step_ms         the median of these steps
decode_bytes_per_s     bytes that these steps must read, per second: each matrix once (packed as it lies in memory; of
                       the embedding the rows alone), keys and values of all tokens attended to
decode_flops_per_s     the operations of these steps, counted as for prefill, the head for every token
read_bandwidth         bytes per second that the same threads read from memory, right before and after these steps
roof_share_decode      decode_bytes_per_s by the read_bandwidth of the same repeat; above 1 where weights stay cached
roof_share_attention   the same of attention_bytes_per_s
host_share             the part of a decode step that is spent outside the core's native call; planning the next step
                       beside the kernels is not in it, though it keeps one thread from them meanwhile
attention_bytes_per_s  bytes of keys and values by the time of the attention phases
phase_shares           the part of a decode step that each kind of phase has
verify_cost            by --verify: a step that feeds K tokens of one sequence, with logits for each, in steps of one
start_s                from opening the files to an engine that can run; the interpreter's own start is not in it
rss_bytes              memory of this process at the end of the row
"""


def bench_flags(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(required=True, metavar="BENCH")
    offline = benches.add_parser(
        "offline",
        help="the engine without HTTP",
        description=OFFLINE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = offline.add_argument
    model_flags(offline)
    add("--batch", type=int, nargs="+", default=[1], metavar="B", help="sequences at once (1)")
    add("--prompt-tokens", type=int, nargs="+", default=[512], metavar="P", help="tokens of each prompt (512)")
    add("--output-tokens", type=int, default=64, metavar="N", help="decode steps (64)")
    add("--repeats", type=int, default=5, metavar="R", help="of each row (5)")
    add("--verify", type=int, nargs="*", default=[], metavar="K", help="also check K - 1 drafts behind a token")
    add("--max-step-tokens", type=int, default=512, metavar="N", help="tokens computed in one step (512)")
    add("--threads", type=int, nargs="+", default=[], metavar="T", help=THREADS_HELP)
    isa_flag(offline)
    offline.set_defaults(run=run_offline)


def run_offline(options: argparse.Namespace) -> int:
    plan = Plan(
        model=hub.pull(options.model, options.cache_dir),
        loads=[Load(b, p, options.output_tokens) for b, p in itertools.product(options.batch, options.prompt_tokens)],
        threads=options.threads,
        verify=options.verify,
        repeats=options.repeats,
        isa=options.isa,
        max_step_tokens=options.max_step_tokens,
        packed_dir=hub.packed_dir(options.cache_dir),
    )
    rows: list[Row] = []
    device = ""

    def print_head(loaded: Loaded) -> None:
        nonlocal device
        gc.enable()
        device = loaded.device
        print(f"{loaded.files.name} on {device}")
        print("  ".join(COLUMNS), flush=True)

    for row in measure(plan, print_head):
        print("  ".join(f"{show(row):>{len(name)}}" for name, show in COLUMNS.items()), flush=True)
        rows.append(row)
    print(json.dumps(_document(options.model, device, rows)))
    return 0


COLUMNS: Mapping[str, Callable[[Row], str]] = MappingProxyType(
    {
        "batch": lambda row: f"{row.batch}",
        "prompt": lambda row: f"{row.prompt_tokens}",
        "threads": lambda row: f"{row.threads}",
        "prefill tok/s": lambda row: f"{row.prefill_tokens_per_s:,.0f}",
        " TOP/s": lambda row: f"{row.prefill_flops_per_s / 1e12:.2f}",
        "decode tok/s": lambda row: f"{row.decode_tokens_per_s:,.1f}",
        "step ms": lambda row: f"{row.decode_step_ms:.2f}",
        " GB/s": lambda row: f"{row.decode_bytes_per_s / 1e9:.1f}",
        "of roof": lambda row: f"{row.roof_share_decode:.0%}",
        "host": lambda row: f"{row.host_share:.1%}",
        "attention GB/s": lambda row: f"{row.attention_bytes_per_s / 1e9:.1f}",
        "verify": lambda row: " ".join(f"{count}:{cost:.2f}" for count, cost in row.verify_cost.items()) or "-",
    }
)


def _document(model: str, device: str, rows: list[Row]) -> dict[str, object]:
    """The figures of a single row stand at the top, those of several in a list."""
    written = [_rounded(dataclasses.asdict(row)) for row in rows]
    return {"model": model, "device": device, **(written[0] if len(written) == 1 else {"rows": written})}


def _rounded(figures: Mapping[str, object]) -> dict[str, object]:
    """To 5 digits: more say nothing, and lines that people compare should be short."""
    rounded: dict[str, object] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            value = _rounded(value)
        rounded[name] = float(f"{value:.5g}") if isinstance(value, float) else value
    return rounded
