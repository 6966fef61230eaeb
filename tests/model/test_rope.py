"""Rotary frequencies against transformers, and what the fields of both kinds of files mean."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.model.fields import Fields
from headrace.model.rope_files import rope_from_config, rope_from_gguf
from headrace.model.spec import RopeScaling, RopeSpec
from headrace.types import ModelError

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "rope.json").read_text("utf-8"))["cases"]
HEAD_DIM = 64


def from_config(config: dict[str, Any], max_len: int = 4096) -> RopeSpec:
    rope = rope_from_config(Fields("config.json", config), HEAD_DIM, max_len)
    rope.check("config.json", HEAD_DIM)
    return rope


def from_gguf(keys: dict[str, Any], factors: tuple[float, ...] = ()) -> RopeSpec:
    values = {f"llama.{key}": value for key, value in keys.items()}
    return rope_from_gguf(Fields("model.gguf", values, prefix="llama."), HEAD_DIM, 4096, factors)


@pytest.mark.parametrize("name", GOLDEN)
def test_frequencies_and_magnitude_are_those_of_transformers(name: str) -> None:
    golden = GOLDEN[name]
    rope = from_config(golden["config"], golden["max_len"])
    # transformers computes in float32: a few units in the last place
    np.testing.assert_allclose(rope.frequencies(), golden["frequencies"], rtol=1e-6)
    assert math.isclose(rope.magnitude(), golden["magnitude"], rel_tol=1e-7)


def test_scaling_without_an_original_context_stretches_the_models_own() -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0}
    assert from_config({"rope_scaling": scaling}, max_len=8192).original_max_len == 8192


def test_an_original_context_beside_the_scaling_table_wins() -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
    config = {"rope_scaling": scaling, "original_max_position_embeddings": 2048}
    assert from_config(config).original_max_len == 2048


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type is 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor is nan"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, "'mrope_section'"),
        ({"rope_scaling": {"rope_type": "default", "long_factor": [1.0]}}, "'long_factor'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "'full_attention'"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear"}}, "both rope_parameters"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0"),
        ({"partial_rotary_factor": 0.0}, "rotary dimension is 0"),
        ({"partial_rotary_factor": 0.05}, "rotary dimension is 3"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "low_freq_factor is 4.0",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 8.0, "beta_fast": 1.0, "beta_slow": 2.0}},
            "beta_slow 2.0",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_the_name_of_the_field(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=r"^config\.json") as refusal:
        from_config(config)
    assert named in str(refusal.value)


# GGUF -----------------------------------------------------------------------------------------------------------


def test_a_gguf_without_rope_keys_has_plain_rotary_embedding() -> None:
    assert from_gguf({}) == RopeSpec(HEAD_DIM, 10_000.0)


@pytest.mark.parametrize("keys", [{"rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}])
def test_a_factor_without_a_type_is_linear(keys: dict[str, Any]) -> None:
    assert from_gguf(keys) == RopeSpec(HEAD_DIM, 10_000.0, RopeScaling.LINEAR, 4.0)


def test_a_factor_of_0_or_the_type_none_is_no_scaling() -> None:
    assert from_gguf({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}).scaling is RopeScaling.NONE
    assert from_gguf({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}).scaling is RopeScaling.NONE


def test_llama3_scaling_written_as_factors_equals_the_rule_that_made_them() -> None:
    ruled = RopeSpec(HEAD_DIM, 500_000.0, RopeScaling.LLAMA3, 8.0, 8192)
    plain = RopeSpec(HEAD_DIM, 500_000.0)
    pairs = zip(plain.frequencies(), ruled.frequencies(), strict=True)
    factored = from_gguf({"rope.freq_base": 500_000.0}, tuple(before / after for before, after in pairs))
    np.testing.assert_allclose(factored.frequencies(), ruled.frequencies(), rtol=1e-14)


def test_yarn_of_a_gguf_equals_yarn_of_a_config() -> None:
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    gguf, config = from_gguf(keys), from_config({"rope_scaling": scaling})
    assert gguf.frequencies() == config.frequencies()
    assert gguf.magnitude() == config.magnitude()


def test_attn_factor_multiplies_the_magnitude_of_yarn() -> None:
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5}
    assert math.isclose(from_gguf(keys).magnitude(), 0.5 * (0.1 * math.log(4) + 1))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"rope.scaling.attn_factor": 1.2}, "rope.scaling.attn_factor is 1.2"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1"),
        ({"rope.freq_base": -1.0}, "rope.freq_base is -1.0"),
        ({"rope.dimension_count": 0}, "rope.dimension_count is 0"),
    ],
)
def test_keys_that_would_change_the_rotation_are_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as refusal:
        from_gguf(keys)
    assert named in str(refusal.value)


def test_factors_must_be_as_many_as_pairs() -> None:
    with pytest.raises(ModelError, match="3 rotary factors for 32 pairs"):
        from_gguf({}, (1.0, 2.0, 3.0)).check("model.gguf", HEAD_DIM)
