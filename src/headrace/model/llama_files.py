"""How Llama models lie in files: keys and tensor names of GGUF and of Hugging Face, and the order of rotary rows.

Owns the two tables of names and the readers of the spec. Refuses to know file formats (gguf.py, safetensors.py) and
what is done with the weights (llama.py).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from headrace.model.fields import MAX_CONTEXT, MAX_LAYERS, MAX_SIZE, Fields
from headrace.model.gguf import GgufFile
from headrace.model.llama import LlamaLayer, LlamaWeights
from headrace.model.rope_files import rope_from_config, rope_from_gguf
from headrace.model.spec import ModelSpec
from headrace.model.stored import StoredTensor
from headrace.model.weights import CheckedWeights, Wanted, check_tensors
from headrace.tensor import Tensor
from headrace.types import ModelError

ROPE_FREQS = "rope_freqs.weight"  # GGUF: what Llama 3's scaling divides each pair's frequency by

# `{}` is the layer's number.
GGUF_NAMES: LlamaWeights[str] = LlamaWeights(
    embedding="token_embd.weight",
    layers=(
        LlamaLayer(
            attention_norm="blk.{}.attn_norm.weight",
            q="blk.{}.attn_q.weight",
            k="blk.{}.attn_k.weight",
            v="blk.{}.attn_v.weight",
            o="blk.{}.attn_output.weight",
            mlp_norm="blk.{}.ffn_norm.weight",
            gate="blk.{}.ffn_gate.weight",
            up="blk.{}.ffn_up.weight",
            down="blk.{}.ffn_down.weight",
        ),
    ),
    norm="output_norm.weight",
    head="output.weight",
)
HF_NAMES: LlamaWeights[str] = LlamaWeights(
    embedding="model.embed_tokens.weight",
    layers=(
        LlamaLayer(
            attention_norm="model.layers.{}.input_layernorm.weight",
            q="model.layers.{}.self_attn.q_proj.weight",
            k="model.layers.{}.self_attn.k_proj.weight",
            v="model.layers.{}.self_attn.v_proj.weight",
            o="model.layers.{}.self_attn.o_proj.weight",
            mlp_norm="model.layers.{}.post_attention_layernorm.weight",
            gate="model.layers.{}.mlp.gate_proj.weight",
            up="model.layers.{}.mlp.up_proj.weight",
            down="model.layers.{}.mlp.down_proj.weight",
        ),
    ),
    norm="model.norm.weight",
    head="lm_head.weight",
)


# The spec -------------------------------------------------------------------------------------------------------


def spec_from_config(config: Fields) -> ModelSpec:
    """From config.json of `model_type` llama; defaults are transformers' LlamaConfig's."""
    if config.text("hidden_act", "silu") not in ("silu", "swish"):  # two names of one function
        raise config.refusal("hidden_act", "silu; no other activation is supported")
    if any(kind != "full_attention" for kind in config.texts("layer_types")):
        raise config.refusal("layer_types", "full_attention throughout")
    config.require("attention_bias", False, "biases are not supported")
    config.require("mlp_bias", False, "biases are not supported")
    config.require("rope_interleaved", False, "the rows of q and k must be in Hugging Face's order")
    # How the training was cut up; a note; and the trained context where no scaling asks for it.
    config.ignore(("pretraining_tp", "is_llama_config", "original_max_position_embeddings"))
    hidden_size = config.integer("hidden_size", 1, MAX_SIZE)
    num_heads = config.integer("num_attention_heads", 1, MAX_SIZE)
    head_dim = config.integer("head_dim", 1, MAX_SIZE, hidden_size // num_heads)
    max_len = config.integer("max_position_embeddings", 1, MAX_CONTEXT, 2048)
    rope = rope_from_config(config, head_dim, max_len)
    spec = ModelSpec(
        architecture="llama",
        vocab_size=config.integer("vocab_size", 1, MAX_SIZE),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", 1, MAX_SIZE),
        num_layers=config.integer("num_hidden_layers", 1, MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", 1, MAX_SIZE, num_heads),
        head_dim=head_dim,
        max_len=min(max(max_len, rope.stretched_len), MAX_CONTEXT),
        norm_eps=config.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        rope=rope,
        is_embedding_tied=config.boolean("tie_word_embeddings", False),
    )
    spec.check(config.source)
    return spec


def spec_from_gguf(file: GgufFile) -> ModelSpec:
    """From the keys `llama.*`, every one of which must be understood."""
    keys = Fields(str(file.path), file.metadata, prefix="llama.")
    keys.value("tensor_data_layout", None)  # a note of old converters, changes nothing
    keys.require("expert_count", 0, "mixtures of experts are not supported")
    keys.require("expert_used_count", 0, "mixtures of experts are not supported")
    hidden_size = keys.integer("embedding_length", 1, MAX_SIZE)
    num_heads = keys.integer("attention.head_count", 1, MAX_SIZE)
    head_dim = keys.integer("attention.key_length", 1, MAX_SIZE, hidden_size // num_heads)
    keys.require("attention.value_length", head_dim, "values must be as long as keys")
    max_len = keys.integer("context_length", 1, MAX_CONTEXT)
    rope = rope_from_gguf(keys, head_dim, max_len, _rope_factors(file))
    spec = ModelSpec(
        architecture="llama",
        vocab_size=_gguf_vocab_size(file, keys),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length", 1, MAX_SIZE),
        num_layers=keys.integer("block_count", 1, MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", 1, MAX_SIZE, num_heads),
        head_dim=head_dim,
        max_len=min(max(max_len, rope.stretched_len), MAX_CONTEXT),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        rope=rope,
        is_embedding_tied=GGUF_NAMES.head not in file.tensors,
    )
    keys.refuse_unread("architecture 'llama'")
    spec.check(str(file.path))
    return spec


def _gguf_vocab_size(file: GgufFile, keys: Fields) -> int:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, tuple) else None
    vocab_size = keys.integer("vocab_size", 1, MAX_SIZE, num_tokens)
    if vocab_size is None:
        raise ModelError(f"{file.path}: neither llama.vocab_size nor tokenizer.ggml.tokens is there")
    return vocab_size


def _rope_factors(file: GgufFile) -> tuple[float, ...]:
    if (stored := file.tensors.get(ROPE_FREQS)) is None:
        return ()
    if stored.dtype != "f32" or len(stored.shape) != 1 or stored.shape[0] > MAX_SIZE:
        raise ModelError(f"{file.path}: tensor {ROPE_FREQS!r} must be a row of f32, not {stored.dtype} {stored.shape}")
    factors = tuple(stored.tensor().to_f32().tolist())
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ModelError(f"{file.path}: tensor {ROPE_FREQS!r} holds a factor that is not positive")
    return factors


# The weights ----------------------------------------------------------------------------------------------------

_PARTS = tuple(field.name for field in dataclasses.fields(LlamaLayer))


def wanted(spec: ModelSpec, names: LlamaWeights[str]) -> LlamaWeights[Wanted]:
    """The tensors that a model of this spec has, under a source's names."""
    hidden, wide = (spec.hidden_size,), spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: LlamaLayer[tuple[int, ...]] = LlamaLayer(
        attention_norm=hidden,
        q=(q_rows, *hidden),
        k=(kv_rows, *hidden),
        v=(kv_rows, *hidden),
        o=(*hidden, q_rows),
        mlp_norm=hidden,
        gate=(wide, *hidden),
        up=(wide, *hidden),
        down=(*hidden, wide),
    )
    (template,) = names.layers
    embedding = Wanted(names.embedding, (spec.vocab_size, *hidden))
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(
            LlamaLayer(**{part: Wanted(getattr(template, part).format(i), getattr(shapes, part)) for part in _PARTS})
            for i in range(spec.num_layers)
        ),
        norm=Wanted(names.norm, hidden),
        head=embedding if spec.is_embedding_tied else Wanted(names.head, embedding.shape),
    )


def weights_from_config(source: str, spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> CheckedWeights:
    """Check the tensors of a Hugging Face directory; nothing is read before `load`."""
    # Old checkpoints keep the rotary frequencies; some tied ones keep the head, which transformers ignores as well.
    harmless = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|lm_head\.weight").fullmatch
    want = wanted(spec, HF_NAMES)
    num_bytes = check_tensors(source, stored, each_tensor(want), lambda name: harmless(name) is not None)
    return CheckedWeights(lambda: _load(stored, want), num_bytes)


def weights_from_gguf(source: str, spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> CheckedWeights:
    """Check the tensors of a GGUF file; `load` says in which order the rows of q and k go."""
    want = wanted(spec, GGUF_NAMES)
    num_bytes = check_tensors(source, stored, each_tensor(want), lambda name: name == ROPE_FREQS)
    q_order = half_split_order(spec.num_heads, spec.head_dim, spec.rope.dim)
    k_order = half_split_order(spec.num_kv_heads, spec.head_dim, spec.rope.dim)

    def load() -> LlamaWeights[Tensor]:
        weights = _load(stored, want)
        layers = tuple(
            dataclasses.replace(layer, q=layer.q.rows(q_order), k=layer.k.rows(k_order)) for layer in weights.layers
        )
        return dataclasses.replace(weights, layers=layers)

    return CheckedWeights(load, num_bytes)


def half_split_order(num_heads: int, head_dim: int, rotary_dim: int) -> npt.NDArray[np.intp]:
    """Where each row of q or k comes from in a GGUF file, whose rotary pairs are (2i, 2i + 1), not (i, i + dim/2).

    Within each head the even rows of the rotary part come first, then the odd ones, then what is not rotated. Whole
    rows move, so quantized blocks stay as they are.
    """
    rotary = np.arange(rotary_dim).reshape(-1, 2).T.reshape(-1)
    head = np.concatenate([rotary, np.arange(rotary_dim, head_dim)])
    order: npt.NDArray[np.intp] = (np.arange(num_heads)[:, None] * head_dim + head).reshape(-1)
    return order


def each_tensor(want: LlamaWeights[Wanted]) -> Iterator[Wanted]:
    yield from (want.embedding, want.norm, want.head)
    for layer in want.layers:
        yield from (getattr(layer, part) for part in _PARTS)


def _load(stored: Mapping[str, StoredTensor], want: LlamaWeights[Wanted]) -> LlamaWeights[Tensor]:
    def tensor(wanted: Wanted) -> Tensor:
        return stored[wanted.name].tensor()

    embedding = tensor(want.embedding)
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(LlamaLayer(**{part: tensor(getattr(layer, part)) for part in _PARTS}) for layer in want.layers),
        norm=tensor(want.norm),
        head=embedding if want.head == want.embedding else tensor(want.head),
    )
