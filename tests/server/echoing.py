"""A whole server without a model: real scheduler, engine, tokenizer and HTTP, and an executor that repeats the prompt.

The i-th token of an answer is the i-th of its prompt, over and over. With a temperature above 0 the answer begins at a
place drawn from (seed, choice), so that seeds and choices matter as they do with a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvloop

from headrace.engine.engine import Engine
from headrace.engine.stream import AsyncEngine
from headrace.model.files import GgufVocabulary
from headrace.run.executor import Foresee
from headrace.sched import FCFS, Scheduler
from headrace.server.admission import Admission
from headrace.server.app import build_app
from headrace.server.auth import Access
from headrace.server.serve import HttpServer, bind, serve
from headrace.server.serving import Serving
from headrace.text.chat import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.types import KVGroup, KVKind, Limits, Slice, StepPlan, StepResult, TokenLogprobs
from tiny import CHAT_TEMPLATE, END_IDS, MERGES, TOKEN_TYPES, TOKENS, VOCAB_SIZE

MAX_LEN = 512
NUM_BLOCKS = 512
BLOCK_SIZE = 16
MODEL = "echo"


def tiny_tokenizer(*, bos_id: int | None = None) -> Tokenizer:
    return Tokenizer.load(
        GgufVocabulary(
            model="gpt2",
            pre="gpt-2",
            tokens=TOKENS,
            types=TOKEN_TYPES,
            merges=MERGES,
            bos_id=bos_id,
            eos_id=2,
            unk_id=None,
            pad_id=None,
            add_bos=bos_id is not None,
            add_eos=False,
        ),
        VOCAB_SIZE,
    )


@dataclass
class EchoingExecutor:
    step_s: float = 0.0  # how long a step takes
    stuck: threading.Event = field(default_factory=threading.Event)  # set: steps do not end
    poison: int | None = None  # a token at which a step fails
    fails_at: int | None = None  # an index into every answer at which a step fails
    begun: list[tuple[int, ...]] = field(default_factory=list)  # the ids of the requests in every step so far

    def run(self, plan: StepPlan, masks: object = None, foresee: Foresee | None = None) -> StepResult:
        if foresee is not None:
            foresee()
        self.begun.append(tuple(request.id for request in plan.requests))
        time.sleep(self.step_s)
        while self.stuck.is_set():
            time.sleep(0.01)
        tokens, offsets = array("i"), array("i", [0])
        logprobs: list[Any] = []
        prompt_logprobs: list[Any] = []
        for part in plan.slices():
            if self.poison in part.tokens:
                raise RuntimeError("poisoned")
            params = part.request.params
            drawn = [self._next(part)] if -1 in part.targets else []
            tokens.extend(drawn)
            offsets.append(len(tokens))
            logprobs.append(None if params.logprobs is None else tuple(_score(t, params.logprobs) for t in drawn))
            known = [target for target in part.targets if target != -1]
            count = params.prompt_logprobs
            prompt_logprobs.append(None if count is None else tuple(_score(t, count) for t in known))
        return StepResult(plan.step, tokens, offsets, tuple(logprobs), tuple(prompt_logprobs))

    def _next(self, part: Slice) -> int:
        request = part.request
        index = part.start + len(part.tokens) - len(request.prompt)
        if index == self.fails_at:
            raise RuntimeError("failed")
        if request.params.temperature > 0:
            index += zlib.crc32(f"{request.seed} {request.choice}".encode())
        return request.prompt[index % len(request.prompt)]


def _score(token: int, count: int) -> TokenLogprobs:
    """The token with -0.5, the next ids behind it."""
    top = [(token + i) % VOCAB_SIZE for i in range(count)]
    return TokenLogprobs(-0.5, tuple(top), tuple(-0.5 - i for i in range(count)))


@dataclass
class Running:
    """A server that runs on a thread of its own."""

    url: str
    serving: Serving
    engine: Engine
    admission: Admission
    executor: EchoingExecutor
    server: HttpServer
    client: httpx.Client

    def completion(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json=fields)

    def chat(self, content: str = "Hi", **fields: Any) -> httpx.Response:
        return self.client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], **fields}
        )

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    @property
    def num_free_blocks(self) -> int:
        return self.engine.scheduler.num_free_blocks[0]

    def wait_until_idle(self, limit_s: float = 15.0) -> bool:
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if self.serving.engine.is_idle and self.admission.num_open == 0:
                return True
            time.sleep(0.005)
        return False


def wait_for(condition: Callable[[], object], limit_s: float = 15.0) -> None:
    """Until it holds. The limit is for what never happens; a loaded machine may take its time."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def echo_engine(executor: EchoingExecutor) -> Engine:
    group = KVGroup(KVKind.FULL, (0,), 4, 4)
    limits = Limits(max_seqs=16, max_step_tokens=64, max_len=MAX_LEN, block_size=BLOCK_SIZE, num_blocks=(NUM_BLOCKS,))
    return Engine(Scheduler(limits, (group,), FCFS()), executor)


def echo_serving(engine: Engine, **fields: Any) -> Serving:
    """What a server needs; `fields` replace those of Serving."""
    values: dict[str, Any] = {
        "engine": AsyncEngine(engine),
        "tokenizer": tiny_tokenizer(),
        "chat_template": ChatTemplate(CHAT_TEMPLATE),
        "model_names": (MODEL, "alias"),
        "max_len": MAX_LEN,
        "num_blocks": (NUM_BLOCKS,),
        "vocab_size": VOCAB_SIZE,
        "end_ids": END_IDS,
        "version": "0.test",
        "created_s": 1,
        **fields,
    }
    return Serving(**values)


@contextlib.contextmanager
def running(
    *,
    executor: EchoingExecutor | None = None,
    access: Access | None = None,
    max_open: int = 64,
    grace_s: float = 1.0,
    **fields: Any,
) -> Iterator[Running]:
    """A server on a free port of this machine, for as long as the context is open."""
    executor = executor or EchoingExecutor()
    engine = echo_engine(executor)
    serving = echo_serving(engine, **fields)
    admission = Admission(max_open)
    app = build_app(serving, access or Access.of("127.0.0.1", None), admission)
    server = HttpServer(app, admission, grace_s)
    sock = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.serve(sockets=[sock]))

    thread = threading.Thread(target=run)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    with httpx.Client(base_url=url, timeout=20, trust_env=False) as client:
        try:
            yield Running(url, serving, engine, admission, executor, server, client)
        finally:
            executor.stuck.clear()
            server.should_exit = True
            thread.join(10)


def serve_until_signalled(*, is_stuck: bool = False) -> None:
    """What a process of its own runs: prints its port once it serves. `is_stuck`: its first step does not end."""
    executor = EchoingExecutor(step_s=0.02)
    if is_stuck:
        executor.stuck.set()
    sock = bind("127.0.0.1", 0)
    admission = Admission()
    app = build_app(echo_serving(echo_engine(executor)), Access.of("127.0.0.1", None), admission)
    port = sock.getsockname()[1]
    serve(app, admission, sock, lambda: print(port, flush=True))
