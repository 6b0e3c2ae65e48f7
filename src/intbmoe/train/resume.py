"""Resuming: what a checkpoint holds, how it is saved, and how a run is restored from it.

    checkpoints/step-00000500/model.safetensors        parameters and buffers (including a method's state)
                              optimizer.safetensors    the optimizer's state, as <parameter>/<quantity>
                              statistics.safetensors   load counts since the last line of metrics
                              state.json               the run's progress, its recipe and data (``origin.py``), and
                                                       the SHA-256 of every file
                              shards/                  for a sharded model: what each rank held of the first two

Nothing is pickled. A kill at any moment leaves the last checkpoint intact: a folder gets its name only when everything
in it is on disk, and only then are older ones removed. A checkpoint that is damaged later is skipped with a message.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intbmoe.checks import require_state
from intbmoe.files import digest, file_digest, remove_folder, replacing_folder, to_json, write_bytes
from intbmoe.layer import moe_layers
from intbmoe.train.distribution import Ranks, assign, whole
from intbmoe.train.errors import DamagedFileError, TrainingError
from intbmoe.train.files import full_disk_is_explained, pack_tensors, read_json, read_tensors
from intbmoe.train.metrics import Window
from intbmoe.train.shards import is_sharded, read_shards, write_shards

FORMAT = 1
SHARDED_FORMAT = 2  # with ``shards/``, whose tensors are listed in state.json
PARTS = ("model", "optimizer", "statistics")


@dataclass(frozen=True)
class Checkpoint:
    step: int  # optimizer steps done
    tensors: Mapping[str, Mapping[str, Tensor]]  # tensors by name, for each of ``PARTS``
    state: Mapping[str, Any]  # everything else, as plain JSON values
    shards: Path | None = None  # the folder with the tensors that are only placeholders (meta device) in ``tensors``

    def sharded(self) -> dict[str, Tensor]:
        """Return the tensors that are spread over the ranks, as <part>/<name>."""
        found = ((f"{part}/{name}", value) for part in PARTS for name, value in self.tensors[part].items())
        return {name: value for name, value in found if is_sharded(value)}


class CheckpointFolder:
    def __init__(self, path: Path, keep: int) -> None:
        self.path, self.keep = path, keep

    def steps(self) -> list[int]:
        names = (re.fullmatch(r"step-(\d+)", entry.name) for entry in self.path.glob("step-*"))
        return sorted(int(name[1]) for name in names if name)

    def folder(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def _aside(self, step: int) -> Path:
        return self.path / f".{self.folder(step).name}.shards"

    def save_shards(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        """Write each rank's part of the sharded tensors; all ranks call this before one of them calls ``save``."""
        sharded, aside = checkpoint.sharded(), self._aside(checkpoint.step)
        if sharded:
            if ranks.main:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
            ranks.wait()
            with full_disk_is_explained(aside, "earlier checkpoints are intact; free some space and start again"):
                write_shards(aside, sharded)

    def save(self, checkpoint: Checkpoint) -> Path:
        folder, sharded = self.folder(checkpoint.step), checkpoint.sharded()
        kept = f"earlier checkpoints are intact (steps {self.steps() or 'none'}); free some space and start again"
        # A folder of this name must be damaged, or this step would not have been reached a second time.
        with full_disk_is_explained(folder, kept), replacing_folder(folder, sync=True) as beside:
            sums = {}
            for part in PARTS:
                tensors = checkpoint.tensors[part].items()
                content = pack_tensors({name: value for name, value in tensors if not is_sharded(value)})
                write_bytes(beside / f"{part}.safetensors", content)
                sums[f"{part}.safetensors"] = digest(content)
            if sharded:
                os.rename(self._aside(checkpoint.step), beside / "shards")
                sums |= {f"shards/{path.name}": file_digest(path) for path in sorted((beside / "shards").iterdir())}
            entries = {
                "format": SHARDED_FORMAT if sharded else FORMAT,
                "step": checkpoint.step,
                **checkpoint.state,
                "sha256": sums,
            }
            if sharded:
                described = {name: [list(v.shape), str(v.dtype).removeprefix("torch.")] for name, v in sharded.items()}
                entries["sharded"] = described
            write_bytes(beside / "state.json", to_json({**entries, "checksum": digest(to_json(entries))}))
        for step in self.steps()[: -self.keep]:
            remove_folder(self.folder(step))
        return folder

    def load(self, step: int, check_shards: bool = True) -> Checkpoint:
        """Return the checkpoint of a step; anything wrong with it is a ``DamagedFileError`` that names the file.

        Without ``check_shards``, checking the files of the sharded tensors is left to another rank.
        """
        folder = self.folder(step)
        path = folder / "state.json"
        state = read_json(path)
        if not isinstance(state, dict) or state.get("format") not in (FORMAT, SHARDED_FORMAT):
            found = state.get("format") if isinstance(state, dict) else None
            known = f"formats {FORMAT} and {SHARDED_FORMAT}"
            raise DamagedFileError(f"{path} has format {found!r}: this version of intbmoe reads {known}")
        checksum = state.pop("checksum", None)
        if checksum != digest(to_json(state)) or state.get("step") != step:
            raise DamagedFileError(f"{path} is altered: its checksum or step does not match")
        sums = state.pop("sha256", None)
        if not isinstance(sums, dict) or not all(f"{part}.safetensors" in sums for part in PARTS):
            raise DamagedFileError(f"{path} is altered: it lacks the SHA-256 of a file")
        tensors = {part: read_tensors(folder / f"{part}.safetensors", sums[f"{part}.safetensors"]) for part in PARTS}
        shards = folder / "shards" if state["format"] == SHARDED_FORMAT else None
        for name, (shape, dtype) in state.pop("sharded", {}).items():
            part, _, tensor = name.partition("/")
            tensors[part][tensor] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name in (name for name in sums if check_shards and name.startswith("shards/")):
            if not (folder / name).is_file() or file_digest(folder / name) != sums[name]:
                raise DamagedFileError(f"{folder / name} is missing, truncated or altered: its SHA-256 does not match")
        return Checkpoint(step, tensors, state, shards)

    def load_newest(self, tell: Callable[[str], None]) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None if there never was one; ``tell`` hears of damaged ones."""
        for entry in self.path.glob(".step-*"):  # half written or half removed when the process was killed
            shutil.rmtree(entry)
        problems = []
        for step in reversed(self.steps()):
            try:
                found = self.load(step)
            except DamagedFileError as error:
                problems.append(str(error))
                tell(f"WARNING: the checkpoint of step {step} is damaged and skipped: {error}")
                continue
            if problems:
                tell(f"WARNING: resuming from the older checkpoint of step {step}")
            return found
        if problems:
            raise DamagedFileError(
                "no checkpoint is intact:\n  " + "\n  ".join(problems) + f"\nRemove {self.path.parent} to start over."
            )
        return None


@contextmanager
def edited_state_is_explained(folder: Path) -> Iterator[None]:
    """Explain a state.json with a correct checksum but wrong content, which some other program must have written."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFileError(
            f"{folder / 'state.json'} does not hold what a checkpoint does ({type(error).__name__}: {error}): remove "
            f"{folder}, and the run resumes from the checkpoint before it, or from the beginning"
        ) from error


@dataclass
class Standing:
    """The progress of a run, apart from its tensors."""

    step: int = 0  # optimizer steps done
    seconds: float = 0.0  # of training, including earlier starts
    window: Window = field(default_factory=Window)
    valid: dict[str, float] | None = None  # the last metrics on the validation split
    lengths: dict[str, int] = field(default_factory=dict)
    """The lengths of the metrics and loads files, as ``MetricsLog`` names them."""
    best: dict[str, float] | None = None  # the best metrics on the test split, if these are reported
    best_step: int = 0


def make_checkpoint(
    standing: Standing,
    epoch: float,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    origin: Mapping[str, Any],
) -> Checkpoint:
    """Return a checkpoint of a running training; of a sharded tensor it holds this rank's part."""
    tensors = {
        "model": model.state_dict(),
        "optimizer": {
            f"{name}/{quantity}": value if is_sharded(value) else whole(value)
            for name, parameter in model.named_parameters()
            for quantity, value in sorted(optimizer.state.get(parameter, {}).items())
        },
        "statistics": {
            f"{name}/{key}": value
            for name, layer in moe_layers(model)
            for key, value in layer.statistics.window.items()
        },
    }
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {
        "origin": origin,
        "epoch": epoch,
        "seconds": standing.seconds,
        "window": standing.window.sums,
        "valid": standing.valid,
        "best": standing.best,
        "best_step": standing.best_step,
        "warned": {name: sorted(found) for name, layer in moe_layers(model) if (found := layer.statistics.warned)},
        **standing.lengths,
        "optimizer": [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [names[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
    }
    return Checkpoint(standing.step, tensors, state)


def model_tensors(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """Return parameters and buffers, whole and by name, on the rank that keeps them.

    With a sharded model all ranks must call this together: tensors are made whole one at a time.
    """
    tensors = ((name, whole(value)) for name, value in model.state_dict().items())
    return {name: value.cpu() for name, value in tensors if keep}


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> Standing:
    """Restore a checkpoint's tensors, whose names and shapes must match the model exactly."""
    source = f"the checkpoint of step {checkpoint.step}"
    restore_model(model, checkpoint.tensors["model"], source, checkpoint.shards)
    _restore_optimizer(model, optimizer, checkpoint.tensors["optimizer"], checkpoint.shards)
    state = checkpoint.state
    for name, layer in moe_layers(model):
        prefix, device = f"{name}/", next(layer.parameters()).device
        counts = checkpoint.tensors["statistics"].items()
        window = {key.removeprefix(prefix): value.to(device) for key, value in counts if key.startswith(prefix)}
        layer.statistics.restore(window, state["warned"].get(name, ()))
    # Runs started before ``loads.jsonl`` existed have no length for it.
    lengths = {name: int(state[name]) for name in ("metrics_length", "loads_length") if name in state}
    window, best = Window(state["window"]), (state.get("best"), state.get("best_step", 0))
    return Standing(checkpoint.step, state["seconds"], window, state["valid"], lengths, *best)


def restore_model(model: nn.Module, tensors: Mapping[str, Tensor], source: str, shards: Path | None = None) -> None:
    tensors = dict(tensors)
    for name, layer in moe_layers(model):
        layer.fit_state(tensors, f"{name}." if name else "")
    own = model.state_dict()
    try:
        require_state("its", tensors, own, dtypes=True)
    except (KeyError, ValueError) as error:
        raise TrainingError(f"{source} is of another model: {error.args[0]}") from error
    for name, target in own.items():
        if not tensors[name].is_meta:
            assign(target, tensors[name])
    if shards is not None:
        read_shards(shards, {f"model/{name}": target for name, target in own.items() if tensors[name].is_meta})


def _restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], shards: Path | None
) -> None:
    parameters = dict(model.named_parameters())
    sharded = {}
    for key, value in tensors.items():
        name, _, quantity = key.rpartition("/")
        parameter = parameters[name]
        if value.shape == parameter.shape and quantity != "step":
            state = torch.zeros_like(parameter, requires_grad=False)
            if value.is_meta:
                sharded[f"optimizer/{key}"] = state
            else:
                assign(state, value)
        else:
            state = value.to(parameter.device)
        optimizer.state[parameter][quantity] = state
    if shards is not None:
        read_shards(shards, sharded)
