"""The default model against figures that Hugging Face transformers computed in float32 (tools/golden.py).

The one place where a fault that all of our own parts share would show.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gguf_writer import gguf_bytes
from headrace import LLM, EngineConfig, SamplingParams, _core
from headrace.engine.config import BackendKind
from headrace.engine.llm import Completion
from headrace.model.gguf import read_gguf
from headrace.tensor import FORMATS, from_f32

F64 = npt.NDArray[np.float64]

GOLDEN = Path(__file__).parent / "golden"
PROMPTS: list[dict[str, Any]] = json.loads((GOLDEN / "smollm2.json").read_text("utf-8"))["prompts"]

MAX_LOGPROB_ERROR = 1e-3  # nat
TOP = 20
NUM_GREEDY = 64

LOGPROB_STEPS = 2048  # tools/kl_reference.py
KEPT_BY_BUCKETS = {"8 bits": 0.79, "bf16": 0.83}  # of the whole KL, by the inputs' rounding; measured there

# The reference backend is slow: it takes the short prompts, the kernels take all.
EXACT = {
    "cpu": (EngineConfig(is_exact=True, max_len=4096), 4096),
    "reference": (EngineConfig(is_exact=True, max_len=192, max_seqs=16, backend=BackendKind.REFERENCE), 128),
}


@dataclass(frozen=True)
class Exact:
    """Golden prompts, each scored and continued greedily in f32 throughout."""

    prompts: list[dict[str, Any]]
    completions: list[Completion]


@pytest.fixture(scope="module", params=EXACT)
def exact(request: pytest.FixtureRequest, smollm2_path: Path) -> Exact:
    config, max_prompt = EXACT[request.param]
    prompts = [prompt for prompt in PROMPTS if len(prompt["ids"]) <= max_prompt]
    assert len(prompts) >= 12
    params = SamplingParams(temperature=0, max_tokens=NUM_GREEDY, ignore_eos=True, logprobs=TOP, prompt_logprobs=TOP)
    with LLM(smollm2_path, config) as llm:
        return Exact(prompts, llm.generate([prompt["ids"] for prompt in prompts], params))


def test_the_kernels_take_long_prompts_too() -> None:
    assert max(len(prompt["ids"]) for prompt in PROMPTS) > 2000


def test_logprobs_are_those_of_transformers(exact: Exact) -> None:
    worst = 0.0
    for prompt, completion in zip(exact.prompts, exact.completions, strict=True):
        # The row after the prompt's token i predicts token i + 1; after the last one comes the first of the answer.
        rows = [*(completion.prompt_logprobs or ()), *(completion.logprobs or ())]
        for position, ids, logprobs in zip(prompt["positions"], prompt["top_ids"], prompt["top_logprobs"], strict=True):
            ours = dict(zip(rows[position].top_ids, rows[position].top_logprobs, strict=True))
            # Tokens of nearly the same logprob may change places at the end of the list.
            missing = [logprob for token, logprob in zip(ids, logprobs, strict=True) if token not in ours]
            assert all(abs(logprob - logprobs[-1]) < 2 * MAX_LOGPROB_ERROR for logprob in missing)
            errors = [abs(ours[token] - logprob) for token, logprob in zip(ids, logprobs, strict=True) if token in ours]
            worst = max(worst, *errors)
    assert worst <= MAX_LOGPROB_ERROR


def test_greedy_tokens_are_those_of_transformers(exact: Exact) -> None:
    for prompt, completion in zip(exact.prompts, exact.completions, strict=True):
        assert list(completion.tokens) == prompt["greedy"], prompt["name"]
        logprobs = [one.logprob for one in completion.logprobs or ()]
        assert np.abs(np.array(logprobs) - prompt["greedy_logprobs"]).max() <= MAX_LOGPROB_ERROR


@dataclass(frozen=True)
class Comparison:
    """Per position: KL divergence (bucketed), whether the best tokens agree, the reference's margin between its two."""

    kl: F64
    agrees: npt.NDArray[np.bool_]
    margin: F64

    def agreement(self, margin: float) -> float:
        return float(self.agrees[self.margin >= margin].mean())


def compare(llm: LLM, file: str) -> Comparison:
    """Our distributions at every position of the reference texts, over the reference's best tokens and a rest."""
    golden = np.load(GOLDEN / file)
    top_ids = golden["top_ids"].astype(np.int64)
    reference = golden["top_logprobs"].astype(np.float64) / -LOGPROB_STEPS
    bounds = golden["offsets"]
    texts = [golden["tokens"][a:b].tolist() for a, b in itertools.pairwise(bounds)]
    num_top = top_ids.shape[1]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=num_top, prompt_logprobs=num_top, ignore_eos=True)
    rows = [
        row
        for completion in llm.generate(texts, params)
        for row in (*(completion.prompt_logprobs or ()), *(completion.logprobs or ()))
    ]
    kl = np.zeros(len(rows))
    for i, row in enumerate(rows):
        ours = dict(zip(row.top_ids, row.top_logprobs, strict=True))
        # A token among the reference's best that is not among ours joins the rest on both sides: still a lower bound.
        known = [j for j, token in enumerate(top_ids[i].tolist()) if token in ours]
        p = reference[i, known]
        q = np.array([ours[int(top_ids[i, j])] for j in known])
        p_rest, q_rest = max(1 - np.exp(p).sum(), 1e-9), max(1 - np.exp(q).sum(), 1e-9)
        kl[i] = (np.exp(p) * (p - q)).sum() + p_rest * np.log(p_rest / q_rest)
    agrees = np.array([row.top_ids[0] for row in rows]) == top_ids[:, 0]
    return Comparison(kl, agrees, reference[:, 0] - reference[:, 1])


@pytest.mark.parametrize("isa", _core.available_isas()[:-1])  # the last, scalar, would take an hour
def test_the_fast_path_stays_close_to_transformers(smollm2_path: Path, isa: str) -> None:
    """8-bit activations with one scale per 32 inputs, bf16 keys and values: how the default model is served."""
    with LLM(smollm2_path, EngineConfig(max_len=4096, isa=isa)) as llm:
        found = compare(llm, "smollm2_kl.npz")
    assert len(found.kl) >= 3000
    assert found.kl.mean() <= 0.005 * KEPT_BY_BUCKETS["8 bits"]
    assert found.agreement(0.0) >= 0.95
    assert found.agreement(0.1) >= 0.985
    assert found.agreement(0.3) >= 0.998


def test_bf16_weights_stay_closer_still(smollm2_path: Path, tmp_path: Path) -> None:
    """The same model with its matrices rounded to bf16, against transformers on those very weights."""
    file = read_gguf(smollm2_path)
    tensors = {name: stored.tensor() for name, stored in file.tensors.items()}
    rounded = {
        name: from_f32(tensor.to_f32(), FORMATS["bf16"]) if len(tensor.shape) == 2 else tensor
        for name, tensor in tensors.items()
    }
    metadata = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in file.metadata.items()}
    path = tmp_path / "bf16.gguf"
    path.write_bytes(gguf_bytes(metadata, rounded))
    with LLM(path, EngineConfig(max_len=4096)) as llm:
        found = compare(llm, "smollm2_bf16_kl.npz")
    assert len(found.kl) >= 3000
    assert found.kl.mean() <= 0.0005 * KEPT_BY_BUCKETS["bf16"]
    assert found.agreement(0.0) >= 0.99
