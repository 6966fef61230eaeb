"""RopeSpec as model files describe it: config.json in its old and new layouts, and GGUF keys.

Owns the two vocabularies of fields. Refuses to know the arithmetic (spec.py).

Sources: transformers' modeling_rope_utils.py (5.24) for config.json; llama.cpp's llama-model.cpp, llama-context.cpp and
ggml's rope for what its keys mean.
"""

from __future__ import annotations

from headrace.model.fields import MAX_CONTEXT, MAX_SIZE, Fields
from headrace.model.spec import RopeScaling, RopeSpec, yarn_magnitude
from headrace.types import ModelError

MAX_FACTOR = 1e6
MIN_FACTOR = 1e-6
MIN_THETA = 1.000001  # a base of 1 or less turns every pair alike, and its logarithm divides
MAX_THETA = 1e15

# `type` and `finetuned` are what older files wrote: the former is `rope_type`, the latter changes nothing.
_SCALING_OF_TYPE = {
    "default": RopeScaling.NONE,
    "linear": RopeScaling.LINEAR,
    "llama3": RopeScaling.LLAMA3,
    "yarn": RopeScaling.YARN,
}


def rope_from_config(config: Fields, head_dim: int, max_len: int) -> RopeSpec:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` beside it (before)."""
    if "rope_parameters" in config and "rope_scaling" in config:
        raise ModelError(
            f"{config.source}: has both rope_parameters and rope_scaling; remove the one that is not meant"
        )
    fields = config.table("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    theta = fields.number(
        "rope_theta", MIN_THETA, MAX_THETA, config.number("rope_theta", MIN_THETA, MAX_THETA, 10_000.0)
    )
    part = fields.number("partial_rotary_factor", 0.0, 1.0, config.number("partial_rotary_factor", 0.0, 1.0, 1.0))
    scaling = _scaling(fields)
    plain = RopeSpec(dim=int(head_dim * part), theta=theta)
    match scaling:
        case RopeScaling.NONE:
            fields.value("factor", None)  # "default" takes no notice of one
            rope = plain
        case RopeScaling.LINEAR:
            rope = RopeSpec(plain.dim, theta, scaling, fields.number("factor", MIN_FACTOR, MAX_FACTOR))
        case RopeScaling.LLAMA3:
            rope = RopeSpec(
                plain.dim,
                theta,
                scaling,
                factor=fields.number("factor", MIN_FACTOR, MAX_FACTOR),
                original_max_len=_original_max_len(config, fields, max_len),
                low_freq_factor=fields.number("low_freq_factor", MIN_FACTOR, MAX_FACTOR),
                high_freq_factor=fields.number("high_freq_factor", MIN_FACTOR, MAX_FACTOR),
            )
        case RopeScaling.YARN:
            rope = _yarn_from_config(config, fields, plain, max_len)
    fields.value("finetuned", None)
    fields.refuse_unread(f"rotary scaling {scaling.value!r}")
    return rope


def _scaling(fields: Fields) -> RopeScaling:
    old, new = fields.text("type", None), fields.text("rope_type", None)
    name = new or old or "default"
    if name not in _SCALING_OF_TYPE:
        raise fields.refusal("rope_type" if new else "type", f"one of {', '.join(_SCALING_OF_TYPE)}")
    return _SCALING_OF_TYPE[name]


def _original_max_len(config: Fields, fields: Fields, max_len: int) -> int:
    """The trained context: beside the scaling table where it is there (it wins), in it, or the model's own."""
    within = fields.integer("original_max_position_embeddings", 1, MAX_CONTEXT, max_len)
    return config.integer("original_max_position_embeddings", 1, MAX_CONTEXT, within)


def _yarn_from_config(config: Fields, fields: Fields, plain: RopeSpec, max_len: int) -> RopeSpec:
    original = _original_max_len(config, fields, max_len)
    factor = fields.number("factor", MIN_FACTOR, MAX_FACTOR, None)
    if factor is None:
        factor = max_len / original
    weights = fields.number("mscale", 0.0, MAX_FACTOR, 0.0), fields.number("mscale_all_dim", 0.0, MAX_FACTOR, 0.0)
    inferred = yarn_magnitude(factor)
    if all(weights):
        inferred = yarn_magnitude(factor, weights[0]) / yarn_magnitude(factor, weights[1])
    return RopeSpec(
        plain.dim,
        plain.theta,
        RopeScaling.YARN,
        factor=factor,
        original_max_len=original,
        beta_fast=fields.number("beta_fast", MIN_FACTOR, MAX_FACTOR, 32.0),
        beta_slow=fields.number("beta_slow", MIN_FACTOR, MAX_FACTOR, 1.0),
        truncate=fields.boolean("truncate", True),
        attention_factor=fields.number("attention_factor", MIN_FACTOR, MAX_FACTOR, inferred),
    )


def rope_from_gguf(keys: Fields, head_dim: int, max_len: int, factors: tuple[float, ...]) -> RopeSpec:
    """From `<architecture>.rope.*`; `factors` are the values of the tensor `rope_freqs.weight`, if there is one."""
    dim = keys.integer("rope.dimension_count", 2, MAX_SIZE, head_dim)
    theta = keys.number("rope.freq_base", MIN_THETA, MAX_THETA, 10_000.0)
    factor = keys.number("rope.scaling.factor", 0.0, MAX_FACTOR, keys.number("rope.scale_linear", 0.0, MAX_FACTOR, 0.0))
    # llama.cpp: a factor alone is linear scaling, and a factor of 0 is none.
    kind = keys.text("rope.scaling.type", "linear" if factor else "none")
    original = keys.integer("rope.scaling.original_context_length", 1, MAX_CONTEXT, max_len)
    keys.value("rope.scaling.finetuned", None)  # says how the model was made, changes nothing
    if kind == "yarn":
        return _yarn_from_gguf(keys, RopeSpec(dim, theta, RopeScaling.YARN, factor or 1.0, original, factors=factors))
    keys.require("rope.scaling.attn_factor", 1.0, "only yarn scaling changes the magnitude here")
    if kind == "linear" and factor:
        return RopeSpec(dim, theta, RopeScaling.LINEAR, factor, factors=factors)
    if kind in ("none", "linear"):
        return RopeSpec(dim, theta, factors=factors)
    raise keys.refusal("rope.scaling.type", "one of none, linear, yarn")


def _yarn_from_gguf(keys: Fields, rope: RopeSpec) -> RopeSpec:
    keys.require("rope.scaling.yarn_ext_factor", 1.0, "other mixes of yarn are not supported")
    keys.require("rope.scaling.yarn_attn_factor", 1.0, "other magnitudes of yarn are not supported")
    keys.require("rope.scaling.yarn_log_multiplier", 0.0, "other magnitudes of yarn are not supported")
    return RopeSpec(
        rope.dim,
        rope.theta,
        rope.scaling,
        rope.factor,
        rope.original_max_len,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", MIN_FACTOR, MAX_FACTOR, rope.beta_fast),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", MIN_FACTOR, MAX_FACTOR, rope.beta_slow),
        attention_factor=yarn_magnitude(rope.factor)
        * keys.number("rope.scaling.attn_factor", MIN_FACTOR, MAX_FACTOR, 1.0),
        factors=rope.factors,
    )
