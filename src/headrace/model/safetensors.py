"""A reader for safetensors over mapped files: one file, or shards with an index.

Owns the file format and the rule that nothing outside the model's directory is read. Refuses to know which tensors a
model needs (weights.py). Our own reader because the `safetensors` library copies, and has no bf16 without torch.

Source: the format's description in the safetensors repository (README, "Format").
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from headrace.model.fields import parse_json, read_json, shown
from headrace.model.stored import StoredTensor, map_file
from headrace.tensor import Bytes
from headrace.types import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_HEADER_BYTES = 8 << 20  # 80,000 tensors; bounds what parsing can allocate
MAX_DIMENSIONS = 8
MAX_DIMENSION = 1 << 40

_PLAIN_NAME = re.compile(r"\w[\w.+ -]*")  # nothing that has a meaning to the file system

# Bytes of a value of every type that the format has; tensor.FORMATS says which of them can be used.
DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("u8", 1),
    "I8": ("i8", 1),
    "F8_E5M2": ("f8_e5m2", 1),
    "F8_E4M3": ("f8_e4m3", 1),
    "F8_E8M0": ("f8_e8m0", 1),
    "I16": ("i16", 2),
    "U16": ("u16", 2),
    "F16": ("f16", 2),
    "BF16": ("bf16", 2),
    "I32": ("i32", 4),
    "U32": ("u32", 4),
    "F32": ("f32", 4),
    "C64": ("c64", 8),
    "F64": ("f64", 8),
    "I64": ("i64", 8),
    "U64": ("u64", 8),
}


def read_directory(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a model's directory, from `model.safetensors` or the shards that its index names."""
    if (directory / SINGLE).exists():
        return read_file(inside(directory, SINGLE))
    if not (directory / INDEX).exists():
        raise ModelError(f"{directory}: has neither {SINGLE} nor {INDEX}")
    return _read_shards(directory)


def read_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, as views of its map."""
    mapped = map_file(path)
    if mapped.size < 8:
        raise ModelError(f"{path}: has {mapped.size} bytes; a safetensors file begins with 8 bytes of header length")
    header_bytes = int.from_bytes(mapped[:8].tobytes(), "little")
    if header_bytes > min(MAX_HEADER_BYTES, mapped.size - 8):
        raise ModelError(
            f"{path}: the header length is {header_bytes}; the file has {mapped.size - 8} bytes after it, "
            f"and at most {MAX_HEADER_BYTES} are read"
        )
    header = parse_json(mapped[8 : 8 + header_bytes].tobytes(), f"{path}: header")
    header.pop("__metadata__", None)
    content = mapped[8 + header_bytes :]
    found = {name: _stored(str(path), name, entry, content) for name, entry in header.items()}
    _check_cover(str(path), header, content.size)
    return found


def inside(directory: Path, name: str) -> Path:
    """The file `name` of a model's directory; ModelError if the name or a link leads out of it.

    A link may lead out of a snapshot of the Hugging Face cache, into the `blobs` folder beside `snapshots`.
    """
    if not _PLAIN_NAME.fullmatch(name):
        raise ModelError(f"{directory}: the file name {shown(name)} must be a plain name inside the directory")
    try:
        home, target = directory.resolve(), (directory / name).resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
        raise ModelError(f"{directory}: {shown(name)} cannot be found: {error}") from None
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if target.parent not in (home, blobs):
        raise ModelError(f"{directory}: {shown(name)} is a link that leads out of the directory")
    if target.exists() and not target.is_file():  # opening a pipe would wait for ever
        raise ModelError(f"{directory}: {shown(name)} is not a regular file")
    return directory / name


def _read_shards(directory: Path) -> dict[str, StoredTensor]:
    source = directory / INDEX
    weight_map = read_json(inside(directory, INDEX)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelError(f"{source}: weight_map must be an object from tensor names to file names")
    shards = {shard: read_file(inside(directory, shard)) for shard in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ModelError(f"{source}: tensor {shown(name)} is not in {shard}")
    for shard, tensors in shards.items():
        if unlisted := sorted(name for name in tensors if weight_map.get(name) != shard):
            raise ModelError(f"{source}: does not list tensor {shown(unlisted[0])} of {shard} there")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _stored(file: str, name: str, entry: Any, content: Bytes) -> StoredTensor:
    what = f"{file}: tensor {shown(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ModelError(f"{what}: its entry must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ModelError(f"{what}: has the unknown dtype {shown(dtype)}")
    if not _are_sizes(shape, MAX_DIMENSION) or len(shape) > MAX_DIMENSIONS:
        raise ModelError(f"{what}: its shape must be at most {MAX_DIMENSIONS} integers of 0 to {MAX_DIMENSION}")
    if not _are_sizes(offsets, content.size) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{what}: its data_offsets must be a begin and an end within {content.size} bytes")
    label, value_bytes = DTYPES[dtype]
    expected = math.prod(shape) * value_bytes  # Python's integers cannot overflow
    if offsets[1] - offsets[0] != expected:
        raise ModelError(f"{what}: {dtype} {shape} takes {expected} bytes, its data_offsets {offsets} do not match")
    return StoredTensor(file, name, tuple(shape), label, content[offsets[0] : offsets[1]])


def _are_sizes(values: Any, limit: int) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= limit for value in values)


def _check_cover(file: str, header: dict[str, Any], num_bytes: int) -> None:
    """Tensors must lie end to end over the whole content: no overlap, no hole where something else could hide."""
    at = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != at:
            raise ModelError(f"{file}: tensor {shown(name)} begins at {begin}; the one before it ends at {at}")
        at = end
    if at != num_bytes:
        raise ModelError(f"{file}: its tensors end after {at} bytes, but there are {num_bytes}")
