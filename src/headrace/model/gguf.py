"""A reader for GGUF versions 2 and 3 over a mapped file.

Owns the file format: nothing of a file is believed, every size is compared with the bytes that are there before it is
used. Refuses to know what the keys and tensors mean (gguf_model.py).

Source: the specification in ggml's repository (docs/gguf.md); numbers of types and sizes of blocks from ggml.h.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.model.fields import shown
from headrace.model.stored import StoredTensor, map_file
from headrace.tensor import Bytes
from headrace.types import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# Caps, each far above what real files hold, so that a hostile header is refused before it costs anything.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1  # the specification's
MAX_STRING_BYTES = 64 << 20  # some files embed a whole tokenizer.json
MAX_ARRAY_LENGTH = 1 << 21  # vocabularies have up to 262,144 entries, their merges up to about 500,000
MAX_DIMENSIONS = 4
MAX_DIMENSION = 1 << 40
MAX_ALIGNMENT = 1 << 20

Value = int | float | bool | str | tuple[str, ...] | npt.NDArray[np.generic]  # arrays of numbers stay numpy arrays


@dataclass(frozen=True, slots=True)
class GgmlType:
    name: str
    block_values: int
    block_bytes: int


# Every type that files may hold, so that sizes can be checked; tensor.FORMATS says which of them can be used.
GGML_TYPES: dict[int, GgmlType] = {
    number: GgmlType(name, values, size)
    for number, name, values, size in (
        (0, "f32", 1, 4),
        (1, "f16", 1, 2),
        (2, "q4_0", 32, 18),
        (3, "q4_1", 32, 20),
        (6, "q5_0", 32, 22),
        (7, "q5_1", 32, 24),
        (8, "q8_0", 32, 34),
        (9, "q8_1", 32, 40),
        (10, "q2_k", 256, 84),
        (11, "q3_k", 256, 110),
        (12, "q4_k", 256, 144),
        (13, "q5_k", 256, 176),
        (14, "q6_k", 256, 210),
        (15, "q8_k", 256, 292),
        (16, "iq2_xxs", 256, 66),
        (17, "iq2_xs", 256, 74),
        (18, "iq3_xxs", 256, 98),
        (19, "iq1_s", 256, 50),
        (20, "iq4_nl", 32, 18),
        (21, "iq3_s", 256, 110),
        (22, "iq2_s", 256, 82),
        (23, "iq4_xs", 256, 136),
        (24, "i8", 1, 1),
        (25, "i16", 1, 2),
        (26, "i32", 1, 4),
        (27, "i64", 1, 8),
        (28, "f64", 1, 8),
        (29, "iq1_m", 256, 56),
        (30, "bf16", 1, 2),
        (34, "tq1_0", 256, 54),
        (35, "tq2_0", 256, 66),
        (39, "mxfp4", 32, 17),
        (40, "nvfp4", 64, 36),
        (41, "q1_0", 128, 18),
    )
}


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    version: int
    metadata: dict[str, Value]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GgufFile:
    """Metadata and tensor directory; tensors are views of the map. ModelError for whatever is wrong with the file."""
    mapped = map_file(path)
    cursor = _Cursor(str(path), mapped)
    version = _version(cursor)
    num_tensors = cursor.count("tensor count", MAX_TENSORS)
    num_keys = cursor.count("key count", MAX_KEYS)
    metadata = _metadata(cursor, num_keys)
    places = _places(cursor, num_tensors)
    tensors = _tensors(cursor, mapped, places, _alignment(cursor, metadata))
    return GgufFile(path, version, metadata, tensors)


class _Cursor:
    """A position in the file that never passes its end."""

    def __init__(self, file: str, mapped: Bytes) -> None:
        self.file = file
        self.at = 0
        self.size = mapped.size
        self._bytes = mapped.data

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.file}: {what} (at byte {self.at} of {self.size})")

    def take(self, num_bytes: int, what: str) -> memoryview:
        if num_bytes > self.size - self.at:
            raise self.fail(f"{what} needs {num_bytes} bytes, but the file ends after {self.size - self.at}")
        taken = self._bytes[self.at : self.at + num_bytes]
        self.at += num_bytes
        return taken

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str, limit: int) -> int:
        number = self.u64(what)
        if number > limit:
            raise self.fail(f"{what} is {number}; at most {limit} is allowed")
        return number

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        length = self.count(f"the length of {what}", limit)
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error}") from None

    def strings(self, length: int, what: str) -> tuple[str, ...]:
        """`length` strings after one another: a vocabulary, so the loop is kept tight (0.3 µs a string)."""
        if length * 8 > self.size - self.at:  # each has 8 bytes of length at least
            raise self.fail(f"{what} has {length} strings, but the file ends after {self.size - self.at} bytes")
        content, at, end = self._bytes, self.at, self.size
        length_at = struct.Struct("<Q").unpack_from
        found: list[str] = []
        try:
            for _ in range(length):
                (num_bytes,) = length_at(content, at)
                at += 8
                if num_bytes > end - at or num_bytes > MAX_STRING_BYTES:
                    raise self.fail(f"entry {len(found)} of {what} has {num_bytes} bytes; {end - at} are left")
                found.append(str(content[at : at + num_bytes], "utf-8"))
                at += num_bytes
        except struct.error:
            raise self.fail(f"the file ends at entry {len(found)} of {what}, which has {length}") from None
        except UnicodeDecodeError as error:
            raise self.fail(f"entry {len(found)} of {what} is not UTF-8: {error}") from None
        self.at = at
        return tuple(found)


def _version(cursor: _Cursor) -> int:
    if (magic := bytes(cursor.take(4, "the magic number"))) != MAGIC:
        raise cursor.fail(f"is not a GGUF file: it begins with {magic!r}")
    version = cursor.u32("the version")
    if version in VERSIONS:
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *VERSIONS):
        raise cursor.fail("is a big-endian GGUF file; only little-endian ones are supported")
    raise cursor.fail(f"is GGUF version {version}; supported are {' and '.join(map(str, VERSIONS))}")


# Metadata -------------------------------------------------------------------------------------------------------

_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


def _metadata(cursor: _Cursor, num_keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for i in range(num_keys):
        key = cursor.string(f"the name of key {i}", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.fail(f"the key {shown(key)} is there twice")
        metadata[key] = _value(cursor, f"key {shown(key)}")
    return metadata


def _value(cursor: _Cursor, what: str) -> Value:
    kind = cursor.u32(f"the type of {what}")
    if kind == _STRING:
        return cursor.string(what)
    if kind == _BOOL:
        return bool(_booleans(cursor, 1, what)[0])
    if kind in _NUMBERS:
        return _numbers(cursor, _NUMBERS[kind], 1, what)[0].item()  # type: ignore[no-any-return]
    if kind != _ARRAY:
        raise cursor.fail(f"{what} has the unknown type {kind}")
    kind = cursor.u32(f"the element type of {what}")
    length = cursor.count(f"the length of {what}", MAX_ARRAY_LENGTH)
    if kind == _STRING:
        return cursor.strings(length, what)
    if kind == _BOOL:
        return _booleans(cursor, length, what)
    if kind in _NUMBERS:
        return _numbers(cursor, _NUMBERS[kind], length, what)
    if kind == _ARRAY:
        raise cursor.fail(f"{what} is an array of arrays, which is not supported")
    raise cursor.fail(f"{what} has elements of the unknown type {kind}")


def _numbers(cursor: _Cursor, dtype: str, length: int, what: str) -> npt.NDArray[np.generic]:
    taken = cursor.take(length * np.dtype(dtype).itemsize, what)
    return np.frombuffer(taken, dtype=dtype).copy()  # aligned, and free of the map


def _booleans(cursor: _Cursor, length: int, what: str) -> npt.NDArray[np.bool_]:
    taken = np.frombuffer(cursor.take(length, what), dtype=np.uint8)
    if length and taken.max() > 1:
        raise cursor.fail(f"{what} is a boolean with the value {taken.max()}")
    return taken.astype(np.bool_)


# Tensors --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies: one row of the directory, its sizes checked but not its range."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int
    num_bytes: int


def _places(cursor: _Cursor, num_tensors: int) -> list[_Place]:
    places: dict[str, _Place] = {}
    for i in range(num_tensors):
        name = cursor.string(f"the name of tensor {i}", MAX_KEY_BYTES)
        if name in places:
            raise cursor.fail(f"the tensor {shown(name)} is there twice")
        places[name] = _place(cursor, name)
    return list(places.values())


def _place(cursor: _Cursor, name: str) -> _Place:
    what = f"tensor {shown(name)}"
    num_dimensions = cursor.u32(f"the number of dimensions of {what}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.fail(f"{what} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
    sizes = [cursor.count(f"a dimension of {what}", MAX_DIMENSION) for _ in range(num_dimensions)]
    if 0 in sizes:
        raise cursor.fail(f"{what} has a dimension of 0: {sizes}")
    number = cursor.u32(f"the type of {what}")
    if (kind := GGML_TYPES.get(number)) is None:
        raise cursor.fail(f"{what} has the unknown type {number}")
    if sizes[0] % kind.block_values:
        raise cursor.fail(f"{what} has rows of {sizes[0]} values, not whole {kind.name} blocks of {kind.block_values}")
    num_bytes = math.prod(sizes) // kind.block_values * kind.block_bytes  # Python's integers cannot overflow
    return _Place(name, tuple(reversed(sizes)), kind, cursor.u64(f"the offset of {what}"), num_bytes)


def _alignment(cursor: _Cursor, metadata: dict[str, Value]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(alignment, int) and alignment in {1 << bit for bit in range(3, MAX_ALIGNMENT.bit_length())}:
        return alignment
    raise cursor.fail(f"general.alignment is {shown(alignment)}; it must be a power of 2 from 8 to {MAX_ALIGNMENT}")


def _tensors(cursor: _Cursor, mapped: Bytes, places: list[_Place], alignment: int) -> dict[str, StoredTensor]:
    """Views of the section that begins after the directory, at the next multiple of the alignment."""
    start = -(-cursor.at // alignment) * alignment
    room = max(cursor.size - start, 0)
    free_from, before = 0, ""
    for place in sorted(places, key=lambda place: place.offset):
        what = f"tensor {shown(place.name)}"
        if place.offset % alignment:
            raise cursor.fail(f"{what} has the offset {place.offset}, not a multiple of the alignment {alignment}")
        if place.offset < free_from:
            raise cursor.fail(f"{what} has the offset {place.offset}, inside tensor {shown(before)}")
        if place.num_bytes > room - place.offset:
            raise cursor.fail(
                f"{what} takes {place.num_bytes} bytes at offset {place.offset}, but the data section has {room}"
            )
        free_from, before = place.offset + place.num_bytes, place.name
    return {
        place.name: StoredTensor(
            cursor.file,
            place.name,
            place.shape,
            place.type.name,
            mapped[start + place.offset : start + place.offset + place.num_bytes],
        )
        for place in places
    }
