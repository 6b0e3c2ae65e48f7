"""Data that must be prepared once before training: ``intbmoe prepare NAME SOURCE TARGET``.

A preparation can be interrupted and repeated: it resumes from what is finished, and writes nothing that looks complete
before it is. The recipe's ``data.path`` accepts what it leaves in ``target``. Several processes or machines may share
its parts (``workers.py``).
"""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from intbmoe.files import private_folder, replace_file, to_json, write_bytes
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.workers import ALONE, Progress, Workers

UNFINISHED = "unfinished"
"""The folder inside a target where work is kept until everything is done."""
META = "meta.json"
"""Written last: a target that has it is complete."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preparation:
    summary: str  # what the source is, for ``--help``
    function: str
    """module:function, imported when used: (source, target, *, skip_bad, progress, workers) → what was counted."""

    def run(
        self, source: Path, target: Path, *, skip_bad: bool, progress: Progress, workers: Workers = ALONE
    ) -> Mapping[str, Any]:
        """Make ``target`` from ``source``; a malformed row raises ``DataError``, or is counted with ``skip_bad``."""
        # Absolute paths, for workers wherever they run.
        source, target = source.expanduser().absolute(), target.expanduser().absolute()
        if source.resolve() == target.resolve():
            raise DataError(f"{target} is the source itself: give another target to write to")
        in_the_way = next((path for path in (target, *target.parents) if path.exists() and not path.is_dir()), None)
        if in_the_way is not None:
            raise DataError(f"{in_the_way} is not a folder: give another target")
        module, name = self.function.split(":")
        options = {"skip_bad": skip_bad, "progress": progress, "workers": workers}
        return getattr(import_module(module), name)(source, target, **options)


@contextmanager
def locked(folder: Path, target: Path) -> Iterator[None]:
    """Allow one preparation of ``target`` at a time; the system releases the lock when its holder dies."""
    with open(folder / "lock", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another process is preparing {target}: wait for it, or stop it") from error
        except OSError as error:
            log.warning("%s has no locks (%s): make sure that only one process prepares it", target, error)
        yield


def prepare_once(target: Path, plan: Mapping[str, Any], make: Callable[[Path], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return ``target``'s meta.json: ``plan`` and what ``make`` returns. A finished target is left as it is.

    ``plan`` has ``version``, ``name``, and ``files``: the size of each source file by name. ``make`` gets a folder for
    unfinished work, which may hold some from an earlier attempt.
    """
    unfinished = target / UNFINISHED
    if (target / META).is_file():
        meta = json.loads((target / META).read_bytes())
        _require_same_files(meta, plan, target)
    else:
        unfinished.mkdir(parents=True, exist_ok=True)
        with locked(unfinished, target):
            _claim(unfinished / "plan.json", plan, target)
            meta = {**plan, **make(unfinished)}
            replace_file(target / META, to_json(meta))
    shutil.rmtree(unfinished, ignore_errors=True)
    return meta


def _claim(file: Path, plan: Mapping[str, Any], target: Path) -> None:
    """Record what is being made, or check that it matches what was begun."""
    if not file.is_file():
        replace_file(file, to_json(plan))
        return
    begun = json.loads(file.read_bytes())
    if (begun["version"], begun["name"]) != (plan["version"], plan["name"]):
        other = f"{begun['name']}, version {begun['version']}"
        raise DataError(f"{target} holds the beginning of another preparation ({other}): remove it or choose another")
    _require_same_files(begun, plan, target)


def _require_same_files(before: Mapping[str, Any], now: Mapping[str, Any], target: Path) -> None:
    differing = {name for name, _ in before["files"].items() ^ now["files"].items()}
    if differing:
        raise DataError(
            f"{target} was made from other files than these ({', '.join(sorted(differing))} differ): remove it, or "
            f"choose another folder"
        )


def do_part(folder: Path, stem: str, skip_bad: bool, work: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Return what ``work`` counted, kept in ``folder`` as a receipt so that it is not done again.

    It is done again if it skipped rows that may not be skipped now. ``work`` gets its own folder, because a machine
    that was given up may still be writing the same part.
    """
    receipt = folder / f"{stem}.json"
    if receipt.is_file():
        done = json.loads(receipt.read_bytes())
        if skip_bad or not done["skipped"]:
            return done
    with private_folder(folder, f".{stem}.", ".part") as own:
        done = work(own)
        write_bytes(own / "done.json", to_json(done))
        os.replace(own / "done.json", receipt)
    return done
