"""How many threads may compute: what affinity and the control groups' quotas leave of the machine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from headrace.backend.cgroups import ControlGroup, SystemFiles, Version, control_groups, text_of


def default_num_threads(files: SystemFiles | None = None) -> int:
    """The processors this process may run on, or fewer where a quota is less: a thread beyond it would be throttled."""
    quotas = [math.floor(quota) for quota in cpu_quotas(files or SystemFiles())]
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def cpu_quotas(files: SystemFiles) -> Iterator[float]:
    """The quotas, in processors, of the process's control group and all above it."""
    for group in control_groups("cpu", files):
        if (quota := _quota(group)) is not None:
            yield quota


def _quota(group: ControlGroup) -> float | None:
    """Processors; None for no quota ("max", -1) or no such file."""
    if group.version is Version.V2:
        quota, _, period = text_of(group.folder / "cpu.max").partition(" ")
    else:
        quota, period = (text_of(group.folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    if not quota.strip().isdigit() or not period.strip().isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)
