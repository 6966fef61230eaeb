"""What the machine gives in this minute: its read bandwidth, how near its cores are to each other, and what a process
takes of its memory."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace import _core

PROC = Path("/proc")
PIECE_BYTES = 1 << 24
ROOF_BYTES, ROOF_PASSES = 1 << 29, 5  # far above any last cache; a quarter of a second here
LINE_PASSES = 9  # a few ms


@dataclass(frozen=True, slots=True)
class Minute:
    """What as many threads as an engine gets find just before it is asked."""

    read_bandwidth: float = 0.0  # bytes per second from memory: the roof of decoding
    line_seconds: float = 0.0  # a cache line's way from one core to another: much longer where they share no cache


def look_at(num_threads: int) -> Minute:
    pool = _core.ThreadPool(num_threads)
    try:
        bandwidth = statistics.median(_core.read_bandwidth(pool, ROOF_BYTES, ROOF_PASSES))
        return Minute(bandwidth, statistics.median(_core.line_transfer(pool, LINE_PASSES) or [0.0]))
    finally:
        pool.close()


def read_into_cache(path: Path) -> None:
    """Have the system hold the file, or a folder's files, in memory: a start is to be timed, not a disk."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb", buffering=0) as source:
                while source.read(PIECE_BYTES):
                    pass


def map_into_cache(path: Path) -> None:
    """The same for a file that starts map, in pages as large as the first of them would have it."""
    with path.open("rb") as file:
        # What came while memory was short lies in small ones.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            mapped.madvise(mmap.MADV_HUGEPAGE)
            for at in range(0, len(mapped), mmap.PAGESIZE):
                _ = mapped[at]


def process_tree(pid: int) -> list[int]:
    """`pid` and all its descendants."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]  # a name may hold spaces
                children[int(parent)].append(int(entry.name))
    tree = [pid]
    for member in tree:
        tree += children[member]
    return tree


def resident_bytes(pid: int) -> int:
    """Proportional set size of the process and its descendants: shared pages count once."""
    total = 0
    for member in process_tree(pid):
        with contextlib.suppress(OSError):
            for line in (PROC / str(member) / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Hold the lock's file, as flock(1) does, where people share a machine and agree on one."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
