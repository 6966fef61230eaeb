"""The default model, whole: its answers are the same bits alone and in company, however they are computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from headrace import LLM, EngineConfig, SamplingParams, _core
from headrace.engine.llm import Completion
from headrace.types import TokenLogprobs

PROSE = "The harbour town kept a register of every ship that came in, with the date, the cargo and the captain. "
SUBJECTS = [
    ("The capital of France is", SamplingParams(temperature=0, max_tokens=24, logprobs=5)),
    (PROSE * 30 + "In short,", SamplingParams(temperature=0, max_tokens=24, logprobs=2, prompt_logprobs=1)),
    ("Once upon a time", SamplingParams(temperature=1.0, seed=7, max_tokens=24, logprobs=3)),
    (
        "Write a poem about the sea.",
        SamplingParams(temperature=0.8, top_p=0.9, top_k=50, min_p=0.02, seed=8, frequency_penalty=0.5, max_tokens=24),
    ),
]
# Company of many lengths, so that steps mix decodes with chunks of prompts; one shares its prefix with a subject.
OTHERS = [
    (f"Story number {i}: " + PROSE * (i % 5), SamplingParams(temperature=i % 2, seed=i, max_tokens=3 + 7 * i % 30))
    for i in range(61)
]
CONFIG = EngineConfig(max_len=2048, threads=2)


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None

    @classmethod
    def of(cls, completion: Completion) -> Answer:
        return cls(completion.tokens, completion.text, completion.logprobs, completion.prompt_logprobs)


def answers(llm: LLM, requests: list[tuple[str, SamplingParams]]) -> list[Answer]:
    prompts, params = zip(*requests, strict=True)
    return [Answer.of(completion) for completion in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(smollm2_path, CONFIG) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[Answer]:
    return [answers(llm, [subject])[0] for subject in SUBJECTS]


def test_it_knows_a_few_sure_things(llm: LLM) -> None:
    known = {
        "The capital of France is": " Paris",
        "The quick brown fox jumps over the lazy": " dog",
        "1, 2, 3, 4, 5, 6, 7,": " 8",
        "Monday, Tuesday, Wednesday, Thursday,": " Friday",
    }
    for completion, text in zip(
        llm.generate(list(known), SamplingParams(temperature=0, max_tokens=4)), known.values(), strict=True
    ):
        assert completion.text.startswith(text)


def test_among_sixty_four_others_nothing_changes(llm: LLM, alone: list[Answer]) -> None:
    together = answers(llm, [*OTHERS[:30], *SUBJECTS, *OTHERS[30:]])
    assert together[30 : 30 + len(SUBJECTS)] == alone


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, threads=1),
        replace(CONFIG, max_step_tokens=7, max_seqs=4),
        replace(CONFIG, max_step_tokens=64, has_prefix_cache=False),
    ],
    ids=["one thread", "chunks of 7", "chunks of 64, cold"],
)
def test_however_it_is_computed_nothing_changes(smollm2_path: Path, alone: list[Answer], config: EngineConfig) -> None:
    with LLM(smollm2_path, config) as other:
        assert answers(other, SUBJECTS) == alone


def test_after_preemptions_nothing_changes(smollm2_path: Path, alone: list[Answer]) -> None:
    room_for_one = 2048 * 23040  # a sequence of max_len; 23,040 bytes of keys and values per token
    with LLM(smollm2_path, replace(CONFIG, max_kv_bytes=room_for_one)) as other:
        prompts, params = zip(*OTHERS, *SUBJECTS, strict=True)
        completions = other.generate(prompts, [replace(p, max_tokens=24, ignore_eos=True) for p in params])
        assert sum(completion.usage.num_preemptions for completion in completions) > 0
        subjects = [Answer.of(completion) for completion in completions[len(OTHERS) :]]
    for subject, expected in zip(subjects, alone, strict=True):
        assert subject.tokens[: len(expected.tokens)] == expected.tokens
        assert (subject.logprobs or ())[: len(expected.logprobs or ())] == (expected.logprobs or ())
        assert subject.prompt_logprobs == expected.prompt_logprobs


@pytest.mark.parametrize("isa", _core.available_isas()[:-1])  # the last, scalar, would take minutes
def test_each_instruction_set_keeps_the_promise(smollm2_path: Path, isa: str) -> None:
    with LLM(smollm2_path, replace(CONFIG, isa=isa)) as llm:
        alone = answers(llm, [SUBJECTS[0]])
        assert answers(llm, [*OTHERS[:6], SUBJECTS[0]])[-1:] == alone
