"""Llama GGUF files as models: spec, vocabulary, end tokens, weights, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_writer import Raw
from headrace.model import GgufVocabulary, ModelFiles, open_model
from headrace.model.llama_files import ROPE_FREQS, half_split_order
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.tensor import FORMATS, from_f32
from headrace.types import ModelError
from tiny import (
    CHAT_TEMPLATE,
    MERGES,
    NORM_EPS,
    TOKENS,
    TinyShape,
    tiny_gguf_metadata,
    tiny_weights,
    write_tiny_llama_gguf,
)


def opened(directory: Path, **options: object) -> ModelFiles:
    return open_model(write_tiny_llama_gguf(directory / "tiny.Q8_0.gguf", **options))  # type: ignore[arg-type]


def vocabulary_of(model: ModelFiles) -> GgufVocabulary:
    assert isinstance(model.vocabulary, GgufVocabulary)
    return model.vocabulary


def renamed(names: dict[int, str]) -> list[str]:
    return [names.get(token, text) for token, text in enumerate(TOKENS)]


# What is read ---------------------------------------------------------------------------------------------------


def test_the_spec_is_read_from_the_keys(tmp_path: Path) -> None:
    model = opened(tmp_path)
    assert model.spec == ModelSpec(
        architecture="llama",
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_len=512,
        norm_eps=NORM_EPS,
        rope=RopeSpec(32, 10_000.0),
        is_embedding_tied=True,
    )
    assert (model.name, model.license, model.chat_template) == ("tiny.Q8_0", "apache-2.0", CHAT_TEMPLATE)


def test_keys_that_are_absent_have_llama_cpps_defaults(tmp_path: Path) -> None:
    absent = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "vocab_size")
    shape = TinyShape(num_kv_heads=4, head_dim=16)
    keys = {f"llama.{name}": None for name in (*absent, "rope.dimension_count", "rope.freq_base")}
    spec = opened(tmp_path, shape=shape, metadata=keys).spec
    assert (spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (4, 16, len(TOKENS))
    assert spec.rope == RopeSpec(16, 10_000.0)


def test_the_default_model_is_the_one_its_card_describes(smollm2_path: Path) -> None:
    model = open_model(smollm2_path)
    assert model.parameters == 134_515_008
    assert (model.spec.num_layers, model.spec.num_heads, model.spec.num_kv_heads) == (30, 9, 3)
    assert (model.spec.max_len, model.spec.rope.theta, model.license) == (8192, 100_000.0, "apache-2.0")
    assert vocabulary_of(model).pre == "smollm"
    assert model.end_ids == {0, 2}  # <|endoftext|> by its name, <|im_end|> by its id


def test_the_vocabulary_is_plain_values(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(opened(tmp_path))
    assert (vocabulary.model, vocabulary.pre, vocabulary.tokens) == ("gpt2", "smollm", TOKENS)
    assert vocabulary.merges == MERGES
    assert vocabulary.types == (3, 3, 3) + (1,) * (len(TOKENS) - 3)
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.unk_id, vocabulary.pad_id) == (1, 2, 0, 2)
    assert (vocabulary.add_bos, vocabulary.add_eos) == (False, None)


def test_what_a_vocabulary_does_not_say_stays_unsaid(tmp_path: Path) -> None:
    names = ("pre", "token_type", "merges", "bos_token_id", "eos_token_id", "add_bos_token")
    keys: dict[str, object] = {f"tokenizer.ggml.{name}": None for name in names}
    vocabulary = vocabulary_of(opened(tmp_path, metadata=keys))
    assert (vocabulary.pre, vocabulary.merges, vocabulary.types) == ("default", (), (1,) * len(TOKENS))
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.add_bos) == (None, None, None)


def test_every_end_token_is_found_by_id_and_by_name(tmp_path: Path) -> None:
    keys = {
        "tokenizer.ggml.tokens": renamed({0: "<|begin|>", 2: "<|stop|>", 10: "<|eot_id|>", 11: "<|eom_id|>"}),
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 20,
        "tokenizer.ggml.eom_token_id": 21,
    }
    assert opened(tmp_path, metadata=keys).end_ids == {2, 10, 11, 20, 21}


# Weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [TinyShape(), TinyShape(num_heads=6, num_kv_heads=3, is_embedding_tied=False)])
def test_weights_are_those_of_the_model_with_rotary_rows_half_split(tmp_path: Path, shape: TinyShape) -> None:
    weights = opened(tmp_path, fmt="f32", shape=shape, seed=3).weights()
    expected = tiny_weights(shape, seed=3)
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "down": "mlp.down_proj"}
    for i, layer in enumerate(weights.layers):
        for part, name in names.items():
            found = getattr(layer, part).to_f32()
            np.testing.assert_array_equal(found, expected[f"model.layers.{i}.{name}.weight"])
    np.testing.assert_array_equal(weights.embedding.to_f32(), expected["model.embed_tokens.weight"])
    head = expected.get("lm_head.weight", expected["model.embed_tokens.weight"])
    np.testing.assert_array_equal(weights.head.to_f32(), head)


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    model = opened(tmp_path)
    weights = model.weights()
    assert weights.head is weights.embedding
    assert model.spec.is_embedding_tied
    assert not opened(tmp_path, shape=TinyShape(is_embedding_tied=False)).spec.is_embedding_tied


@pytest.mark.parametrize("fmt", FORMATS)
def test_weights_keep_the_format_they_are_stored_in(tmp_path: Path, fmt: str) -> None:
    model = opened(tmp_path, fmt=fmt)
    weights = model.weights()
    assert {weights.layers[0].q.format.name, weights.layers[1].up.format.name, weights.embedding.format.name} == {fmt}
    total = weights.embedding.nbytes + weights.norm.nbytes
    parts = [field.name for field in dataclasses.fields(weights.layers[0])]
    total += sum(getattr(layer, part).nbytes for layer in weights.layers for part in parts)
    assert model.weight_bytes == total


def test_only_the_rotary_part_of_a_head_is_reordered() -> None:
    assert half_split_order(2, 6, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    assert half_split_order(1, 4, 4).tolist() == [0, 2, 1, 3]


def test_llama_3s_rotary_factors_come_from_their_tensor(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    model = opened(tmp_path, tensors={ROPE_FREQS: from_f32(factors, FORMATS["f32"])})
    assert model.spec.rope.factors == tuple(factors.tolist())
    plain = RopeSpec(32, 10_000.0).frequencies()
    np.testing.assert_allclose(model.spec.rope.frequencies(), np.array(plain) / factors)


# What is refused ------------------------------------------------------------------------------------------------


REFUSED_KEYS: list[tuple[dict[str, object], str]] = [
    ({"general.architecture": "gemma3"}, "general.architecture is 'gemma3'; it must be one that is supported: llama"),
    ({"general.architecture": None}, "general.architecture is missing"),
    ({"general.type": "adapter"}, "general.type is 'adapter'"),
    ({"split.count": 3}, "split.count is 3"),
    ({"llama.block_count": None}, "llama.block_count is missing"),
    ({"llama.block_count": 0}, "llama.block_count is 0"),
    ({"llama.block_count": 1 << 31}, "llama.block_count is 2147483648"),
    ({"llama.block_count": "2"}, "llama.block_count is '2'"),
    ({"llama.block_count": True}, "llama.block_count is True"),
    ({"llama.block_count": 3}, "tensors 'blk.2.attn_norm.weight', "),
    ({"llama.block_count": 1}, "and 4 more are not part of a model of this architecture"),
    ({"llama.feed_forward_length": [128, 128]}, "llama.feed_forward_length is ndarray of 2"),
    ({"llama.feed_forward_length": 96}, "the spec asks for (96, 64)"),
    ({"llama.attention.head_count_kv": 3}, "4 heads cannot share 3 KV heads evenly"),
    ({"llama.attention.value_length": 16}, "llama.attention.value_length is 16"),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon is nan"),
    ({"llama.rope.dimension_count": 31}, "rotary dimension is 31"),
    ({"llama.rope.dimension_count": 64}, "rotary dimension is 64"),
    ({"llama.expert_count": 8}, "llama.expert_count is 8"),
    ({"llama.attention.sliding_window": 128}, "does not support the field 'llama.attention.sliding_window'"),
    ({"llama.logit_scale": 2.0}, "does not support the field 'llama.logit_scale'"),
    ({"llama.vocab_size": 100}, "tokenizer.ggml.tokens has 304 entries; the model's vocabulary 100"),
    ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
    ({"tokenizer.ggml.tokens": 7}, "tokenizer.ggml.tokens is 7"),
    ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
    ({"tokenizer.ggml.token_type": [1, 2]}, "tokenizer.ggml.token_type is ndarray of 2"),
    ({"tokenizer.ggml.token_type": 3}, "tokenizer.ggml.token_type is 3"),
    ({"tokenizer.ggml.token_type": [1.0] * 304}, "tokenizer.ggml.token_type is ndarray of 304"),
    ({"tokenizer.ggml.merges": "a b"}, "tokenizer.ggml.merges is 'a b'"),
    ({"tokenizer.ggml.eos_token_id": 304}, "tokenizer.ggml.eos_token_id is 304"),
    ({"tokenizer.ggml.eot_token_id": Raw(5, b"\xff" * 4)}, "tokenizer.ggml.eot_token_id is -1"),
    ({"tokenizer.ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1"),
    ({"tokenizer.chat_template": 1}, "tokenizer.chat_template is 1"),
]


@pytest.mark.parametrize(("keys", "expected"), REFUSED_KEYS, ids=[expected for _, expected in REFUSED_KEYS])
def test_what_is_not_supported_is_refused_by_the_name_of_its_key(
    tmp_path: Path, keys: dict[str, object], expected: str
) -> None:
    with pytest.raises(ModelError) as refusal:
        opened(tmp_path, metadata=keys)
    assert expected in str(refusal.value)
    assert "tiny.Q8_0.gguf" in str(refusal.value)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(0, 2**64 - 1),
    st.integers(0, 400),
    st.floats(width=32),
    st.text(max_size=8),
    st.lists(st.integers(-1, 2**31 - 1), max_size=4),
    st.lists(st.text(max_size=4), max_size=4),
)
OPTIONAL_KEYS = (
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scale_linear",
)
KEYS = (*tiny_gguf_metadata(TinyShape()), *(f"llama.{key}" for key in OPTIONAL_KEYS), "general.alignment", "other")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=4))
def test_whatever_the_keys_say_a_model_opens_or_is_refused(tmp_path: Path, keys: dict[str, object]) -> None:
    try:
        model = opened(tmp_path, metadata=keys)
    except ModelError:
        return
    model.weights()
    assert all(math.isfinite(frequency) for frequency in model.spec.rope.frequencies())
    assert all(0 <= token < model.spec.vocab_size for token in model.end_ids)


def test_a_bias_is_refused_since_leaving_it_out_would_change_the_answers(tmp_path: Path) -> None:
    bias = from_f32(np.ones(128, np.float32), FORMATS["f32"])
    with pytest.raises(ModelError, match=r"tensor 'blk\.0\.attn_q\.bias' is not part of a model"):
        opened(tmp_path, tensors={"blk.0.attn_q.bias": bias})


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    wrong = from_f32(np.ones((64, 64), np.float32), FORMATS["f32"])
    with pytest.raises(ModelError, match=r"'blk\.1\.attn_k\.weight' has the shape \(64, 64\)") as refusal:
        opened(tmp_path, tensors={"blk.1.attn_k.weight": wrong}, shape=TinyShape(num_kv_heads=1))
    assert "asks for (32, 64)" in str(refusal.value)


@pytest.mark.parametrize("values", [[1.0] * 15 + [0.0], [1.0] * 15 + [np.nan], [1.0] * 8])
def test_rotary_factors_that_make_no_sense_are_refused(tmp_path: Path, values: list[float]) -> None:
    factors = from_f32(np.array(values, np.float32), FORMATS["f32"])
    with pytest.raises(ModelError, match=r"not positive|8 rotary factors for 16 pairs"):
        opened(tmp_path, tensors={ROPE_FREQS: factors})


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such file or directory"):
        open_model(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"has no config\.json and 0 GGUF files"):
        open_model(tmp_path)


def test_a_directory_with_one_gguf_stands_for_it(tmp_path: Path) -> None:
    path = write_tiny_llama_gguf(tmp_path / "only.gguf")
    assert open_model(tmp_path).path == path
    write_tiny_llama_gguf(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match="2 GGUF files"):
        open_model(tmp_path)
