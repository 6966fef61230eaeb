"""Tensors of a model file before anything is decided about them: a name, a shape, a type and bytes on a map.

Owns the mapping of files into memory and the step from a stored type to a supported `Format`. Refuses to know file
formats (gguf.py, safetensors.py) and which tensors a model needs (weights.py).
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.tensor import FORMATS, Bytes, Tensor
from headrace.types import ModelError


@dataclass(frozen=True, slots=True)
class StoredTensor:
    file: str
    name: str
    shape: tuple[int, ...]  # row-major, the contiguous axis last
    dtype: str  # the file's name for it, in lower case; a key of FORMATS if supported
    data: Bytes  # flat, a view of the map

    def check_supported(self) -> None:
        """Raise ModelError if headrace cannot decode this type."""
        if self.dtype not in FORMATS:
            raise ModelError(
                f"{self.file}: tensor {self.name!r} is stored as {self.dtype}; supported are {', '.join(FORMATS)}"
            )

    def tensor(self) -> Tensor:
        self.check_supported()
        return Tensor(self.data, self.shape, FORMATS[self.dtype])


def map_file(path: Path) -> Bytes:
    """The file's bytes, read-only, mapped. The map lives as long as any view of it.

    Truncating the file meanwhile would kill the process (SIGBUS); replacing it by renaming another does no harm.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"{path}: cannot be read: {error}") from None
    return np.frombuffer(mapped, dtype=np.uint8)
