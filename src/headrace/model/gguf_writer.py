"""A writer of GGUF version 3: tensors come a part at a time, so that no file needs its size in memory.

Owns the file format's other direction. Refuses to know what is written (synth.py).

Source: the specification in ggml's repository (docs/gguf.md).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from headrace.model.gguf import DEFAULT_ALIGNMENT, GGML_TYPES, MAGIC
from headrace.tensor import Bytes, Format
from headrace.types import ModelError

VERSION = 3

Value = int | float | bool | str | Sequence[str] | Sequence[int]  # whole numbers are u32, in arrays i32; others f32

_TYPE_NUMBERS = {kind.name: number for number, kind in GGML_TYPES.items()}
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor to be written: what the directory says of it, and where its bytes come from."""

    name: str
    shape: tuple[int, ...]  # row-major, the contiguous axis last
    format: Format
    parts: Callable[[], Iterator[Bytes]]  # `nbytes` in all

    @property
    def nbytes(self) -> int:
        return self.format.row_bytes(self.shape[-1]) * math.prod(self.shape[:-1])


def write_gguf(path: Path, metadata: Mapping[str, Value], tensors: Sequence[TensorSource]) -> None:
    """Write the file under another name first: a file of the name `path` is complete. ModelError if that fails."""
    if path.exists() and not path.is_file():
        raise ModelError(f"{path}: cannot be written: it is there and no file")  # /dev/null would become one
    unfinished = path.with_name(f"{path.name}.part")
    try:
        with unfinished.open("wb") as file:
            _write(file, metadata, tensors)
        unfinished.replace(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _write(file: BinaryIO, metadata: Mapping[str, Value], tensors: Sequence[TensorSource]) -> None:
    file.write(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        file.write(_string(key) + _typed(value))
    offset = 0
    for tensor in tensors:
        file.write(_directory_row(tensor, offset))
        offset += tensor.nbytes + -tensor.nbytes % DEFAULT_ALIGNMENT
    for tensor in tensors:
        file.write(bytes(-file.tell() % DEFAULT_ALIGNMENT))
        for part in tensor.parts():
            file.write(part.data)
    file.write(bytes(-file.tell() % DEFAULT_ALIGNMENT))


def _directory_row(tensor: TensorSource, offset: int) -> bytes:
    dims = tuple(reversed(tensor.shape))
    number = _TYPE_NUMBERS[tensor.format.name]
    return _string(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, offset)


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return struct.pack("<Q", len(encoded)) + encoded


def _typed(value: Value) -> bytes:
    match value:
        case bool():
            return struct.pack("<IB", _BOOL, value)
        case int():
            return struct.pack("<II", _U32, value)
        case float():
            return struct.pack("<If", _F32, value)
        case str():
            return struct.pack("<I", _STRING) + _string(value)
        case _:
            return struct.pack("<I", _ARRAY) + _array(value)


def _array(items: Sequence[str] | Sequence[int]) -> bytes:
    texts = [item for item in items if isinstance(item, str)]
    numbers = [item for item in items if isinstance(item, int)]
    if numbers:
        return struct.pack(f"<IQ{len(numbers)}i", _I32, len(numbers), *numbers)
    return struct.pack("<IQ", _STRING, len(texts)) + b"".join(map(_string, texts))
