"""How many threads may compute: what affinity and the control groups' quotas leave of the machine.

Paths of the system's files are arguments, so that the arithmetic can be tested anywhere.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def default_num_threads(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The processors this process may run on, or fewer where a quota is less: a thread beyond it would be throttled."""
    quotas = [len(os.sched_getaffinity(0)), *(math.floor(quota) for quota in cpu_quotas(proc, cgroup))]
    return max(1, min(quotas))


def cpu_quotas(proc: Path, cgroup: Path) -> Iterator[float]:
    """The quotas, in processors, of the process's control group and all above it: cgroup v2's and v1's."""
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _known(_quota_v2(folder) for folder in _upwards(cgroup, path))
        elif "cpu" in controllers.split(","):
            yield from _known(_quota_v1(folder) for folder in _upwards(cgroup / controllers, path))
            yield from _known(_quota_v1(folder) for folder in _upwards(cgroup / "cpu", path))


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """The folder of a control group and those above it, the root included: the path may not exist in a container."""
    folder = root / path.strip("/")
    while folder != root and root in folder.parents:
        yield folder
        folder = folder.parent
    yield root


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return _ratio(quota, period)


def _quota_v1(folder: Path) -> float | None:
    return _ratio(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    """Processors; None for no quota ("max", -1) or no such file."""
    if not quota.strip().isdigit() or not period.strip().isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _known(quotas: Iterator[float | None]) -> Iterator[float]:
    return (quota for quota in quotas if quota is not None)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""
