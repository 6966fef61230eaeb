"""Writes small GGUF files for tests, well-formed ones and, through `Raw`, ones that are not."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.tensor import Tensor

TYPE_NUMBERS = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 8, "bf16": 30}

_U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64 = 4, 5, 6, 7, 8, 9, 10


@dataclass(frozen=True)
class Raw:
    """A metadata value as the file has it: the number of its type and its bytes."""

    kind: int
    content: bytes


def string(text: str | bytes) -> bytes:
    encoded = text.encode("utf-8") if isinstance(text, str) else text
    return struct.pack("<Q", len(encoded)) + encoded


def value(item: object) -> bytes:
    """A metadata value with its type in front: ints are u32 (i32 in arrays), floats f32."""
    match item:
        case Raw(kind, content):
            return struct.pack("<I", kind) + content
        case bool():
            return struct.pack("<IB", _BOOL, item)
        case int() if item >= 1 << 32:
            return struct.pack("<IQ", _U64, item)
        case int():
            return struct.pack("<II", _U32, item)
        case float():
            return struct.pack("<If", _F32, item)
        case str():
            return struct.pack("<I", _STRING) + string(item)
        case list() | tuple():
            return struct.pack("<I", _ARRAY) + _array(list(item))
        case _:
            raise TypeError(f"no GGUF type for {item!r}")


def _array(items: list[object]) -> bytes:
    if all(isinstance(item, str) for item in items):
        return struct.pack("<IQ", _STRING, len(items)) + b"".join(string(str(item)) for item in items)
    if all(isinstance(item, int) for item in items):
        return struct.pack(f"<IQ{len(items)}i", _I32, len(items), *items)
    return struct.pack(f"<IQ{len(items)}f", _F32, len(items), *items)


def gguf_bytes(
    metadata: Mapping[str, object], tensors: Mapping[str, Tensor], *, version: int = 3, alignment: int = 32
) -> bytes:
    """A whole file. `alignment` is used, not written: say `general.alignment` in the metadata for others than 32."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(string(key) + value(item) for key, item in metadata.items())
    content = b""
    for name, tensor in tensors.items():
        dims = tuple(reversed(tensor.shape))
        head += string(name) + struct.pack(f"<I{len(dims)}QI", len(dims), *dims, TYPE_NUMBERS[tensor.format.name])
        head += struct.pack("<Q", len(content))
        content += tensor.data.tobytes() + bytes(-tensor.nbytes % alignment)
    return head + bytes(-len(head) % alignment) + content


def write_gguf(path: Path, metadata: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Path:
    path.unlink(missing_ok=True)  # never overwritten in place: an earlier map of it may be alive
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path
