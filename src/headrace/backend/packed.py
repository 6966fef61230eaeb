"""Packed weights on disk: a start that maps them needs neither pack anew nor take memory of its own for them.

Owns the file's form, its name, and when it is good: for one model, as its files were, and one layout of the kernels.
Anything else, a damaged file too, is as if there were none. Nothing is written unless asked for.

The file, little-endian: the block of all weights as `_core.place_together` lays it out, then a trailer. That one comes
last so that the block begins at a page of its own, a huge one where the file system has such.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import logging
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace import _core
from headrace.tensor import FORMATS, Bytes, Format, Tensor
from headrace.types import CapacityError, ModelError

log = logging.getLogger(__name__)

MAGIC = b"headrace"
TRAILER = struct.Struct("<8s32sQQ")  # MAGIC, the key, bytes of the block, its digest
SUFFIX, PARTIAL_SUFFIX = ".packed", ".part"
MAX_NAME_BYTES = 200  # of a model's name in that of the file; file systems allow 255 for all of it
SAMPLES, SAMPLE_BYTES = 4, 4096  # of each tensor's bytes: tell models of one shape apart that were made in one second
PROBE_ROWS, PROBE_COLUMNS = 41, 96  # whole tiles of outputs and groups of inputs, and a tile that is not whole
PROBE_MORE_COLUMNS = 8  # where a format has no blocks: a group that is not whole
WRITE_BYTES = 1 << 23  # whole huge pages at a time: what the system keeps of the file is then made of them

Part = tuple[_core.Weight, Tensor]


@dataclass(frozen=True, slots=True)
class PackedFile:
    """Where the packed weights of a model are, or would be."""

    path: Path
    key: bytes
    mode: int  # of its permissions: who may read the model may read it
    is_kept: bool  # a start that packs writes it

    def map(self, weights: Sequence[_core.Weight], pool: _core.ThreadPool) -> bool:
        """Whether the weights are mapped from the file; all are packed then."""
        try:
            if not self.path.is_file():  # to open anything else may wait for ever
                return False
            with self.path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except PermissionError:
            return False  # somebody else's
        except (OSError, ValueError) as error:  # ValueError: it is empty
            return self._refuse(str(error))
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)  # advice only: not every kernel has them
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
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder):
                for left in folder.glob(f"*{PARTIAL_SUFFIX}"):  # by a process that was killed, as this one has the lock
                    left.unlink()
                self._write_locked(block, pool)
        except OSError as error:
            raise CapacityError(f"{self.path} cannot be written: {error.strerror or error}") from None

    def _write_locked(self, block: Bytes, pool: _core.ThreadPool) -> None:
        partial = self.path.with_suffix(PARTIAL_SUFFIX)
        try:
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self.mode), "wb") as file:
                for at in range(0, block.size, WRITE_BYTES):
                    file.write(block.data[at : at + WRITE_BYTES])
                file.write(TRAILER.pack(MAGIC, self.key, block.size, _core.digest(pool, block)))
            partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)

    def _refuse(self, reason: str) -> bool:
        advice = "it is replaced" if self.is_kept else "`headrace pack` replaces it"
        log.warning("%s is not used, the weights are packed anew: %s; %s", self.path, reason, advice)
        return False


@dataclass(frozen=True, slots=True)
class PackedFolder:
    """Where a start looks for the packed weights of the model `name`, which is at `source`, a file or a directory."""

    path: Path
    name: str
    source: Path
    is_kept: bool = False  # weights that a start packs are kept here

    def file_for(self, parts: Sequence[Part], isa: str, pool: _core.ThreadPool) -> PackedFile | None:
        """The file for all matrices of the model, in the layout that the kernels of `isa` read.

        None if there is none of that name and none is to be written: to find out more, the model must be read. It is a
        few pages of each matrix. ModelError if it cannot be, and a file is to be written.
        """
        name = os.fsencode(self.name)[:MAX_NAME_BYTES].decode(errors="ignore")
        if not self.is_kept and not files_of(self.path, name):
            return None
        try:
            files = [file.stat() for file in self._weight_files()]
        except OSError as error:
            if self.is_kept:
                raise ModelError(f"{self.source} cannot be read: {error.strerror or error}") from None
            return None
        key = hashlib.sha256(isa.encode())
        for file in files:
            key.update(repr((file.st_size, int(file.st_mtime))).encode())  # whole seconds: archives keep no more
        for weight, tensor in parts:
            _add_tensor(key, tensor)
            key.update(repr((weight.format, weight.rows, weight.columns, weight.nbytes)).encode())
        for piece in probes(isa, parts, pool):
            key.update(piece)
        mode = 0o600 | (0o044 if all(file.st_mode & 0o044 == 0o044 for file in files) else 0)
        return PackedFile(self.path / f"{name}-{key.hexdigest()[:16]}{SUFFIX}", key.digest(), mode, self.is_kept)

    def _weight_files(self) -> list[Path]:
        return [self.source] if self.source.is_file() else sorted(self.source.glob("*.safetensors"))


def files_of(folder: Path, name: str) -> list[Path]:
    """The packed files of the model `name`, whatever state of it, instruction set or form they were made for."""
    found = folder.glob(f"{glob.escape(name)}-*{SUFFIX}")
    return sorted(file for file in found if file.name.rpartition("-")[0] == name)


def files_beside(packed: Path) -> list[Path]:
    """The other files of the same model's name: other starts may map them, so nobody removes them unasked."""
    return [file for file in files_of(packed.parent, packed.name.rpartition("-")[0]) if file != packed]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _add_tensor(key: hashlib._Hash, tensor: Tensor) -> None:
    order = None if tensor.row_order is None else hashlib.sha256(tensor.row_order.tobytes()).digest()
    key.update(repr((tensor.format.name, tensor.shape, order)).encode())
    for piece in tensor.samples(SAMPLES, SAMPLE_BYTES):
        key.update(piece)


def probes(isa: str, parts: Sequence[Part], pool: _core.ThreadPool) -> Iterator[bytes]:
    """What is made of some matrices: no number is to be raised, and none forgotten, when layouts or decoders change."""
    for name in sorted({weight.format for weight, _ in parts}):
        fmt = FORMATS[name]
        columns = PROBE_COLUMNS + (PROBE_MORE_COLUMNS if fmt.block_values == 1 else 0)
        probes = [_core.Weight(isa, name, PROBE_ROWS, columns) for _ in range(2)]
        block = _core.place_together(probes)
        for probe in probes:
            probe.pack(pool, _probe_bytes(fmt, columns))
        yield block.tobytes()
    for name in sorted({tensor.format.name for weight, tensor in parts if tensor.format.name != weight.format}):
        fmt = FORMATS[name]
        yield fmt.unpack(_probe_bytes(fmt, PROBE_COLUMNS).reshape(-1, fmt.block_bytes)).tobytes()


def _probe_bytes(fmt: Format, columns: int) -> Bytes:
    numbers = np.arange(fmt.row_bytes(columns) * PROBE_ROWS) * 167 % 61  # 61: no f16 is a NaN
    return numbers.astype(np.uint8)
