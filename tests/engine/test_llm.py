"""The offline API, on a tiny model with real files, kernels and text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, EngineConfig, SamplingParams
from headrace.engine.config import BackendKind, OrderKind
from headrace.types import CapacityError, ModelError, RequestError
from tiny import END_IDS, VOCAB_SIZE, TinyShape, write_tiny_llama_gguf, write_tiny_llama_hf

GREEDY = SamplingParams(temperature=0, max_tokens=20)
CONFIG = EngineConfig(max_seqs=8, max_step_tokens=64, threads=2)
PROMPTS = ["the man in the house", "and the", "0123456789", "a"]


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_llama_gguf(path)
    return path


@pytest.fixture(scope="module")
def llm(tiny_gguf: Path) -> Iterator[LLM]:
    with LLM(tiny_gguf, CONFIG) as llm:
        yield llm


def test_completions_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert [one.text for one in together] == [one.text for one in alone]
    assert len({one.tokens for one in together}) == len(PROMPTS)


def test_token_ids_are_a_prompt_too(llm: LLM) -> None:
    ids = llm.loaded.tokenizer.encode(PROMPTS[0])
    (from_ids,) = llm.generate(ids, GREEDY)
    (from_text,) = llm.generate(PROMPTS[0], GREEDY)
    assert from_ids == replace(from_text, usage=from_ids.usage)


def test_arrays_of_token_ids_are_prompts_too(llm: LLM) -> None:
    ids = llm.loaded.tokenizer.encode(PROMPTS[0])
    (from_ids,) = llm.generate(ids, GREEDY)
    (from_array,) = llm.generate(np.array(ids), GREEDY)
    assert from_array.prompt_tokens == tuple(ids)
    assert {type(token) for token in from_array.prompt_tokens} == {int}
    assert from_array.tokens == from_ids.tokens
    assert [one.tokens for one in llm.generate(np.array([ids, ids]), GREEDY)] == [from_ids.tokens] * 2
    assert "".join(llm.stream(np.array(ids), GREEDY)) == from_ids.text


WRONG_PROMPTS: list[Any] = [
    None,
    5,
    True,
    1.5,
    b"ab",
    {"a": 1},
    [None],
    [[None]],
    [True],
    [[1, True]],
    [1.5],
    np.array(1),
]


@pytest.mark.parametrize("prompts", WRONG_PROMPTS, ids=repr)
def test_prompts_that_are_neither_text_nor_token_ids_are_refused_by_name(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt\S* is .*; it must be .*text.* token ids") as refused:
        llm.generate(prompts, GREEDY)
    assert refused.value.code == "invalid_type"
    with pytest.raises(RequestError, match=r"prompt\S* is .*; it must be .*text or token ids"):
        next(llm.stream(prompts, GREEDY))


def test_token_ids_beside_prompts_are_refused(llm: LLM) -> None:
    for prompts in ([1, "a"], [1, [2]], [1, True], [1, None]):
        with pytest.raises(RequestError, match="prompts mixes token ids with prompts"):
            llm.generate(prompts, GREEDY)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("params", [5, "a", {"max_tokens": 1}, [None], [{}], GREEDY.__class__])
def test_params_of_another_type_are_refused_by_name(llm: LLM, params: Any) -> None:
    for ask in (lambda: llm.generate("a", params), lambda: next(llm.stream("a", params))):
        with pytest.raises(RequestError, match=r"params is .*; it must be SamplingParams") as refused:
            ask()
        assert (refused.value.param, refused.value.code) == ("params", "invalid_type")
    with pytest.raises(RequestError, match=r"params is .*; it must be SamplingParams$"):
        next(llm.stream("a", [GREEDY]))  # type: ignore[arg-type]  # one prompt has one


def test_an_error_about_a_long_prompt_names_the_token_and_does_not_repeat_the_prompt(llm: LLM) -> None:
    wrong: Any = [*range(100_000), None]
    with pytest.raises(RequestError, match=r"^prompt\[100000\] is None; it must be an integer") as refused:
        next(llm.stream(wrong, GREEDY))
    assert len(str(refused.value)) < 200


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    params = [replace(GREEDY, max_tokens=n) for n in (1, 2, 3)]
    completions = llm.generate(PROMPTS[:3], params)
    assert [one.usage.completion_tokens for one in completions] == [1, 2, 3]
    with pytest.raises(RequestError, match="4 prompts, but 3 params"):
        llm.generate(PROMPTS, params)


def test_streaming_gives_the_same_text(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], GREEDY)
    assert "".join(llm.stream(PROMPTS[0], GREEDY)) == whole.text


def test_two_streams_may_take_turns(llm: LLM) -> None:
    first, second = (llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2])
    texts = ["", ""]
    is_open = [True, True]
    while any(is_open):
        for i, stream in enumerate((first, second)):
            piece = next(stream, None)
            is_open[i] = piece is not None
            texts[i] += piece or ""
    assert texts == [one.text for one in llm.generate(PROMPTS[:2], GREEDY)]


def test_leaving_a_stream_early_frees_everything(llm: LLM) -> None:
    scheduler = llm.loaded.engine.scheduler
    stream = llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=100, ignore_eos=True))
    next(stream)
    assert scheduler.num_running == 1
    stream.close()
    assert scheduler.num_running == 0
    assert scheduler.num_free_blocks == llm.loaded.limits.num_blocks


def test_a_stop_string_ends_the_text_before_it_and_is_named(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], replace(GREEDY, ignore_eos=True))
    stop = whole.text[5:8]
    (cut,) = llm.generate(PROMPTS[0], replace(GREEDY, ignore_eos=True), stop=[stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.tokens == whole.tokens[: len(cut.tokens)] and len(cut.tokens) < len(whole.tokens)


def test_a_stop_token_ends_the_answer_and_is_named(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], replace(GREEDY, ignore_eos=True))
    stop = whole.tokens[4]
    (cut,) = llm.generate(PROMPTS[0], replace(GREEDY, ignore_eos=True, stop_token_ids=(stop,)))
    assert cut.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


def test_end_tokens_end_an_answer_unless_they_are_ignored(llm: LLM) -> None:
    assert llm.loaded.files.end_ids == END_IDS
    bias = ((min(END_IDS), 100.0),)
    (ended,) = llm.generate("a", replace(GREEDY, logit_bias=bias))
    assert (ended.finish_reason, ended.stop_reason, ended.text) == ("stop", None, "")
    (kept,) = llm.generate("a", replace(GREEDY, logit_bias=bias, ignore_eos=True))
    assert (kept.finish_reason, len(kept.tokens)) == ("length", 20)
    (later,) = llm.generate("a", replace(GREEDY, logit_bias=bias, min_tokens=3))
    assert (later.finish_reason, len(later.tokens)) == ("stop", 4)


def test_one_seed_gives_one_answer_and_no_seed_gives_many(llm: LLM) -> None:
    # The tiny model is so sure of itself that at ordinary temperatures two answers are alike now and then.
    params = SamplingParams(temperature=8.0, max_tokens=12, seed=5, ignore_eos=True)
    seeded = llm.generate(["the"] * 3, params)
    assert len({one.tokens for one in seeded}) == 1
    unseeded = llm.generate(["the"] * 3, replace(params, seed=None))
    assert len({one.tokens for one in unseeded}) == 3


def test_a_scored_prompt_has_logprobs_for_every_token_after_the_first(llm: LLM) -> None:
    (scored,) = llm.generate("the man", SamplingParams(max_tokens=0, prompt_logprobs=2))
    assert scored.tokens == () and scored.finish_reason == "length"
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == len(scored.prompt_tokens) - 1
    assert all(one.logprob <= 0 and len(one.top_ids) == 2 for one in scored.prompt_logprobs)


def test_what_can_never_run_is_an_error_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="600 tokens"):
        llm.generate([[5] * 10, [5] * 600], GREEDY)
    assert not llm.loaded.engine.has_work
    with pytest.raises(RequestError, match=f"{VOCAB_SIZE} is no token id"):
        llm.generate([VOCAB_SIZE], GREEDY)
    with pytest.raises(RequestError, match="logit_bias has the token id 99999"):
        llm.generate("a", replace(GREEDY, logit_bias=((99999, 1.0),)))
    with pytest.raises(RequestError, match="mixes"):
        llm.generate([1, "a"], GREEDY)  # type: ignore[list-item]


def test_a_max_tokens_above_the_room_is_an_error_with_the_numbers(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"10 tokens and max_tokens is 503, together 513; .* room for 502") as caught:
        llm.generate([5] * 10, replace(GREEDY, max_tokens=503))
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(RequestError, match="room for 502"):
        next(llm.stream([5] * 10, replace(GREEDY, max_tokens=503)))
    (whole,) = llm.generate([5] * 10, replace(GREEDY, max_tokens=None, ignore_eos=True))
    assert len(whole.tokens) == 502
    with pytest.raises(RequestError, match="the prompt has no tokens"):
        llm.generate("", GREEDY)


def test_one_stop_string_may_be_given_bare(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], replace(GREEDY, ignore_eos=True))
    stop = whole.text[5:8]
    assert llm.generate(PROMPTS[0], replace(GREEDY, ignore_eos=True), stop=stop)[0].stop_reason == stop


@pytest.mark.parametrize("stop", [None, 5, [5], ["a", None], b"a", {"a"}])
def test_a_stop_that_is_no_string_is_refused_by_name(llm: LLM, stop: Any) -> None:
    for ask in (lambda: llm.generate("a", GREEDY, stop=stop), lambda: next(llm.stream("a", GREEDY, stop=stop))):
        with pytest.raises(RequestError, match=r"stop is .*; it must be a string or a sequence of strings"):
            ask()


def test_a_closed_llm_says_so_to_whoever_asks_and_to_streams_under_way(tiny_gguf: Path) -> None:
    llm = LLM(tiny_gguf, CONFIG)
    stream = llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=400, ignore_eos=True))
    next(stream)
    llm.close()
    for ask in (lambda: list(stream), lambda: llm.generate("a", GREEDY), lambda: next(llm.stream("a", GREEDY))):
        with pytest.raises(RequestError, match="the LLM is closed"):
            ask()


def test_a_shared_prefix_is_computed_once(llm: LLM) -> None:
    prefix = "the man and the house in the water " * 3
    llm.generate(prefix + "a", GREEDY)
    (again,) = llm.generate(prefix + "b", GREEDY)
    assert again.usage.cached_tokens >= 16


@pytest.mark.parametrize("order", OrderKind)
def test_every_order_gives_the_same_answers(tiny_gguf: Path, llm: LLM, order: OrderKind) -> None:
    with LLM(tiny_gguf, replace(CONFIG, order=order, max_seqs=2, has_prefix_cache=False)) as other:
        assert [c.tokens for c in other.generate(PROMPTS, GREEDY)] == [c.tokens for c in llm.generate(PROMPTS, GREEDY)]


def test_a_directory_answers_as_the_gguf_file_of_the_same_model(tmp_path: Path) -> None:
    write_tiny_llama_gguf(tmp_path / "tiny.gguf", fmt="bf16")
    write_tiny_llama_hf(tmp_path / "tiny", fmt="bf16", num_shards=2)
    with LLM(tmp_path / "tiny.gguf", CONFIG) as gguf, LLM(tmp_path / "tiny", CONFIG) as directory:
        assert [c.tokens for c in gguf.generate(PROMPTS, GREEDY)] == [
            c.tokens for c in directory.generate(PROMPTS, GREEDY)
        ]


def test_the_reference_backend_answers_as_the_kernels_do(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_llama_gguf(path, fmt="f32")
    configs = [replace(CONFIG, is_exact=True, backend=kind) for kind in BackendKind]
    answers = []
    for config in configs:
        with LLM(path, config) as llm:
            answers.append(llm.generate(PROMPTS, replace(GREEDY, logprobs=3)))
    for cpu, reference in zip(*answers, strict=True):
        assert cpu.tokens == reference.tokens
        assert cpu.logprobs is not None and reference.logprobs is not None
        for ours, theirs in zip(cpu.logprobs, reference.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_a_model_that_does_not_fit_is_refused_before_memory_is_taken(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(CapacityError, match=r"needs .* of memory .* are available"):
        patch.setattr("headrace.engine.device.available_bytes", lambda: 100 << 20)
        LLM(tiny_gguf, replace(CONFIG, max_kv_bytes=1 << 30))
    with pytest.raises(CapacityError, match="one sequence of 512 tokens needs"):
        LLM(tiny_gguf, replace(CONFIG, max_kv_bytes=1000))
    with pytest.raises(CapacityError, match="made for at most 512 tokens"):
        LLM(tiny_gguf, replace(CONFIG, max_len=513))
    with pytest.raises(CapacityError, match="no kernels for vax"):
        LLM(tiny_gguf, replace(CONFIG, isa="vax"))


def test_an_unknown_model_is_refused_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="smollm2-135m"):
        LLM("no-such-model", cache_dir=tmp_path)


def test_a_shape_the_kernels_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    write_tiny_llama_gguf(path, shape=TinyShape(head_dim=24))
    with pytest.raises(ModelError, match="head_dim is 24"):
        LLM(path, CONFIG)
