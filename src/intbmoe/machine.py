"""The resources of this machine."""

import math
import os
from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Where Linux publishes a container's limits."""


def usable_cores() -> int:
    """Cores that this process may use: those it is bound to if the system can say, otherwise all; at most the quota of
    its container (``docker run --cpus 2``)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _quota(CONTROL_GROUP) or cores)


def _quota(folder: Path) -> int | None:
    """The number of cores whose time a container may use, rounded up; None if there is no limit."""
    now, before = folder / "cpu.max", folder / "cpu"  # control groups version 2 and version 1
    try:
        if now.is_file():
            quota, period = now.read_text().split()
        else:
            quota, period = ((before / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    except OSError:
        return None
    return None if quota == "max" or int(quota) <= 0 else math.ceil(int(quota) / int(period))
