"""Tensors as they lie in model files, and the table of formats with a reference decoder and encoder for each.

Owns what the bytes of a format mean; the decoders here are the oracle that every kernel is compared with. Refuses to
know where bytes come from (model/) and how they are laid out to be fast (csrc/).

The block formats are ggml's, as llama.cpp's `ggml-common.h` and the `gguf` package define them: a row is cut into
blocks of 32 values, each with its own scale.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

GROUP = 32  # values that share a scale in the block formats
KEPT_SHARE = 1 / 8  # of the machine's memory: larger files are not kept there beside the weights packed from them
MADV_PAGEOUT = 21  # of linux/mman.h, since Linux 5.4; the mmap module does not have it


@dataclass(frozen=True, slots=True)
class Format:
    """One way of storing a row of numbers: `block_values` values take `block_bytes` bytes."""

    name: str
    block_values: int
    block_bytes: int
    unpack: Callable[[Bytes], F32]  # [blocks, block_bytes] u8 -> [blocks, block_values] f32, exact
    pack: Callable[[F32], Bytes]  # the inverse, rounding to the nearest value that the format has

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` values; raises ValueError where they don't fill whole blocks."""
        if columns % self.block_values:
            raise ValueError(f"{self.name} stores whole blocks of {self.block_values}; a row of {columns} is not")
        return columns // self.block_values * self.block_bytes


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named array's bytes, shape (row-major, the contiguous axis last) and format."""

    stored: Bytes  # flat; may be a view of a mapped file
    shape: tuple[int, ...]
    format: Format
    row_order: npt.NDArray[np.intp] | None = None  # of a matrix: row r is the stored row row_order[r]

    def __post_init__(self) -> None:
        if not self.shape:
            raise ValueError("a tensor has at least one axis")
        expected = self.format.row_bytes(self.shape[-1]) * math.prod(self.shape[:-1])
        if self.stored.dtype != np.uint8 or self.stored.ndim != 1 or self.stored.size != expected:
            raise ValueError(f"a {self.format.name} tensor {self.shape} takes {expected} bytes, not {self.stored.size}")
        if self.row_order is not None and len(self.row_order) != self.shape[0]:
            raise ValueError(f"an order of {len(self.row_order)} rows does not fit a tensor {self.shape}")

    @property
    def nbytes(self) -> int:
        return int(self.stored.size)

    @property
    def data(self) -> Bytes:
        """The bytes, row after row: as stored, or a fresh copy where the rows have an order of their own."""
        if self.row_order is None:
            return self.stored
        return np.ascontiguousarray(self.stored.reshape(self.shape[0], -1)[self.row_order]).reshape(-1)

    def to_f32(self) -> F32:
        """The exact values, decoded: `shape` f32."""
        blocks = self.data.reshape(-1, self.format.block_bytes)
        return self.format.unpack(blocks).reshape(self.shape)

    def release(self) -> None:
        """Give pages of a mapped file back to the system: the file's other tensors', too. All can still be read.

        A model whose weights are packed needs them no more, and as long as they are there they count as its memory.
        Of a file that would fill much of the machine's memory beside them, the system need not keep a copy either,
        unless others have it mapped: its memory goes to the weights that are packed next. On a virtual machine that is
        memory which need not be asked of the host first, most of an 8B model's start.
        """
        mapped = self._map()
        if mapped is not None:
            if len(mapped) > KEPT_SHARE * _machine_bytes():
                _forget(mapped, self.stored)
            mapped.madvise(mmap.MADV_DONTNEED)

    def samples(self, count: int, size: int) -> list[bytes]:
        """Up to `count` pieces of `size` bytes, spread over the bytes as stored. Of a file only they are read."""
        mapped = self._map()
        step = max(size, -(-self.nbytes // count))
        if mapped is not None:
            mapped.madvise(mmap.MADV_RANDOM)  # else megabytes around each
        pieces = [self.stored[at : at + size].tobytes() for at in range(0, self.nbytes, step)]
        if mapped is not None:
            mapped.madvise(mmap.MADV_NORMAL)
            mapped.madvise(mmap.MADV_DONTNEED)  # pages that the system mapped around them count as this process's
        return pieces

    def _map(self) -> mmap.mmap | None:
        """The map of a file that the bytes lie in."""
        base: Any = self.stored
        while isinstance(base, np.ndarray):
            base = base.base
        mapped = base.obj if isinstance(base, memoryview) else base
        return mapped if isinstance(mapped, mmap.mmap) else None

    def rows(self, order: npt.NDArray[np.intp]) -> Tensor:
        """The rows of a matrix as stored, in another order, still packed. Nothing is copied before `data` is asked."""
        return replace(self, row_order=order)


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


def _forget(mapped: mmap.mmap, part: Bytes) -> None:
    """Have the system drop its copy of the pages that lie in `part` as a whole."""
    at = part.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    first, end = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE, (at + part.size) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        with contextlib.suppress(OSError):  # an older kernel: it keeps them
            mapped.madvise(MADV_PAGEOUT, first, end - first)


def from_f32(values: npt.ArrayLike, fmt: Format) -> Tensor:
    """Encode an array of at least one axis; values are rounded to the nearest the format has."""
    array = np.ascontiguousarray(values, dtype=np.float32)
    fmt.row_bytes(array.shape[-1])
    blocks = fmt.pack(array.reshape(-1, fmt.block_values))
    return Tensor(np.ascontiguousarray(blocks).reshape(-1), array.shape, fmt)


# Decoders and encoders ------------------------------------------------------------------------------------------


def _bytes(array: npt.NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).view(np.uint8).reshape(array.shape[0], -1)


def _unpack_f32(blocks: Bytes) -> F32:
    return np.require(np.ascontiguousarray(blocks).view(np.float32), requirements="A")  # a map may be unaligned


def _unpack_f16(blocks: Bytes) -> F32:
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _pack_f16(values: F32) -> Bytes:
    return _bytes(values.astype(np.float16))


def _unpack_bf16(blocks: Bytes) -> F32:
    return (np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def round_bf16(values: F32) -> F32:
    """Round to the nearest bf16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isnan(values), np.float32(np.nan), rounded.astype(np.uint32).view(np.float32)).astype(np.float32)


def _pack_bf16(values: F32) -> Bytes:
    return _bytes((round_bf16(values).view(np.uint32) >> 16).astype(np.uint16))


def _scale(blocks: Bytes, at: int) -> F32:
    """The f16 number at byte `at` of every block: [blocks, 1] f32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> F32:
    """16 bytes hold 32 values: the low nibbles are values 0 to 15, the high ones 16 to 31."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)


def _pack_nibbles(quants: npt.NDArray[np.uint8]) -> Bytes:
    return (quants[:, :16] | (quants[:, 16:] << 4)).astype(np.uint8)


def _unpack_q8_0(blocks: Bytes) -> F32:
    return _scale(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


def _pack_q8_0(values: F32) -> Bytes:
    scale = (np.abs(values).max(axis=1, keepdims=True) / 127).astype(np.float32)
    quants = np.rint(values * _inverse(scale)).astype(np.int8)
    return np.concatenate([_bytes(scale.astype(np.float16)), quants.view(np.uint8)], axis=1)


def _unpack_q4_0(blocks: Bytes) -> F32:
    return _scale(blocks, 0) * (_nibbles(blocks[:, 2:]) - 8)


def _pack_q4_0(values: F32) -> Bytes:
    extreme = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1)
    scale = (extreme / -8).astype(np.float32)  # the largest value sits on -8, the one code without a mirror image
    quants = np.clip(np.rint(values * _inverse(scale)) + 8, 0, 15).astype(np.uint8)
    return np.concatenate([_bytes(scale.astype(np.float16)), _pack_nibbles(quants)], axis=1)


def _unpack_q4_1(blocks: Bytes) -> F32:
    return _scale(blocks, 0) * _nibbles(blocks[:, 4:]) + _scale(blocks, 2)


def _pack_q4_1(values: F32) -> Bytes:
    low, high = values.min(axis=1, keepdims=True), values.max(axis=1, keepdims=True)
    scale = ((high - low) / 15).astype(np.float32)
    quants = np.clip(np.rint((values - low) * _inverse(scale)), 0, 15).astype(np.uint8)
    return np.concatenate(
        [_bytes(scale.astype(np.float16)), _bytes(low.astype(np.float16)), _pack_nibbles(quants)], axis=1
    )


def _inverse(scale: F32) -> F32:
    """1 / scale; 0 where a scale is so small that it is stored as 0 anyway and its inverse would overflow."""
    is_normal = np.abs(scale) >= np.finfo(np.float32).tiny
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=is_normal)


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format("f32", 1, 4, _unpack_f32, _bytes),
        Format("f16", 1, 2, _unpack_f16, _pack_f16),
        Format("bf16", 1, 2, _unpack_bf16, _pack_bf16),
        Format("q8_0", GROUP, 34, _unpack_q8_0, _pack_q8_0),
        Format("q4_0", GROUP, 18, _unpack_q4_0, _pack_q4_0),
        Format("q4_1", GROUP, 20, _unpack_q4_1, _pack_q4_1),
    )
}
