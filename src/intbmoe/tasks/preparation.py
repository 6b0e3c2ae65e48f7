"""Data that must be made ready once before training: ``intbmoe prepare NAME SOURCE TARGET``.

A preparation can be interrupted and repeated: it goes on from what is finished, and writes nothing that looks whole
before it is. What it leaves in ``target`` is what the recipe's ``data.path`` takes. Its parts may be done by several
processes or machines (``workers.py``).
"""

import fcntl
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from intbmoe.files import replace_file, to_json
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.workers import ALONE, Progress, Workers

UNFINISHED = "unfinished"
"""The folder in a target where work is kept until all is there."""
PLAN = "plan.json"
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


def claim(folder: Path, plan: Mapping[str, Any], target: Path) -> None:
    """Write down in ``folder`` what is being made, or check that it is what was begun there.

    ``plan`` has ``version``, ``name``, and ``files``: the size of each source file by its name.
    """
    if not (folder / PLAN).is_file():
        replace_file(folder / PLAN, to_json(plan))
        return
    begun = json.loads((folder / PLAN).read_bytes())
    if (begun["version"], begun["name"]) != (plan["version"], plan["name"]):
        other = f"{begun['name']}, version {begun['version']}"
        raise DataError(f"{target} holds the beginning of another preparation ({other}): remove it or choose another")
    require_same_files(begun["files"], plan["files"], target)


def require_same_files(before: Mapping[str, int], now: Mapping[str, int], target: Path) -> None:
    if before != now:
        differing = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        raise DataError(
            f"{target} was made from other files than these ({', '.join(differing)} differ): remove it, or choose "
            f"another folder"
        )
