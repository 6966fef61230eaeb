"""Writes tests/golden/formats.json and rope.json: weight formats by the gguf package, rotary embedding by transformers.

    python tools/golden_formats.py

Needs gguf 0.19.0, torch and transformers 5.24.0; none of them is a dependency of headrace.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import numpy as np
import torch  # type: ignore[import-not-found]
from gguf import quants
from transformers import GlmConfig, LlamaConfig  # type: ignore[import-not-found]
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # type: ignore[import-not-found]
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding  # type: ignore[import-not-found]
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # type: ignore[import-not-found]

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
SHAPE = (4, 64)
HEAD_DIM = 64

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}

ROPE_CASES: dict[str, dict[str, Any]] = {
    "plain": {"rope_theta": 1e4},
    "plain, a quarter of the head": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "linear": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "factor": 8.0}},
    "llama3, factor 32": {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "factor": 32.0}},
    "llama3, half of the head": {
        "rope_theta": 5e5,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {**LLAMA3, "factor": 8.0},
    },
    "yarn": {"rope_theta": 1e4, "rope_scaling": {**YARN, "factor": 4.0}},
    "yarn, half of the head": {
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {**YARN, "factor": 4.0},
    },
    "yarn, not truncated": {"rope_theta": 1e6, "rope_scaling": {**YARN, "factor": 16.0, "truncate": False}},
    "yarn, mscale and mscale_all_dim": {
        "rope_theta": 1e4,
        "rope_scaling": {
            **YARN,
            "factor": 40.0,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    "yarn, mscale alone": {"rope_theta": 1e4, "rope_scaling": {**YARN, "factor": 40.0, "mscale": 0.707}},
    "yarn, attention_factor": {
        "rope_theta": 1e4,
        "rope_scaling": {**YARN, "factor": 8.0, "attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0},
    },
    "yarn, no factor": {"rope_theta": 1e4, "rope_scaling": {**YARN, "factor": None}},
    "new layout, yarn": {"rope_parameters": {**YARN, "rope_theta": 5e4, "factor": 4.0}},
    "new layout, plain": {"rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}},
}
MAX_LEN = 16384


def rope(fields: dict[str, Any]) -> dict[str, Any]:
    # transformers writes into the dictionaries that it is given
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD_DIM}
    config = LlamaConfig(**sizes, max_position_embeddings=MAX_LEN, **copy.deepcopy(fields))
    kind = config.rope_parameters["rope_type"]
    if kind != "default":
        frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    elif "partial_rotary_factor" in fields:  # of the plain embeddings, Llama's takes no notice of it and GLM's does
        glm = GlmConfig(**sizes, max_position_embeddings=MAX_LEN, **copy.deepcopy(fields))
        frequencies, magnitude = GlmRotaryEmbedding(glm).inv_freq, 1.0
    else:
        frequencies, magnitude = LlamaRotaryEmbedding(config).inv_freq, 1.0
    return {"config": fields, "max_len": MAX_LEN, "frequencies": frequencies.tolist(), "magnitude": float(magnitude)}


def as_hex(array: Any, dtype: str) -> str:
    return np.ascontiguousarray(array).astype(dtype).tobytes().hex()


def formats() -> dict[str, Any]:
    rng = np.random.default_rng(7)
    values = (rng.standard_normal(SHAPE) * [[1], [1e-3], [30], [0]]).astype(np.float32)
    found: dict[str, Any] = {}
    for name in ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"):
        kind = gguf.GGMLQuantizationType[name.upper()]
        packed = np.ascontiguousarray(quants.quantize(values, kind)).view(np.uint8)
        found[name] = {"packed": as_hex(packed, "u1"), "unpacked": as_hex(quants.dequantize(packed, kind), "<f4")}
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if block_values > 1:
            random = rng.integers(0, 256, size=packed.shape, dtype=np.uint8)
            scales = random.reshape(-1, block_bytes)[:, 1 : 4 if name == "q4_1" else 2 : 2]
            scales &= 0xBB  # the upper byte of an f16: not infinite, not a NaN
            found[name] |= {"random": as_hex(random, "u1")}
            found[name] |= {"random_unpacked": as_hex(quants.dequantize(random, kind), "<f4")}
    return {"shape": list(SHAPE), "values": as_hex(values, "<f4"), "formats": found}


def write(name: str, source: str, content: dict[str, Any]) -> None:
    text = json.dumps({"source": source, **content}, indent=1)
    (GOLDEN / name).write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    version = importlib.metadata.version
    write("formats.json", f"gguf {version('gguf')}: quants.quantize and dequantize; little-endian hex", formats())
    cases = {name: rope(fields) for name, fields in ROPE_CASES.items()}
    write("rope.json", f"transformers {version('transformers')}, float32, head_dim {HEAD_DIM}", {"cases": cases})
