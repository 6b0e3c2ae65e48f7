"""Data that must be made ready once before training: ``intbmoe prepare NAME SOURCE TARGET``.

A preparation can be interrupted and repeated: it goes on from what is finished, and writes nothing that looks whole
before it is. What it leaves in ``target`` is what the recipe's ``data.path`` takes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from intbmoe.tasks.errors import DataError

Progress = Callable[[str, int, int | None], None]  # (what is being done, how much of it is, of how much if known)


@dataclass(frozen=True)
class Preparation:
    summary: str  # what the source is, for ``--help``
    function: str  # module:function, imported when used: (source, target, *, skip_bad, progress) → what was counted

    def run(self, source: Path, target: Path, *, skip_bad: bool, progress: Progress) -> Mapping[str, Any]:
        """Make ``target`` from ``source``. A malformed row raises ``DataError``, or is counted with ``skip_bad``."""
        if source.resolve() == target.resolve():
            raise DataError(f"{target} is the source itself: give another target, for what is made of it")
        in_the_way = next((path for path in (target, *target.parents) if path.exists() and not path.is_dir()), None)
        if in_the_way is not None:
            raise DataError(f"{in_the_way} is not a folder: give another target")
        module, name = self.function.split(":")
        return getattr(import_module(module), name)(source, target, skip_bad=skip_bad, progress=progress)
