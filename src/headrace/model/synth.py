"""Models of real shapes with random weights: for measuring speed, where what is said does not matter.

Owns the table of shapes, the random bytes of each format and a vocabulary that loads. The same name, format and number
of layers give the same file, byte for byte, on every machine. Refuses to know the file format (gguf_writer.py).
"""

from __future__ import annotations

import dataclasses
import enum
import math
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from headrace.model.gguf_writer import TensorSource, Value, write_gguf
from headrace.model.llama_files import GGUF_NAMES, each_tensor, wanted
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.model.weights import Wanted
from headrace.tensor import FORMATS, Bytes, Format
from headrace.types import ModelError

PART_BYTES = 1 << 24  # random bytes that exist at once
CONTEXT = 8192  # what speed runs go up to, whatever the model of that shape was trained for
CONTROL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_NORMAL, _CONTROL = 1, 3  # llama.cpp's token types


class Quant(enum.Enum):
    """How matrices are stored."""

    Q4 = "q4"  # Q4_0
    Q8 = "q8"  # Q8_0
    BF16 = "bf16"


QUANT_FORMATS: Mapping[Quant, Format] = MappingProxyType(
    {Quant.Q4: FORMATS["q4_0"], Quant.Q8: FORMATS["q8_0"], Quant.BF16: FORMATS["bf16"]}
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model is measured by, and how its texts are split."""

    spec: ModelSpec
    splitting: str  # tokenizer.ggml.pre


def _llama(
    sizes: tuple[int, int, int], heads: tuple[int, int], vocab_size: int, theta: float, *, is_tied: bool
) -> ModelSpec:
    """`sizes`: layers, hidden, intermediate; `heads`: of queries, of keys and values."""
    (num_layers, hidden_size, intermediate_size), (num_heads, num_kv_heads) = sizes, heads
    head_dim = hidden_size // num_heads
    return ModelSpec(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_len=CONTEXT,
        norm_eps=1e-5,
        rope=RopeSpec(head_dim, theta),
        is_embedding_tied=is_tied,
    )


# Sources: the config.json of meta-llama/Meta-Llama-3-8B, meta-llama/Llama-3.2-1B, HuggingFaceTB/SmolLM2-135M.
SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "llama3-8b": Shape(_llama((32, 4096, 14336), (32, 8), 128256, 500000.0, is_tied=False), "llama-bpe"),
        "llama3.2-1b": Shape(_llama((16, 2048, 8192), (32, 8), 128256, 500000.0, is_tied=True), "llama-bpe"),
        "smollm2-135m": Shape(_llama((30, 576, 1536), (9, 3), 49152, 100000.0, is_tied=True), "smollm"),
    }
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which file is to be made."""

    name: str  # a key of SHAPES
    quant: Quant = Quant.Q4
    head_quant: Quant | None = None  # of the embedding and the head; None: as the others
    num_layers: int | None = None  # None: all

    def __post_init__(self) -> None:
        if self.name not in SHAPES:
            raise ModelError(f"there is no shape {self.name!r}; there are {', '.join(SHAPES)}")
        most = SHAPES[self.name].spec.num_layers
        if self.num_layers is not None and not 1 <= self.num_layers <= most:
            raise ModelError(f"--layers is {self.num_layers}; {self.name} has 1 to {most}")

    @property
    def file_name(self) -> str:
        head = f"-{self.head_quant.value}-head" if self.head_quant else ""
        layers = f"-{self.num_layers}-layers" if self.num_layers else ""
        return f"{self.name}-{self.quant.value}{head}{layers}.gguf"

    @property
    def spec(self) -> ModelSpec:
        spec = SHAPES[self.name].spec
        return spec if self.num_layers is None else dataclasses.replace(spec, num_layers=self.num_layers)


def synthesize(recipe: Recipe, path: Path) -> None:
    """Write the GGUF file of a recipe; ModelError where it cannot be written."""
    write_gguf(path, _metadata(recipe), _tensors(recipe))


def _metadata(recipe: Recipe) -> dict[str, Value]:
    spec = recipe.spec
    tokens, merges = random_vocabulary(spec.vocab_size)
    begin, end = tokens.index(CONTROL_TOKENS[0]), tokens.index(CONTROL_TOKENS[1])
    return {
        "general.architecture": "llama",
        "general.name": f"random weights in the shape of {recipe.name}",
        "general.license": "none: random numbers",
        "llama.block_count": spec.num_layers,
        "llama.context_length": spec.max_len,
        "llama.embedding_length": spec.hidden_size,
        "llama.feed_forward_length": spec.intermediate_size,
        "llama.attention.head_count": spec.num_heads,
        "llama.attention.head_count_kv": spec.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": spec.norm_eps,
        "llama.rope.dimension_count": spec.rope.dim,
        "llama.rope.freq_base": spec.rope.theta,
        "llama.vocab_size": spec.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": SHAPES[recipe.name].splitting,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_CONTROL if token in CONTROL_TOKENS else _NORMAL for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": begin,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


# A vocabulary -----------------------------------------------------------------------------------------------------


def random_vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE that fills `size` entries: all bytes, then pairs of what is there.

    As in a trained one, most merges join short tokens.
    """
    draw = random.Random(size)
    tokens = byte_alphabet()
    merges: list[str] = []
    known = set(tokens)
    num_merged = size - len(CONTROL_TOKENS)
    while len(tokens) < num_merged:
        left, right = (tokens[int(len(tokens) * draw.random() ** 2)] for _ in range(2))
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    return [*tokens, *CONTROL_TOKENS], merges


def byte_alphabet() -> list[str]:
    """The characters that stand for the 256 bytes in a byte-level vocabulary: printable Latin-1 for itself.

    Source: Radford et al. 2019, the encoder published with GPT-2.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in sorted(printable)] + [chr(256 + i) for i in range(len(others))]


# Random weights ---------------------------------------------------------------------------------------------------
#
# A matrix [rows, columns] gets weights of about the deviation 1 / sqrt(columns), so that a product is as large as its
# input and activations stay finite through any number of layers.


def _tensors(recipe: Recipe) -> list[TensorSource]:
    sources = {tensor.name: _tensor(recipe, tensor) for tensor in each_tensor(wanted(recipe.spec, GGUF_NAMES))}
    return list(sources.values())  # a tied head is the embedding


def _tensor(recipe: Recipe, tensor: Wanted) -> TensorSource:
    if len(tensor.shape) == 1:
        return TensorSource(tensor.name, tensor.shape, FORMATS["f32"], partial(_ones, tensor.shape[0]))
    is_outer = tensor.name in (GGUF_NAMES.embedding, GGUF_NAMES.head)
    quant = recipe.head_quant if is_outer and recipe.head_quant is not None else recipe.quant
    return random_matrix(tensor.name, tensor.shape, QUANT_FORMATS[quant])


def _ones(width: int) -> Iterator[Bytes]:
    yield np.ones(width, np.float32).view(np.uint8)


def random_matrix(name: str, shape: tuple[int, ...], fmt: Format) -> TensorSource:
    """Its bytes depend on its name, its shape and its format alone."""
    num_blocks = math.prod(shape) // fmt.block_values
    deviation = 1 / math.sqrt(shape[-1])

    def parts() -> Iterator[Bytes]:
        bits = np.random.SFC64(zlib.crc32(name.encode()))
        at_once = PART_BYTES // fmt.block_bytes
        for first in range(0, num_blocks, at_once):
            count = min(at_once, num_blocks - first)
            raw = bits.random_raw(-(-count * fmt.block_bytes // 8)).view(np.uint8)[: count * fmt.block_bytes]
            _SCALED[fmt.name](raw.reshape(count, fmt.block_bytes), deviation)
            yield raw

    return TensorSource(name, shape, fmt, parts)


def _scale_blocks(deviation_of_quants: float) -> Callable[[Bytes, float], None]:
    """For formats whose blocks begin with an f16 scale: quants stay as random as they are."""

    def scale(blocks: Bytes, deviation: float) -> None:
        scales = np.ascontiguousarray(blocks[:, :2]).view(np.uint16)
        exponent = math.floor(math.log2(deviation / deviation_of_quants))
        scales &= 0x03FF  # a random fraction: between one power of 2 and the next
        scales |= np.uint16((exponent + 15) << 10)
        blocks[:, :2] = scales.view(np.uint8)

    return scale


def _scale_bf16(values: Bytes, deviation: float) -> None:
    """Sign and fraction stay random: magnitudes between one power of 2 and the next."""
    numbers = values.view(np.uint16)
    numbers &= 0x807F
    numbers |= np.uint16((math.floor(math.log2(deviation)) + 127) << 7)


# Integers from -8 to 7, and from -128 to 127, that are all as likely, deviate by a twelfth of the square of 16 and 256.
_SCALED: Mapping[str, Callable[[Bytes, float], None]] = MappingProxyType(
    {
        "q4_0": _scale_blocks(16 / math.sqrt(12)),
        "q8_0": _scale_blocks(256 / math.sqrt(12)),
        "bf16": _scale_bf16,
    }
)
