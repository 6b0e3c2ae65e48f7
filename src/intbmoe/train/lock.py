"""One process trains into a run directory. The operating system drops the lock when its holder dies, however it dies.

A record lock, not a lock file's existence: nothing goes stale after a kill, and children do not inherit it (a data
worker that outlives its parent for a moment does not keep the run locked).
"""

import fcntl
import os
from pathlib import Path

from intbmoe.train.errors import RunConflictError

_held: set[Path] = set()  # record locks do not exclude a second attempt of the same process


class RunLock:
    """``with RunLock(folder): …``; raises ``RunConflictError``, naming the holder's process, when it is taken."""

    def __init__(self, folder: Path) -> None:
        self.path = folder.resolve() / "lock"
        self._descriptor = -1

    def __enter__(self) -> "RunLock":
        if self.path in _held:
            raise RunConflictError(f"this process already trains into {self.path.parent}")
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise RunConflictError(
                f"process {holder} trains into {self.path.parent}: wait for it, or stop it (kill {holder})"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"{os.getpid()}\n".encode())
        _held.add(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        # The file stays: removing it would let two later processes hold locks on two files of one name.
        _held.discard(self.path)
        os.close(self._descriptor)
