"""How fast does the engine prefill and decode without HTTP, and how near is that to the memory's read bandwidth?

python -m bench.offline [--model NAME] [--batch 1 4 16] [--prompt-tokens 512] [--output-tokens 64] [--repeats 5]

Greedy, random token ids as prompts, no two alike, end tokens ignored. Medians; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from headrace import LLM, EngineConfig, SamplingParams


@dataclass(frozen=True, slots=True)
class Pass:
    prefill_tokens_per_s: float
    decode_tokens_per_s: float  # all sequences together
    decode_step_ms: float


def read_bandwidth(num_threads: int, num_bytes: int = 1 << 29) -> float:
    """Bytes per second that `num_threads` read from memory, best of 5: the roof of decoding."""
    parts = np.array_split(np.ones(num_bytes // 8, np.int64), num_threads)
    times = []
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(5):
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            times.append(time.perf_counter() - began)
    return num_bytes / min(times)


def run_pass(llm: LLM, batch: int, prompt_tokens: int, output_tokens: int, seed: int) -> Pass:
    """One batch from empty to done, seen step by step: steps that end a prompt are prefill's, the rest decode's."""
    rng, vocab = random.Random(f"{batch} {seed}"), llm.loaded.files.spec.vocab_size  # nothing of it is cached
    prompts = [[rng.randrange(vocab) for _ in range(prompt_tokens)] for _ in range(batch)]
    began = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    first = time.perf_counter() - began
    began = time.perf_counter()
    # The prompts are in the prefix cache now but for their last block: decode and one short chunk each are left.
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    short = time.perf_counter() - began
    began = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=output_tokens + 1, ignore_eos=True))
    decode = time.perf_counter() - began - short
    return Pass(batch * prompt_tokens / first, batch * output_tokens / decode, decode / output_tokens * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa")
    options = parser.parse_args()
    num_threads = options.threads or len(os.sched_getaffinity(0))
    roof = read_bandwidth(num_threads)
    rows = []
    with LLM(options.model, EngineConfig(threads=options.threads, isa=options.isa)) as llm:
        weights = llm.loaded.ledger.weights
        print(f"{llm.loaded.files.name} on {llm.loaded.device}; read bandwidth {roof / 1e9:.1f} GB/s")
        print(" batch  prefill tok/s  decode tok/s  step ms  weights GB/s  of roof")
        for batch in options.batch:
            passes = [
                run_pass(llm, batch, options.prompt_tokens, options.output_tokens, repeat)
                for repeat in range(options.repeats)
            ]
            prefill = statistics.median(p.prefill_tokens_per_s for p in passes)
            decode = statistics.median(p.decode_tokens_per_s for p in passes)
            step_ms = statistics.median(p.decode_step_ms for p in passes)
            speed = weights / step_ms * 1e3
            print(
                f"{batch:>5} {prefill:>14.0f} {decode:>13.1f} {step_ms:>8.2f} {speed / 1e9:>13.1f} {speed / roof:>8.0%}"
            )
            rows.append(
                {
                    "batch": batch,
                    "prefill_tokens_per_s": round(prefill, 1),
                    "decode_tokens_per_s": round(decode, 1),
                    "decode_step_ms": round(step_ms, 3),
                    "weight_bytes_per_s": round(speed),
                    "roof_share": round(speed / roof, 3),
                }
            )
    shape = {"prompt_tokens": options.prompt_tokens, "output_tokens": options.output_tokens}
    print(json.dumps({"read_bandwidth": round(roof), "device": llm.loaded.device, **shape, "rows": rows}))


if __name__ == "__main__":
    main()
