"""How much memory there is, how much a server will take, and whether it fits: the ledger.

Owns the limits that the system sets (machine, control groups, ulimit) and the sum. What each part takes is computed
by the part itself.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from headrace.backend.cgroups import ControlGroup, SystemFiles, Version, control_groups, text_of
from headrace.types import CapacityError

MARGIN_BYTES = 128 * 2**20  # interpreter, libraries, request texts; measured at under 100 MiB with the default model
DEFAULT_KV_BYTES = 2 * 2**30  # more is worth its memory only where someone asks for it
EAGER_PART = 4  # one part in so many of the KV cache fills before anything is forgotten; see sched.blocks
GROUP_FILES = {  # limit and usage
    Version.V1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    Version.V2: ("memory.max", "memory.current"),
}


def available_bytes(files: SystemFiles | None = None) -> int:
    """Bytes this process may still take: the least that machine, control groups and `ulimit -v` leave."""
    files = files or SystemFiles()
    rooms = [_machine_room(files), *map(_group_room, control_groups("memory", files)), _address_room(files)]
    known = [room for room in rooms if room is not None]
    return max(0, min(known)) if known else 0


def _machine_room(files: SystemFiles) -> int | None:
    return _field(files.proc / "meminfo", "MemAvailable:")


def _address_room(files: SystemFiles) -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return limit - (_field(files.proc / "self" / "status", "VmSize:") or 0)


def _field(path: Path, name: str) -> int | None:
    """A `Name:  123 kB` line of a /proc file, in bytes."""
    for line in text_of(path).splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return None


def _group_room(group: ControlGroup) -> int | None:
    limit, usage = GROUP_FILES[group.version]
    most, used = (text_of(group.folder / name).strip() for name in (limit, usage))
    if not most.isdigit() or not used.isdigit():
        return None  # "max", or no such file: no limit here
    # Copies of files, those too that were read twice or are mapped: the system gives them up before it kills anyone.
    reclaimable = sum(_stat(group.folder / "memory.stat", name) for name in ("inactive_file", "active_file"))
    return int(most) - int(used) + reclaimable


def _stat(path: Path, name: str) -> int:
    for line in text_of(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


@dataclass(frozen=True, slots=True)
class Ledger:
    """Every byte that a server takes, known before any is taken."""

    weights: int
    kv: int
    activations: int  # the arena and scratch of the largest step
    available: int
    margin: int = MARGIN_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations + self.margin

    def rows(self) -> list[tuple[str, int]]:
        return [
            ("weights", self.weights),
            ("KV cache", self.kv),
            ("activations and scratch", self.activations),
            ("margin", self.margin),
            ("total", self.total),
            ("available", self.available),
        ]

    def check(self) -> None:
        """Raise CapacityError, with the numbers and what to change, if it does not fit."""
        if self.total <= self.available:
            return
        parts = ", ".join(f"{name} {mib(size)}" for name, size in self.rows()[:4])
        raise CapacityError(
            f"needs {mib(self.total)} of memory ({parts}), but {mib(self.available)} are available; "
            "lower --max-kv-bytes, --max-len, --max-seqs or --max-step-tokens, or choose a smaller model"
        )


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def kv_bytes_to_take(asked: int | None, most_useful: int, available: int) -> int:
    """Size of the KV pool: as asked, else the least of half the available memory, what all sequences can use, 2 GiB."""
    if asked is not None:
        return min(asked, most_useful)
    return min(available // 2, most_useful, DEFAULT_KV_BYTES)
