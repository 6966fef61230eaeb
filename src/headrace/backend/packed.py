"""Packed weights on disk: a start that maps them need neither pack anew nor take memory of its own for them.

Owns the file's form, its name, and when it is good: for one model, as its files were, and one layout of the kernels.
Anything else, a damaged file too, is as if there were none. Nothing is written unless asked for.

The file, little-endian: the block of all weights as `_core.place_together` lays it out, then a trailer. That one comes
last so that the block begins at a page of its own, a huge one where the file system has such.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace import _core
from headrace.tensor import FORMATS, Bytes, Tensor
from headrace.types import CapacityError

log = logging.getLogger(__name__)

MAGIC = b"headrace"
TRAILER = struct.Struct("<8s32sQQ")  # MAGIC, the key, bytes of the block, its digest
SAMPLES, SAMPLE_BYTES = 4, 4096  # of each tensor's bytes: tell models of one shape apart that were made in one second
PROBE_ROWS, PROBE_COLUMNS = 64, 256
WRITE_BYTES = 1 << 23  # whole huge pages at a time: what the system keeps of the file is then made of them

Part = tuple[_core.Weight, Tensor]


@dataclass(frozen=True, slots=True)
class PackedFile:
    """Where the packed weights of a model are, or would be."""

    path: Path
    key: bytes

    def map(self, weights: Sequence[_core.Weight], pool: _core.ThreadPool) -> bool:
        """Whether the weights are mapped from the file; all are packed then."""
        try:
            with self.path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (OSError, ValueError) as error:  # ValueError: it is empty
            return self._refuse(str(error))
        mapped.madvise(mmap.MADV_HUGEPAGE)
        num_bytes = len(mapped) - TRAILER.size
        if num_bytes <= 0:
            return self._refuse("it is cut off")
        magic, key, written_bytes, digest = TRAILER.unpack_from(mapped, num_bytes)
        if (magic, key, written_bytes) != (MAGIC, self.key, num_bytes):
            return self._refuse("it is cut off, or was written by something else")
        block = np.frombuffer(mapped, np.uint8, num_bytes)
        if _core.digest(pool, block) != digest:
            return self._refuse("it is damaged")
        _core.place_packed(weights, block)
        return True

    def write(self, block: Bytes, pool: _core.ThreadPool) -> None:
        """All of the file or nothing. CapacityError if the system will not have it."""
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with partial.open("wb") as file:
                    for at in range(0, block.size, WRITE_BYTES):
                        file.write(block.data[at : at + WRITE_BYTES])
                    file.write(TRAILER.pack(MAGIC, self.key, block.size, _core.digest(pool, block)))
                partial.replace(self.path)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise CapacityError(f"{self.path} cannot be written: {error.strerror or error}") from None

    def _refuse(self, reason: str) -> bool:
        log.warning("%s is not used, the weights are packed anew: %s; `headrace pack` replaces it", self.path, reason)
        return False


@dataclass(frozen=True, slots=True)
class PackedFolder:
    """Where a start looks for the packed weights of the model at `source`, a file or a directory."""

    path: Path
    source: Path
    is_filled: bool = False  # a start that packs writes them here

    def file_for(self, parts: Sequence[Part], isa: str, pool: _core.ThreadPool) -> PackedFile:
        """The file for all matrices of the model, in the layout that the kernels of `isa` read."""
        key = hashlib.sha256(isa.encode())
        files = [self.source] if self.source.is_file() else sorted(filter(Path.is_file, self.source.iterdir()))
        for file in files:
            status = file.stat()
            key.update(repr((status.st_size, int(status.st_mtime))).encode())  # whole seconds: archives keep no more
        for weight, tensor in parts:
            _add_tensor(key, tensor)
            key.update(repr((weight.format, weight.rows, weight.columns, weight.nbytes)).encode())
        for name in sorted({weight.format for weight, _ in parts}):
            key.update(_probe_layout(isa, name, pool))
        return PackedFile(self.path / f"{self.source.stem}-{key.hexdigest()[:16]}.packed", key.digest())


def _add_tensor(key: hashlib._Hash, tensor: Tensor) -> None:
    order = None if tensor.row_order is None else hashlib.sha256(tensor.row_order.tobytes()).digest()
    key.update(repr((tensor.format.name, tensor.shape, order)).encode())
    for piece in tensor.samples(SAMPLES, SAMPLE_BYTES):
        key.update(piece)


def _probe_layout(isa: str, format_name: str, pool: _core.ThreadPool) -> bytes:
    """What the kernels make of some matrix: no number must be raised, and none forgotten, when their layout changes."""
    probe = _core.Weight(isa, format_name, PROBE_ROWS, PROBE_COLUMNS)
    block = _core.place_together([probe])
    data = np.arange(FORMATS[format_name].row_bytes(PROBE_COLUMNS) * PROBE_ROWS) * 167 % 61  # 61: no f16 is a NaN
    probe.pack(pool, data.astype(np.uint8))
    return block.tobytes()
