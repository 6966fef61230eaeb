"""Asks OpenVINO GenAI loads in process, since its wheel has no server. Runs in its own Python, with nothing of ours.

    python openvino_driver.py MODEL_FOLDER_OR_GGUF THREADS

Standard input has a load a line ({"prompts": [...], "clients": 4, "output_tokens": 128}), standard output gets a result
a line: for each request when it was sent, when tokens arrived, and how many there were. That there is no HTTP favours
this engine a little.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import openvino_genai

KV_CACHE_GB = 2
MAX_SEQUENCES = 64
MAX_STEP_TOKENS = 2048


def open_pipeline(model: str, threads: int) -> Any:
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = KV_CACHE_GB
    scheduling.enable_prefix_caching = True
    scheduling.max_num_seqs = MAX_SEQUENCES
    scheduling.max_num_batched_tokens = MAX_STEP_TOKENS
    properties = {"INFERENCE_NUM_THREADS": threads}
    return openvino_genai.ContinuousBatchingPipeline(model, scheduling, "CPU", properties)


def greedy(output_tokens: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = output_tokens
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    return config


class Request:
    def __init__(self, pipeline: Any, number: int, prompt: str, output_tokens: int) -> None:
        self.sent = time.perf_counter()
        ids = pipeline.get_tokenizer().encode(prompt).input_ids
        self.prompt_tokens = ids.shape[1]
        self.arrivals: list[float] = []
        self.output_tokens = 0
        self.handle = pipeline.add_request(number, ids, greedy(output_tokens))

    def read(self, now: float) -> bool:
        """Takes what has come; returns whether the answer goes on."""
        if self.handle.can_read():
            self.output_tokens += sum(len(piece.generated_ids) for piece in self.handle.read().values())
            self.arrivals.append(now)
        return bool(self.handle.get_status() == openvino_genai.GenerationStatus.RUNNING)

    def answer(self) -> dict[str, object]:
        return {
            "sent": self.sent,
            "arrivals": self.arrivals,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
        }


def run(pipeline: Any, load: dict[str, Any], first_number: int) -> dict[str, object]:
    """A closed loop of `clients`, stepped by hand."""
    waiting, live, done = load["prompts"][::-1], list[Request](), list[Request]()
    began = time.perf_counter()
    while waiting or live:
        while waiting and len(live) < load["clients"]:
            number = first_number + len(done) + len(live)
            live.append(Request(pipeline, number, waiting.pop(), load["output_tokens"]))
        pipeline.step()
        now = time.perf_counter()
        goes_on = [request.read(now) for request in live]
        done += [request for request, more in zip(live, goes_on, strict=True) if not more]
        live = [request for request, more in zip(live, goes_on, strict=True) if more]
    return {"answers": [request.answer() for request in done], "wall_s": time.perf_counter() - began}


def main() -> None:
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library writes to standard output as well
    pipeline = open_pipeline(sys.argv[1], int(sys.argv[2]))
    number = 0
    for line in sys.stdin:
        load = json.loads(line)
        print(json.dumps(run(pipeline, load, number)), file=results, flush=True)
        number += len(load["prompts"])


if __name__ == "__main__":
    main()
