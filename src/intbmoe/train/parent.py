"""Runs that another process started end with it, however it ends: nobody trains on after a comparison's ``kill -9``."""

import ctypes
import os
import signal
import sys

STARTED_BY = "INTBMOE_STARTED_BY"
"""The environment variable that tells a training which process it belongs to."""
PR_SET_PDEATHSIG = 1


def belongs_to_another() -> bool:
    """Whether ``STARTED_BY`` names this process's parent; on Linux the parent's end is then a SIGTERM to this one."""
    parent = os.environ.pop(STARTED_BY, None)  # what this process starts is its own
    if parent is None:
        return False
    if sys.platform == "linux":
        # Where it is forbidden the run trains on alone, and who starts it again waits for its lock.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != int(parent):
            sys.exit(128 + signal.SIGTERM)  # it ended before the signal was asked for
    return True
