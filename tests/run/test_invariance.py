"""The property that everything rests on: a request's tokens and logprobs are the same bits whatever happens around it.

The whole engine but for text and HTTP: scheduler, executor, CPU backend, on a tiny model. Chunks, company, a warm
cache, preemption and threads must not show.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from headrace import _core
from headrace.backend.cpu import CpuBackend, StepBounds
from headrace.run.executor import LocalExecutor
from headrace.sched import FCFS, Order, Priority, Scheduler
from headrace.types import Finished, FinishReason, Limits, Preempted, Request, SamplingParams, TokenLogprobs, Tokens
from tiny_weights import TinySpec

SPEC = TinySpec("q4_1", num_heads=6, num_kv_heads=2, head_dim=32, vocab_size=211)
BOUNDS = StepBounds(max_tokens=1024, max_rows=1024, max_seqs=65, max_len=1024)
PLENTY = 2000  # blocks
RNG = np.random.default_rng(11)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None


class Server:
    """A scheduler over a backend, driven until all requests have ended."""

    def __init__(
        self,
        backend: CpuBackend,
        *,
        max_step_tokens: int = 1024,
        num_blocks: int = PLENTY,
        order: Order | None = None,
    ) -> None:
        limits = Limits(
            BOUNDS.max_seqs, max_step_tokens, BOUNDS.max_len, backend.block_size, (num_blocks,), lookahead=4
        )
        self.scheduler = Scheduler(limits, backend.kv_groups, order or FCFS())
        self.executor = LocalExecutor(backend, lambda: 0)
        self.answers: dict[int, Answer] = {}
        self.usage: dict[int, Finished] = {}
        self.preempted: set[int] = set()

    def answer(self, *requests: Request, drafts: Sequence[int] = ()) -> list[Answer]:
        for request in requests:
            self.answers[request.id] = Answer()
            assert self.scheduler.add(request) is None
        while (plan := self.scheduler.plan(0, {request.id: drafts for request in requests})) is not None:
            for event in self.scheduler.commit(self.executor.run(plan)):
                self._collect(event)
        return [self.answers[request.id] for request in requests]

    def _collect(self, event: Tokens | Finished | Preempted) -> None:
        match event:
            case Tokens():
                answer = self.answers[event.request_id]
                answer.tokens.extend(event.tokens)
                answer.logprobs.extend(event.logprobs or ())
                answer.prompt_logprobs.extend(event.prompt_logprobs or ())
            case Finished():
                self.answers[event.request_id].reason = event.reason
                self.usage[event.request_id] = event
            case Preempted():
                self.preempted.add(event.request_id)


def backend_of(num_threads: int) -> CpuBackend:
    backend = CpuBackend(SPEC.forward(), SPEC.weights(), BOUNDS, pool=_core.ThreadPool(num_threads))
    backend.load(PLENTY)
    return backend


@pytest.fixture(scope="module")
def backend() -> Iterator[CpuBackend]:
    backend = backend_of(2)
    yield backend
    backend.close()


def request(request_id: int, num_prompt: int, **params: object) -> Request:
    prompt = array("i", RNG.integers(0, SPEC.vocab_size, num_prompt).tolist())
    defaults = {"max_tokens": 24, "logprobs": 3}
    return Request(request_id, prompt, SamplingParams(**{**defaults, **params}), seed=request_id + 1)


GREEDY = request(0, 150, temperature=0.0)
SEEDED = request(1, 70, temperature=0.9, top_p=0.9, frequency_penalty=0.3, repetition_penalty=1.1)
SCORED = request(2, 90, temperature=1.3, top_k=20, min_p=0.02, prompt_logprobs=2)
LONG = request(3, 600, temperature=0.7)  # its context has more than one segment
SUBJECTS = [GREEDY, SEEDED, SCORED, LONG]


@pytest.fixture(scope="module")
def alone(backend: CpuBackend) -> list[Answer]:
    """What each subject is answered when nobody else is there."""
    answers = [Server(backend).answer(subject)[0] for subject in SUBJECTS]
    assert all(len(answer.tokens) == len(answer.logprobs) == 24 for answer in answers)
    assert len(answers[SCORED.id].prompt_logprobs) == 89
    return answers


@pytest.mark.parametrize("size", [1, 7, 64, 200])
def test_chunks_do_not_show(backend: CpuBackend, alone: list[Answer], size: int) -> None:
    for subject, expected in zip(SUBJECTS, alone, strict=True):
        assert Server(backend, max_step_tokens=size).answer(subject) == [expected]


@pytest.mark.parametrize("num_others", [1, 7, 61])
def test_company_does_not_show(backend: CpuBackend, alone: list[Answer], num_others: int) -> None:
    others = [request(100 + i, 1 + 7 * i % 40, temperature=i % 3 / 2, max_tokens=1 + i % 30) for i in range(num_others)]
    server = Server(backend, max_step_tokens=100)
    server.answer(*others[::2], *SUBJECTS, *others[1::2])
    assert [server.answers[subject.id] for subject in SUBJECTS] == alone


def test_a_warm_cache_does_not_show(backend: CpuBackend, alone: list[Answer]) -> None:
    server = Server(backend)
    server.answer(*SUBJECTS)
    again = [replace(subject, id=subject.id + 50) for subject in SUBJECTS]
    assert server.answer(*again) == alone
    assert server.usage[GREEDY.id + 50].usage.cached_tokens == 144
    assert server.usage[LONG.id + 50].usage.cached_tokens == 592


@pytest.mark.parametrize("subject", SUBJECTS, ids=["greedy", "seeded", "scored", "long"])
def test_preemption_does_not_show(backend: CpuBackend, alone: list[Answer], subject: Request) -> None:
    # Three others go first. There is room for all prompts and one block more for each, but the others want two soon.
    others = [request(200 + i, 14, max_tokens=60) for i in range(3)]
    num_blocks = sum(1 + -(-len(each.prompt) // backend.block_size) for each in (*others, subject))
    server = Server(backend, max_step_tokens=256, num_blocks=num_blocks, order=Priority())
    server.answer(*others, replace(subject, priority=9))
    assert subject.id in server.preempted
    assert server.answers[subject.id] == alone[subject.id]


def test_drafts_right_or_wrong_do_not_show(backend: CpuBackend, alone: list[Answer]) -> None:
    for subject, expected in zip(SUBJECTS, alone, strict=True):
        for drafts in (expected.tokens[3:7], [5, 5, 5]):
            assert Server(backend).answer(subject, drafts=drafts) == [expected]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_number_of_threads_does_not_show(alone: list[Answer], num_threads: int) -> None:
    other = backend_of(num_threads)
    assert Server(other, max_step_tokens=90).answer(*SUBJECTS) == alone
    other.close()


def test_another_seed_does_show(backend: CpuBackend, alone: list[Answer]) -> None:
    (answer,) = Server(backend).answer(replace(SEEDED, seed=12345))
    assert answer.tokens != alone[SEEDED.id].tokens
