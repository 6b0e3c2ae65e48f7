"""What the machine has."""

import os


def usable_cores() -> int:
    """Cores that this process may use: those it is bound to, where the system can say, else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
