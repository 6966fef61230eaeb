"""The driver: which steps count as steady, what they attended to, and that it measures what the engine really does."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bench.steps import Driver, random_prompts
from headrace.engine.config import BackendKind, EngineConfig
from headrace.engine.load import Loaded, load
from headrace.types import CapacityError, RequestError
from tiny import write_tiny_llama_gguf

PROMPT_TOKENS = 20


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    path = tmp_path_factory.mktemp("steps") / "tiny.gguf"
    write_tiny_llama_gguf(path)
    loaded = load(path, EngineConfig(threads=1, max_seqs=4, max_step_tokens=32))
    yield loaded
    loaded.close()


def prompts(loaded: Loaded, count: int, seed: str, length: int = PROMPT_TOKENS) -> list[array[int]]:
    return random_prompts(loaded.files.spec.vocab_size, count, length, seed)


def test_steps_are_steady_from_the_last_first_token_to_the_first_last_one(loaded: Loaded) -> None:
    steps = Driver.of(loaded).run(prompts(loaded, 3, ""), max_tokens=9)
    steady = [step for step in steps if step.is_steady]
    assert sum(step.num_tokens for step in steps) == 3 * (PROMPT_TOKENS + 8)  # all but the last token drawn are fed
    assert 5 <= len(steady) <= 8 and all(step.num_tokens == 3 for step in steady)
    attended = [step.num_attended for step in steady]
    assert [b - a for a, b in itertools.pairwise(attended)] == [3] * (len(steady) - 1)
    assert attended[-1] <= 3 * (PROMPT_TOKENS + 8)


def test_one_sequence_attends_to_its_prompt_and_what_it_said(loaded: Loaded) -> None:
    steps = Driver.of(loaded).run(prompts(loaded, 1, "one"), max_tokens=4)
    assert [step.num_attended for step in steps if step.is_steady] == [PROMPT_TOKENS + i for i in (1, 2, 3)]


def test_the_core_takes_a_part_of_each_step(loaded: Loaded) -> None:
    steps = Driver.of(loaded).run(prompts(loaded, 2, "core"), max_tokens=3)
    for step in steps:
        parts = (step.core.rows, step.core.linear, step.core.attention, step.core.head)
        assert all(part > 0 for part in parts) or not step.is_steady  # a prompt's first part has no logits
        assert sum(parts) <= step.core.total <= step.seconds


def test_a_prompt_is_never_in_the_prefix_cache_and_the_same_one_is(loaded: Loaded) -> None:
    driver, asked = Driver.of(loaded), prompts(loaded, 2, "cache")
    first, again = (sum(step.num_tokens for step in driver.run(asked, max_tokens=1)) for _ in range(2))
    assert first == 2 * PROMPT_TOKENS and again == 2 * (PROMPT_TOKENS - 16)  # one block of 16


def test_steps_with_drafts_and_without_take_turns(loaded: Loaded) -> None:
    (prompt,) = prompts(loaded, 1, "verify")
    ones, many = Driver.of(loaded, lookahead=3).verify(prompt, 4, num_steps=3)
    assert len(ones) == len(many) == 3 and min(*ones, *many) > 0


def test_what_does_not_fit_is_an_error_and_not_a_figure(loaded: Loaded) -> None:
    with pytest.raises(CapacityError, match="tokens"):
        Driver.of(loaded).run(prompts(loaded, 1, "", 5000), max_tokens=1)


def test_the_reference_is_not_measured(tmp_path: Path) -> None:
    write_tiny_llama_gguf(tmp_path / "tiny.gguf")
    loaded = load(tmp_path / "tiny.gguf", EngineConfig(backend=BackendKind.REFERENCE))
    with pytest.raises(RequestError, match="only the cpu backend"):
        Driver.of(loaded)
