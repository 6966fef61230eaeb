"""Models of random weights: they have the shape they are named after, load, compute and are the same each time."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace import LLM, EngineConfig, SamplingParams
from headrace.model import GgufVocabulary, open_model
from headrace.model.gguf import read_gguf
from headrace.model.synth import SHAPES, Quant, Recipe, random_matrix, random_vocabulary, synthesize
from headrace.tensor import FORMATS, Tensor
from headrace.text.tokenizer import Tokenizer
from headrace.types import ModelError


def one_layer(tmp_path: Path, quant: Quant, head_quant: Quant | None = None) -> Path:
    recipe = Recipe("smollm2-135m", quant, head_quant, num_layers=1)
    synthesize(recipe, tmp_path / recipe.file_name)
    return tmp_path / recipe.file_name


@pytest.mark.parametrize("quant", list(Quant), ids=lambda quant: quant.value)
def test_a_file_loads_and_what_it_computes_is_finite(tmp_path: Path, quant: Quant) -> None:
    with LLM(one_layer(tmp_path, quant), EngineConfig(threads=1, max_len=256)) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
        (answer,) = llm.generate("any text at all", params)
    assert len(answer.tokens) == 4 and answer.logprobs is not None
    logprobs = [drawn.logprob for drawn in answer.logprobs]
    # logits of deviation 1 to 2 over 49,152 tokens: the likeliest is not certain, and not one of equals
    assert all(-math.log(49152) + 1 < logprob < -0.01 for logprob in logprobs)


def test_a_file_has_the_shape_and_the_formats_that_were_asked_for(tmp_path: Path) -> None:
    path = one_layer(tmp_path, Quant.Q4, Quant.Q8)
    files, tensors = open_model(path), read_gguf(path).tensors
    eps = float(np.float32(1e-5))  # as the file keeps it
    assert files.spec == replace(Recipe("smollm2-135m", num_layers=1).spec, norm_eps=eps)
    assert tensors["token_embd.weight"].dtype == "q8_0"
    assert {t.dtype for name, t in tensors.items() if name.startswith("blk.0.attn_") and "norm" not in name} == {"q4_0"}
    assert not (tmp_path / f"{path.name}.part").exists()


def test_the_same_recipe_gives_the_same_bytes(tmp_path: Path) -> None:
    first = one_layer(tmp_path, Quant.Q4).read_bytes()
    assert one_layer(tmp_path, Quant.Q4).read_bytes() == first


def test_a_text_survives_the_random_vocabulary(tmp_path: Path) -> None:
    vocabulary = open_model(one_layer(tmp_path, Quant.Q4)).vocabulary
    assert isinstance(vocabulary, GgufVocabulary)
    tokenizer = Tokenizer.load(vocabulary)
    text = "Grüße, 世界! 123"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert any(len(tokenizer.token_bytes[index]) > 1 for index in ids)  # merges are used


def test_every_token_of_a_random_vocabulary_is_there_once() -> None:
    tokens, merges = random_vocabulary(5000)
    assert len(set(tokens)) == len(tokens) == 5000
    assert {merge.replace(" ", "") for merge in merges} <= set(tokens)


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "bf16"])
def test_weights_deviate_by_about_one_over_the_root_of_their_columns(name: str) -> None:
    source = random_matrix("any", (64, 4096), FORMATS[name])
    parts = np.concatenate(list(source.parts()))
    assert parts.size == source.nbytes
    weights = Tensor(parts, source.shape, source.format).to_f32()
    assert 0.76 < weights.std() * math.sqrt(4096) < 1.54  # the root mean square of 1 to 2, times a power of 2
    assert abs(weights.mean()) < 0.15 * weights.std()  # integers of 4 bits have no mirror image of -8


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_names_models_by_their_size(name: str) -> None:
    parameters = SHAPES[name].spec.num_parameters / 1e6
    stated = {"llama3-8b": 8030, "llama3.2-1b": 1236, "smollm2-135m": 135}[name]  # what their model cards say
    assert parameters == pytest.approx(stated, rel=0.005)


@pytest.mark.parametrize(("name", "layers"), [("llama4", None), ("smollm2-135m", 0), ("smollm2-135m", 31)])
def test_a_shape_that_is_not_there_is_refused(name: str, layers: int | None) -> None:
    with pytest.raises(ModelError, match=r"llama4|--layers"):
        Recipe(name, num_layers=layers)


def test_a_file_that_cannot_be_written_is_a_models_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be written"):
        synthesize(Recipe("smollm2-135m", num_layers=1), tmp_path / "missing" / "x.gguf")


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ModelError, match="cannot be written"):
        synthesize(Recipe("smollm2-135m", num_layers=1), pipe)
    assert pipe.is_fifo()
