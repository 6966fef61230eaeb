"""Hugging Face directories as models: every file beside the weights, and what is refused."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.model import GenerationDefaults, ModelFiles, TokenizerFile, open_model
from headrace.model.fields import MAX_JSON_BYTES
from headrace.model.spec import RopeScaling
from headrace.tensor import FORMATS, from_f32
from headrace.types import ModelError
from tiny import (
    CHAT_TEMPLATE,
    TinyShape,
    tiny_config,
    tiny_weights,
    write_safetensors,
    write_tiny_llama_gguf,
    write_tiny_llama_hf,
)


def opened(directory: Path, **config: object) -> ModelFiles:
    return open_model(write_tiny_llama_hf(directory / "tiny", config=config))


def change(directory: Path, name: str, **fields: object) -> None:
    """Change fields of a JSON file of the tiny model."""
    path = directory / "tiny" / name
    before = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**before, **fields}), encoding="utf-8")


def reopened(directory: Path) -> ModelFiles:
    return open_model(directory / "tiny")


def tokenizer_of(model: ModelFiles) -> TokenizerFile:
    assert isinstance(model.vocabulary, TokenizerFile)
    return model.vocabulary


# What is read ---------------------------------------------------------------------------------------------------


def test_a_directory_and_a_gguf_of_the_same_model_give_the_same_spec_and_weights(tmp_path: Path) -> None:
    directory = open_model(write_tiny_llama_hf(tmp_path / "hf", fmt="f32", seed=5, num_shards=3))
    gguf = open_model(write_tiny_llama_gguf(tmp_path / "tiny.gguf", fmt="f32", seed=5))
    assert directory.spec == gguf.spec
    assert directory.end_ids == gguf.end_ids
    for ours, theirs in zip(directory.weights().layers, gguf.weights().layers, strict=True):
        for part in ("attention_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down"):
            np.testing.assert_array_equal(getattr(ours, part).to_f32(), getattr(theirs, part).to_f32())


def test_a_short_config_has_transformers_defaults(tmp_path: Path) -> None:
    names = ("head_dim", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "rope_theta", "hidden_act")
    shape = TinyShape(num_heads=4, num_kv_heads=4, head_dim=16, is_embedding_tied=False)
    fields = dict.fromkeys((*names, "tie_word_embeddings", "attention_bias"))
    spec = open_model(write_tiny_llama_hf(tmp_path / "tiny", shape=shape, config=fields)).spec
    assert (spec.head_dim, spec.num_kv_heads, spec.norm_eps, spec.max_len) == (16, 4, 1e-6, 2048)
    assert (spec.rope.theta, spec.is_embedding_tied) == (10_000.0, False)


def test_rotary_scaling_is_read_in_both_layouts(tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 256}
    old = opened(tmp_path, rope_scaling=llama3, rope_theta=5e5).spec.rope
    new = opened(tmp_path, rope_parameters={**llama3, "rope_theta": 5e5}, rope_theta=None).spec.rope
    assert old == new
    assert (new.scaling, new.original_max_len, new.theta) == (RopeScaling.LLAMA3, 256, 5e5)


def test_yarn_stretches_a_context_that_the_config_still_gives_unstretched(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert opened(tmp_path, rope_scaling=yarn, max_position_embeddings=512).spec.max_len == 2048
    assert opened(tmp_path, rope_scaling=yarn, max_position_embeddings=4096).spec.max_len == 4096


def test_a_file_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    path = tmp_path / "tiny" / "model.safetensors"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelError, match="is not a regular file"):
        reopened(tmp_path)


def test_the_tokenizer_is_a_file_and_what_its_config_says(tmp_path: Path) -> None:
    opened(tmp_path)
    eos = {"content": "<|im_end|>", "lstrip": False, "special": True}
    change(tmp_path, "tokenizer_config.json", eos_token=eos, unk_token=None, add_bos_token=True)
    assert tokenizer_of(reopened(tmp_path)) == TokenizerFile(
        path=tmp_path / "tiny" / "tokenizer.json",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token=None,
        pad_token="<|im_end|>",
        add_bos=True,
        add_eos=None,
    )


def test_a_directory_without_optional_files_opens(tmp_path: Path) -> None:
    opened(tmp_path)
    for name in ("generation_config.json", "tokenizer_config.json"):
        (tmp_path / "tiny" / name).unlink()
    model = reopened(tmp_path)
    assert (model.end_ids, model.chat_template, model.license) == ({2}, None, None)
    assert model.generation_defaults == GenerationDefaults()
    assert tokenizer_of(model).bos_token is None


def test_end_tokens_are_gathered_from_all_files(tmp_path: Path) -> None:
    opened(tmp_path, eos_token_id=[5, 6])
    change(tmp_path, "generation_config.json", eos_token_id=7)
    change(tmp_path, "tokenizer_config.json", added_tokens_decoder={"2": {"content": "<|im_end|>"}, "1": {}})
    assert reopened(tmp_path).end_ids == {2, 5, 6, 7}


def test_sampling_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    opened(tmp_path)
    said = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
    change(tmp_path, "generation_config.json", do_sample=True, **said)
    assert reopened(tmp_path).generation_defaults == GenerationDefaults(0.6, 20, 0.9, 0.05, 1.1)


def test_a_model_whose_authors_do_not_sample_is_greedy_by_default(tmp_path: Path) -> None:
    opened(tmp_path)
    change(tmp_path, "generation_config.json", do_sample=False)
    assert reopened(tmp_path).generation_defaults.temperature == 0.0


def test_the_chat_template_is_a_string_a_named_one_or_a_file_of_its_own(tmp_path: Path) -> None:
    assert opened(tmp_path).chat_template == CHAT_TEMPLATE
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    change(tmp_path, "tokenizer_config.json", chat_template=named)
    assert reopened(tmp_path).chat_template == "D"
    (tmp_path / "tiny" / "chat_template.jinja").write_text("J é", encoding="utf-8")
    assert reopened(tmp_path).chat_template == "J é"


def test_the_licence_is_the_model_cards(tmp_path: Path) -> None:
    opened(tmp_path)
    card = tmp_path / "tiny" / "README.md"
    for text, expected in (
        ("---\ntags: [x]\nlicense: apache-2.0\n---\nlicense: no\n", "apache-2.0"),
        ("---\ntags: [x]\n---\nlicense: no\n", None),
        ("license: no\n", None),
        ("", None),
    ):
        card.write_text(text, encoding="utf-8")
        assert reopened(tmp_path).license == expected


@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16"])
def test_weights_are_views_in_the_format_they_are_stored_in(tmp_path: Path, fmt: str) -> None:
    weights = open_model(write_tiny_llama_hf(tmp_path / "tiny", fmt=fmt, seed=2)).weights()
    expected = tiny_weights(TinyShape(), seed=2)["model.layers.1.self_attn.k_proj.weight"]
    assert weights.layers[1].k.format.name == fmt
    assert not weights.layers[1].k.data.flags.owndata
    np.testing.assert_array_equal(weights.layers[1].k.to_f32(), from_f32(expected, FORMATS[fmt]).to_f32())


def test_what_old_checkpoints_keep_beside_the_weights_is_no_harm(tmp_path: Path) -> None:
    model = opened(tmp_path)
    tensors = {name: from_f32(values, FORMATS["f32"]) for name, values in tiny_weights(TinyShape(), 0).items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = from_f32(np.ones(16), FORMATS["f32"])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # tied, and saved all the same
    write_safetensors(model.path / "model.safetensors", tensors)
    again = reopened(tmp_path)
    weights = again.weights()
    assert weights.head is weights.embedding
    assert again.weight_bytes == 4 * again.parameters


def test_fields_that_change_no_answer_are_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notes = {"pretraining_tp": 1, "torch_dtype": "bfloat16", "is_llama_config": True, "rope_interleaved": False}
    opened(tmp_path, **notes, use_cache=True, transformers_version="4.42.3", max_length=20, sliding_window=None)
    change(tmp_path, "generation_config.json", num_beams=1, transformers_version="4.42.3", suppress_tokens=None)
    reopened(tmp_path)
    neutral = {"is_encoder_decoder": False, "pruned_heads": {}, "bias": False, "use_sliding_window": False}
    change(tmp_path, "config.json", **neutral, hidden_act="swish", layer_types=["full_attention"] * 2, is_decoder=False)
    reopened(tmp_path)
    assert not caplog.records


def test_wishes_that_are_not_honoured_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(tmp_path)
    change(tmp_path, "generation_config.json", suppress_tokens=[1], no_repeat_ngram_size=3, max_new_tokens=9, top_k=40)
    change(tmp_path, "config.json", temperature=0.5)
    reopened(tmp_path)
    first, second = (record.getMessage() for record in caplog.records)
    assert "generation_config.json: not honoured: 'max_new_tokens', 'no_repeat_ngram_size', 'suppress_tokens'" in first
    assert "config.json: not honoured: 'temperature'" in second


# What is refused ------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gemma3_text"}, "model_type is 'gemma3_text'; it must be one that is supported: llama"),
    ({"model_type": None}, "model_type is missing"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"use_sliding_window": True}, "use_sliding_window is True"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is list of 2"),
    ({"layer_types": 5}, "layer_types is 5"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "64"}, "hidden_size is '64'"),
    ({"hidden_size": 64.0}, "hidden_size is 64.0"),
    ({"hidden_size": -1}, "hidden_size is -1"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ({"num_key_value_heads": 3}, "4 heads cannot share 3 KV heads evenly"),
    ({"rms_norm_eps": True}, "rms_norm_eps is True"),
    ({"vocab_size": 303}, "'model.embed_tokens.weight' has the shape (304, 64); the spec asks for (303, 64)"),
    ({"tie_word_embeddings": False}, "tensor 'lm_head.weight' is missing"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ({"eos_token_id": 304}, "eos_token_id is 304"),
    ({"eos_token_id": [2, "3"]}, "eos_token_id is list of 2"),
    ({"eos_token_id": [2] * 100}, "eos_token_id is list of 100"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
    ({"rope_scaling": []}, "rope_scaling is list of 0"),
    ({"rope_interleaved": True}, "rope_interleaved is True"),
    ({"sliding_window": 128}, "architecture 'llama' does not support the field 'sliding_window'"),
    ({"logits_scaling": 8.0}, "architecture 'llama' does not support the field 'logits_scaling'"),
]


@pytest.mark.parametrize(("config", "expected"), REFUSED, ids=[expected for _, expected in REFUSED])
def test_what_is_not_supported_is_refused_by_the_name_of_its_field(
    tmp_path: Path, config: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ModelError) as refusal:
        opened(tmp_path, **config)
    assert expected in str(refusal.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 400) | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)
ROPE_FIELDS = ("type", "factor", "original_max_position_embeddings", "low_freq_factor", "mscale", "truncate")
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "llama3", "yarn"])},
    optional=dict.fromkeys(ROPE_FIELDS, st.floats(0.5, 500) | JSON),
)
CONFIG = st.dictionaries(st.sampled_from(sorted(tiny_config(TinyShape()))), JSON, max_size=1)
GENERATION = st.dictionaries(st.sampled_from(["eos_token_id", "do_sample", "temperature", "top_k"]), JSON, max_size=1)
TOKENIZER = st.dictionaries(st.sampled_from(["bos_token", "eos_token", "chat_template"]), JSON, max_size=1)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=CONFIG, rope=ROPE | JSON, generation=GENERATION, tokenizer=TOKENIZER)
def test_whatever_the_files_say_a_model_opens_or_is_refused(
    tmp_path: Path, config: dict[str, Any], rope: Any, generation: dict[str, Any], tokenizer: dict[str, Any]
) -> None:
    if not (tmp_path / "tiny").exists():
        opened(tmp_path)
    change(tmp_path, "config.json", **{**tiny_config(TinyShape()), "rope_scaling": rope, **config})
    (tmp_path / "tiny" / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "tiny" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    try:
        model = reopened(tmp_path)
    except ModelError:
        return
    assert all(math.isfinite(frequency) for frequency in model.spec.rope.frequencies())
    assert all(0 <= token < model.spec.vocab_size for token in model.end_ids)


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("generation_config.json", {"temperature": "hot"}, "temperature is 'hot'"),
        ("generation_config.json", {"top_p": 0}, "top_p is 0"),
        ("generation_config.json", {"top_k": -5}, "top_k is -5"),
        ("generation_config.json", {"eos_token_id": {}}, "eos_token_id is dict of 0"),
        ("tokenizer_config.json", {"bos_token": 1}, "bos_token is 1"),
        ("tokenizer_config.json", {"bos_token": {"text": "x"}}, "content is missing"),
        ("tokenizer_config.json", {"chat_template": 1}, "chat_template is 1"),
        ("tokenizer_config.json", {"chat_template": ["x"]}, "chat_template is list of 1"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, "template is missing"),
        ("tokenizer_config.json", {"chat_template": "\ud800"}, "chat_template is '\\ud800'"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, "added_tokens_decoder is list of 0"),
    ],
)
def test_other_files_are_checked_as_well(tmp_path: Path, name: str, fields: dict[str, Any], expected: str) -> None:
    opened(tmp_path)
    change(tmp_path, name, **fields)
    with pytest.raises(ModelError) as refusal:
        reopened(tmp_path)
    assert expected in str(refusal.value)
    assert name in str(refusal.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"a": Infinity}', b"[" * 100_000, b'{"a":1,"a":1}'])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    opened(tmp_path)
    (tmp_path / "tiny" / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        reopened(tmp_path)


def test_a_huge_config_is_refused_unread(tmp_path: Path) -> None:
    opened(tmp_path)
    (tmp_path / "tiny" / "config.json").write_bytes(b" " * (MAX_JSON_BYTES + 1))
    with pytest.raises(ModelError, match="is longer than 8388608 bytes"):
        reopened(tmp_path)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    (tmp_path / "tiny" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        reopened(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "README.md"])
def test_no_file_may_be_a_link_out_of_the_directory(tmp_path: Path, name: str) -> None:
    opened(tmp_path)
    (tmp_path / "secret").write_text("{}", encoding="utf-8")
    (tmp_path / "tiny" / name).unlink(missing_ok=True)
    (tmp_path / "tiny" / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError, match="a link that leads out of the directory"):
        reopened(tmp_path)
