"""One row of the table of architectures: all that tells one family of models from another.

Owns the shape of the row. The rows themselves are in the package's `__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from headrace.model.fields import Fields
from headrace.model.gguf import GgufFile
from headrace.model.llama import LlamaWeights
from headrace.model.spec import ModelSpec
from headrace.model.stored import StoredTensor
from headrace.model.weights import CheckedWeights
from headrace.ops import Ops

V = TypeVar("V")
W = TypeVar("W")

WeightsReader = Callable[[str, ModelSpec, Mapping[str, StoredTensor]], CheckedWeights]


class Forward(Protocol):
    """One step of a model, written in the operations of `ops`."""

    def __call__(self, ops: Ops[V, W], spec: ModelSpec, weights: LlamaWeights[W], /) -> None: ...


@dataclass(frozen=True, slots=True)
class Architecture:
    forward: Forward
    spec_from_config: Callable[[Fields], ModelSpec]
    spec_from_gguf: Callable[[GgufFile], ModelSpec]
    weights_from_config: WeightsReader
    weights_from_gguf: WeightsReader
