"""Data that must be made ready once before training: ``intbmoe prepare NAME SOURCE TARGET``.

A preparation can be interrupted and repeated: it goes on from what is finished, and writes nothing that looks whole
before it is. What it leaves in ``target`` is what the recipe's ``data.path`` takes. Its parts may be done by several
processes or machines (``workers.py``).
"""

import fcntl
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.workers import ALONE, Progress, Workers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preparation:
    summary: str  # what the source is, for ``--help``
    function: str
    """module:function, imported when used: (source, target, *, skip_bad, progress, workers) → what was counted."""

    def run(
        self, source: Path, target: Path, *, skip_bad: bool, progress: Progress, workers: Workers = ALONE
    ) -> Mapping[str, Any]:
        """Make ``target`` from ``source``. A malformed row raises ``DataError``, or is counted with ``skip_bad``."""
        source, target = (
            source.expanduser().absolute(),
            target.expanduser().absolute(),
        )  # for workers, wherever they run
        if source.resolve() == target.resolve():
            raise DataError(f"{target} is the source itself: give another target, for what is made of it")
        in_the_way = next((path for path in (target, *target.parents) if path.exists() and not path.is_dir()), None)
        if in_the_way is not None:
            raise DataError(f"{in_the_way} is not a folder: give another target")
        module, name = self.function.split(":")
        options = {"skip_bad": skip_bad, "progress": progress, "workers": workers}
        return getattr(import_module(module), name)(source, target, **options)


@contextmanager
def locked(folder: Path, target: Path) -> Iterator[None]:
    """One preparation of ``target`` at a time; the system drops the lock, in ``folder``, when its holder dies."""
    with open(folder / "lock", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another process is preparing {target}: wait for it, or stop it") from error
        except OSError as error:
            log.warning("%s has no locks (%s): see to it that only one process prepares it", target, error)
        yield
