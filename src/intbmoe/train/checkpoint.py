"""Checkpoints: a folder of safetensors and JSON with checksums, written beside and renamed into place.

    checkpoints/step-00000500/model.safetensors        parameters and buffers (a method's state among them)
                              optimizer.safetensors    what the optimizer remembers, as <parameter>/<quantity>
                              statistics.safetensors   load counts since the last line of metrics
                              state.json               where the run stands, and the SHA-256 of every file

Nothing is pickled. A kill at any moment leaves the last whole checkpoint: a folder gets its name only when everything
in it is on the disk, older ones go after that, and one that was damaged later is passed over with a message.
"""

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from intbmoe.files import digest, remove_folder, replacing_folder, to_json, write_bytes
from intbmoe.train.errors import DamagedFileError
from intbmoe.train.files import full_disk_is_explained, pack_tensors, read_json, read_tensors

FORMAT = 1
PARTS = ("model", "optimizer", "statistics")


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on."""

    step: int
    """Optimizer steps done."""
    tensors: Mapping[str, Mapping[str, Tensor]]
    """Tensors by name, for each of ``PARTS``."""
    state: Mapping[str, Any]
    """Everything else, as plain JSON values."""


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self.keep = keep

    def steps(self) -> list[int]:
        """The steps there are checkpoints of, oldest first."""
        if not self.path.is_dir():
            return []
        names = (re.fullmatch(r"step-(\d+)", entry.name) for entry in self.path.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.path / f"step-{step:08d}"

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, then remove those beyond ``keep``."""
        folder = self.folder(checkpoint.step)
        kept = f"the checkpoints before it are whole (steps {self.steps() or 'none'}); free some space and start again"
        with full_disk_is_explained(folder, kept):
            self._write(folder, checkpoint)
        for step in self.steps()[: -self.keep]:
            remove_folder(self.folder(step))
        return folder

    def _write(self, folder: Path, checkpoint: Checkpoint) -> None:
        with replacing_folder(folder) as beside:
            sums = {}
            for part in PARTS:
                content = pack_tensors(checkpoint.tensors[part])
                write_bytes(beside / f"{part}.safetensors", content)
                sums[f"{part}.safetensors"] = digest(content)
            entries = {"format": FORMAT, "step": checkpoint.step, **checkpoint.state, "sha256": sums}
            write_bytes(beside / "state.json", to_json({**entries, "checksum": digest(to_json(entries))}))

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of a step; anything wrong with it is a ``DamagedFileError`` that names the file."""
        folder = self.folder(step)
        path = folder / "state.json"
        state = read_json(path)
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            found = state.get("format") if isinstance(state, dict) else None
            raise DamagedFileError(f"{path} has format {found!r}: this version of intbmoe reads format {FORMAT}")
        checksum = state.pop("checksum", None)
        if checksum != digest(to_json(state)) or state.get("step") != step:
            raise DamagedFileError(f"{path} is altered: its checksum or step does not fit")
        sums = state.pop("sha256")
        tensors = {part: read_tensors(folder / f"{part}.safetensors", sums[f"{part}.safetensors"]) for part in PARTS}
        return Checkpoint(step, tensors, state)

    def load_newest(self, tell: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint; None if there never was one. ``tell`` gets a message about each damaged one."""
        self._clean()
        problems = []
        for step in reversed(self.steps()):
            try:
                found = self.load(step)
            except DamagedFileError as error:
                problems.append(str(error))
                tell(f"WARNING: the checkpoint of step {step} is damaged and passed over: {error}")
                continue
            if problems:
                tell(f"WARNING: going on from the older checkpoint of step {step}")
            return found
        if problems:
            raise DamagedFileError(
                "no checkpoint is whole:\n  " + "\n  ".join(problems) + f"\nRemove {self.path.parent} to start afresh."
            )
        return None

    def _clean(self) -> None:
        """Remove what a kill left half written or half removed."""
        if self.path.is_dir():
            for entry in self.path.iterdir():
                if entry.name.startswith(".step-"):
                    shutil.rmtree(entry)
