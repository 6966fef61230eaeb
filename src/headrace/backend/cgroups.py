"""Control groups: the folders in which Linux says what a process may take, from its own group up to the root.

Owns the two layouts, version 2's and version 1's. Refuses to know what is in the folders' files.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class Version(enum.Enum):
    V1 = 1
    V2 = 2


@dataclass(frozen=True, slots=True)
class SystemFiles:
    """Where Linux tells about processes and their groups; arguments, so that the arithmetic can be tested anywhere."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    folder: Path  # may not exist: a container sees only a part of the tree
    version: Version


def control_groups(controller: str, files: SystemFiles) -> Iterator[ControlGroup]:
    """The process's group for a controller ("cpu", "memory") and every one above it."""
    for line in text_of(files.proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from (ControlGroup(folder, Version.V2) for folder in _upwards(files.cgroup, path))
        elif controller in controllers.split(","):
            for mount in dict.fromkeys((controllers, controller)):  # "cpu,cpuacct", with "cpu" as a link to it
                yield from (ControlGroup(folder, Version.V1) for folder in _upwards(files.cgroup / mount, path))


def _upwards(root: Path, path: str) -> Iterator[Path]:
    folder = root / path.strip("/")
    while folder != root and root in folder.parents:
        yield folder
        folder = folder.parent
    yield root


def text_of(path: Path) -> str:
    """What a file of the system says; nothing where it is not there."""
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""
