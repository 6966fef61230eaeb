"""From stored tensors to the weights that an architecture needs.

Owns the comparison of what a file has with what the spec asks for, before anything is read. Refuses to know names and
shapes themselves: those are the architecture's (llama_files.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from headrace.model.fields import shown
from headrace.model.llama import LlamaWeights
from headrace.model.stored import StoredTensor
from headrace.tensor import Tensor
from headrace.types import ModelError

MAX_NAMED = 5  # tensors that a message lists before it says "and N more"


@dataclass(frozen=True, slots=True)
class CheckedWeights:
    """Tensors that are all there and fit the spec, not yet read."""

    load: Callable[[], LlamaWeights[Tensor]]
    num_bytes: int  # as stored


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that a model cannot do without."""

    name: str
    shape: tuple[int, ...]


def check_tensors(
    source: str, stored: Mapping[str, StoredTensor], wanted: Iterable[Wanted], is_harmless: Callable[[str], bool]
) -> int:
    """The bytes of the tensors wanted; ModelError if one is missing, surplus, of another shape or not supported.

    A surplus tensor is refused because leaving it out would silently change the answers (a bias, an adapter), unless
    `is_harmless` knows better.
    """
    needed = {want.name: want for want in wanted}
    if missing := [name for name in needed if name not in stored]:
        raise ModelError(f"{source}: {_listed(missing)} missing")
    if surplus := [name for name in stored if name not in needed and not is_harmless(name)]:
        raise ModelError(f"{source}: {_listed(surplus)} not part of a model of this architecture")
    for name, want in needed.items():
        if (shape := stored[name].shape) != want.shape:
            raise ModelError(f"{source}: tensor {shown(name)} has the shape {shape}; the spec asks for {want.shape}")
        stored[name].check_supported()
    return sum(stored[name].data.size for name in needed)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    named = ", ".join(shown(name) for name in names[:MAX_NAMED])
    return f"tensor {named} is" if len(names) == 1 else f"tensors {named}{more} are"
