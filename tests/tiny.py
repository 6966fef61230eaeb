"""Tiny random Llama models in every form that headrace reads, with a byte-level BPE tokenizer of 304 tokens.

The same shape and seed give the same model, whether written as GGUF or as a Hugging Face directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gguf_writer import write_gguf
from headrace.tensor import FORMATS, Tensor, from_f32

F32 = npt.NDArray[np.float32]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
END_IDS = frozenset({0, 2})
NORM_EPS = 2.0**-17  # near 1e-5, and the same number in f32 and in JSON

# In the order in which they were learned, as BPE needs them; "Ġ" is a space.
_LEARNED = (
    "Ġ t|h e|i n|Ġ a|o n|r e|Ġt he|e r|a t|Ġ s|o u|n d|Ġ w|i s|o r|e n|Ġ c|i t|in g|Ġ b|e s|Ġ o|Ġ f|Ġa nd|a n|Ġ p|"
    "Ġ m|Ġt o|e d|l l|a r|Ġo f|a l|Ġ in|Ġ d|l e|i c|Ġ h|Ġ is|Ġ 1|o m|s t|e l|l o|Ġ I"
)
MERGES = tuple(_LEARNED.split("|"))

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_letters() -> tuple[str, ...]:
    """GPT-2's letter for each byte: itself if printable, else the next unused code point from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return tuple(chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256))


TOKENS = (*SPECIAL_TOKENS, *byte_letters(), *(merge.replace(" ", "") for merge in MERGES))
TOKEN_TYPES = (3,) * len(SPECIAL_TOKENS) + (1,) * (len(TOKENS) - len(SPECIAL_TOKENS))  # control, normal
VOCAB_SIZE = len(TOKENS)


@dataclass(frozen=True)
class TinyShape:
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32  # num_heads * head_dim need not be hidden_size
    max_len: int = 512
    is_embedding_tied: bool = True


def tiny_weights(shape: TinyShape, seed: int) -> dict[str, F32]:
    """Every tensor under its Hugging Face name: [out, in] f32, of a spread that keeps logits apart."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> F32:
        return (rng.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns)).astype(np.float32)

    def norm() -> F32:
        return (1 + 0.1 * rng.standard_normal(shape.hidden_size)).astype(np.float32)

    q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    weights = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, shape.hidden_size) * np.float32(4)}
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}"
        weights[f"{layer}.input_layernorm.weight"] = norm()
        weights[f"{layer}.self_attn.q_proj.weight"] = matrix(q_rows, shape.hidden_size)
        weights[f"{layer}.self_attn.k_proj.weight"] = matrix(kv_rows, shape.hidden_size)
        weights[f"{layer}.self_attn.v_proj.weight"] = matrix(kv_rows, shape.hidden_size)
        weights[f"{layer}.self_attn.o_proj.weight"] = matrix(shape.hidden_size, q_rows)
        weights[f"{layer}.post_attention_layernorm.weight"] = norm()
        weights[f"{layer}.mlp.gate_proj.weight"] = matrix(shape.intermediate_size, shape.hidden_size)
        weights[f"{layer}.mlp.up_proj.weight"] = matrix(shape.intermediate_size, shape.hidden_size)
        weights[f"{layer}.mlp.down_proj.weight"] = matrix(shape.hidden_size, shape.intermediate_size)
    weights["model.norm.weight"] = norm()
    if not shape.is_embedding_tied:
        weights["lm_head.weight"] = matrix(VOCAB_SIZE, shape.hidden_size)
    return weights


def _encode(values: F32, fmt: str) -> Tensor:
    return from_f32(values, FORMATS["f32" if values.ndim == 1 and FORMATS[fmt].block_values > 1 else fmt])


# GGUF -----------------------------------------------------------------------------------------------------------

_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` -> `blk.0.ffn_up.weight`."""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        number, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{number}.{_GGUF_PARTS[part]}.weight"
    return f"{_GGUF_PARTS[stem]}.weight"


def interleave_rotary_rows(matrix: F32, num_heads: int) -> F32:
    """Rows of q or k as GGUF's converter writes them: pairs (i, i + d/2) of a head become (2i, 2i + 1)."""
    rows, columns = matrix.shape
    return matrix.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def tiny_gguf_metadata(shape: TinyShape) -> dict[str, object]:
    return {
        "general.architecture": "llama",
        "general.name": "Tiny",
        "general.license": "apache-2.0",
        "llama.block_count": shape.num_layers,
        "llama.context_length": shape.max_len,
        "llama.embedding_length": shape.hidden_size,
        "llama.feed_forward_length": shape.intermediate_size,
        "llama.attention.head_count": shape.num_heads,
        "llama.attention.head_count_kv": shape.num_kv_heads,
        "llama.attention.key_length": shape.head_dim,
        "llama.attention.value_length": shape.head_dim,
        "llama.attention.layer_norm_rms_epsilon": NORM_EPS,
        "llama.rope.dimension_count": shape.head_dim,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": VOCAB_SIZE,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TOKEN_TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def tiny_gguf_tensors(shape: TinyShape, fmt: str, seed: int) -> dict[str, Tensor]:
    heads = {"q_proj": shape.num_heads, "k_proj": shape.num_kv_heads}
    tensors: dict[str, Tensor] = {}
    for name, values in tiny_weights(shape, seed).items():
        part = name.split(".")[-2]
        stored = interleave_rotary_rows(values, heads[part]) if part in heads else values
        tensors[gguf_name(name)] = _encode(stored, fmt)
    return tensors


def write_tiny_llama_gguf(
    path: Path,
    *,
    fmt: str = "q8_0",
    shape: TinyShape | None = None,
    seed: int = 0,
    metadata: Mapping[str, object] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write the model to `path`. `metadata` changes or adds keys (None removes one), `tensors` adds tensors."""
    shape = shape or TinyShape()
    keys = {**tiny_gguf_metadata(shape), **(metadata or {})}
    present = {key: item for key, item in keys.items() if item is not None}
    return write_gguf(path, present, {**tiny_gguf_tensors(shape, fmt, seed), **(tensors or {})})


# Hugging Face ---------------------------------------------------------------------------------------------------


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        offsets = [at, at + tensor.nbytes]
        header[name] = {"dtype": tensor.format.name.upper(), "shape": list(tensor.shape), "data_offsets": offsets}
        at += tensor.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.unlink(missing_ok=True)  # never overwritten in place: an earlier map of it may be alive
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(t.data.tobytes() for t in tensors.values()))
    return path


def tiny_config(shape: TinyShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_len,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": shape.is_embedding_tied,
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
    }


def tiny_tokenizer() -> dict[str, object]:
    """tokenizer.json: the same tokenizer as the GGUF file's (`smollm`: single digits, then bytes)."""
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, token in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(TOKENS)},
            "merges": list(MERGES),
        },
    }


def write_tiny_llama_hf(
    directory: Path,
    *,
    fmt: str = "bf16",
    shape: TinyShape | None = None,
    seed: int = 0,
    num_shards: int = 1,
    config: Mapping[str, object] | None = None,
) -> Path:
    """Write the model into `directory` (made if need be). `config` changes or adds fields of config.json."""
    shape = shape or TinyShape()
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: _encode(values, fmt) for name, values in tiny_weights(shape, seed).items()}
    if num_shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
    else:
        _write_shards(directory, tensors, num_shards)
    documents: dict[str, object] = {
        "config.json": {**tiny_config(shape), **(config or {})},
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": sorted(END_IDS)},
        "tokenizer.json": tiny_tokenizer(),
        "tokenizer_config.json": {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "pad_token": "<|im_end|>",
            "add_bos_token": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document), encoding="utf-8")
    return directory


def _write_shards(directory: Path, tensors: Mapping[str, Tensor], num_shards: int) -> None:
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(num_shards):
        shard = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        part = names[i::num_shards]
        write_safetensors(directory / shard, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
