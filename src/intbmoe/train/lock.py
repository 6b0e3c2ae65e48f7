"""One process trains into a run directory. The operating system drops the lock when its holder dies, however it dies.

A record lock, not a lock file's existence: nothing goes stale after a kill, and children do not inherit it (a data
worker that outlives its parent for a moment does not keep the run locked).
"""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from intbmoe.train.errors import RunConflictError

_held: set[Path] = set()  # record locks do not exclude a second attempt of the same process


class RunLock:
    """``with RunLock(folder): …``; raises ``RunConflictError``, naming the holder's process, when it is taken.

    With ``wait`` the holder's end is waited for instead, after ``wait`` was told of it.
    """

    def __init__(self, folder: Path, wait: Callable[[str], None] | None = None) -> None:
        self.path = folder.resolve() / "lock"
        self._wait = wait
        self._descriptor = -1

    def __enter__(self) -> "RunLock":
        if self.path in _held:
            raise RunConflictError(f"this process already trains into {self.path.parent}")
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take()
        except BaseException:
            os.close(self._descriptor)
            raise
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        _held.add(self.path)
        return self

    def _take(self) -> None:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:  # either may stand for a lock that is taken
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            taken = f"process {holder} trains into {self.path.parent}"
            if self._wait is None:
                raise RunConflictError(f"{taken}: wait for it, or stop it (kill {holder})") from error
            self._wait(f"{taken}: waiting for its end")
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        # The file stays: removing it would let two later processes hold locks on two files of one name.
        _held.discard(self.path)
        os.close(self._descriptor)
