"""The independent implementation that golden figures come from: Hugging Face transformers on dequantized weights.

A developer's tool: needs a venv with torch 2.13.0 (CPU), transformers, accelerate and gguf; the project depends on
none of them. Knows how to load the oracle and how to prove that its weights are the file's; not what is asked of it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import numpy as np
import tokenizers
import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]
from tokenizers import pre_tokenizers

SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def check_is_smollm2(path: Path) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SMOLLM2_SHA256:
        raise SystemExit(f"{path} has the SHA-256 {digest}; the golden figures are of {SMOLLM2_SHA256}")


def load_model(path: Path) -> Any:
    """The Llama model of a GGUF file in float32, after checking that its weights are gguf's own dequantization."""
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    check_weights(model, path)
    return model


def dequantize(path: Path) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Every tensor of a Llama GGUF by its Hugging Face name, in float32, rotary rows in Hugging Face's order."""
    reader = gguf.GGUFReader(str(path))
    heads = {
        "attn_q": reader.fields["llama.attention.head_count"].contents(),
        "attn_k": reader.fields["llama.attention.head_count_kv"].contents(),
    }
    named = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        match tensor.name.split("."):
            case ["token_embd", "weight"]:
                named["model.embed_tokens.weight"] = values
            case ["output_norm", "weight"]:
                named["model.norm.weight"] = values
            case ["output", "weight"]:
                named["lm_head.weight"] = values
            case ["blk", layer, kind, "weight"]:
                if kind in heads:  # GGUF keeps rotary pairs next to each other, Hugging Face half a head apart
                    rows, columns = values.shape
                    pairs = values.reshape(heads[kind], rows // heads[kind] // 2, 2, columns)
                    values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))
                named[f"model.layers.{layer}.{GGUF_LAYER_NAMES[kind]}.weight"] = values
            case _:
                raise SystemExit(f"{path}: no Hugging Face name is known for the tensor {tensor.name}")
    return named


def check_weights(model: Any, path: Path) -> None:
    weights = model.state_dict()
    for name, values in dequantize(path).items():
        if not np.array_equal(weights[name].numpy(), values):
            raise SystemExit(f"transformers and gguf dequantize {name} differently")


def control_tokens(path: Path) -> list[str]:
    fields = gguf.GGUFReader(str(path)).fields
    types = fields["tokenizer.ggml.token_type"].contents()
    tokens = fields["tokenizer.ggml.tokens"].contents()
    return [token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL]


def load_tokenizer(path: Path) -> Any:
    """transformers' tokenizer of a SmolLM2 GGUF, with the two things that its conversion leaves out.

    The conversion ignores `tokenizer.ggml.pre` (`smollm` splits off each digit before the byte-level split) and makes
    special tokens of the begin, end and unknown ids alone, not of every id whose type is control.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.add_special_tokens(control_tokens(path))
    if backend.encode("a  1b2", add_special_tokens=False).ids != [81, 256, 33, 82, 34]:
        raise SystemExit(f"transformers {transformers.__version__} builds another tokenizer than the one known")
    return tokenizer
