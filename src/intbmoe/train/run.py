"""The run directory, which commands use to pass results to each other.

config.yaml          the recipe, resolved
environment.json     versions, device, source and command of every start
metrics.jsonl        one object per line: step, epoch, split, name → value
loads.jsonl          for methods with routing, each expert's assignments between two lines of metrics, by layer
events.…             the metrics for TensorBoard, and throughput
checkpoints/         see resume.py
model.safetensors    the trained model
outcomes.npz         the result on each test example, see outcomes.py
done.json            the results, once finished
lock                 held by the process that is training
"""

import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from intbmoe.checks import some
from intbmoe.files import replace_file, to_json
from intbmoe.recipes import recipe_from_dict, recipe_to_dict
from intbmoe.registry import describe_plugins
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.recipe import Recipe
from intbmoe.train.errors import DamagedFileError, RunConflictError, TrainingError
from intbmoe.train.files import full_disk_is_explained, read_json
from intbmoe.train.outcomes import read_outcomes
from intbmoe.zoo import STAND_IN, find_in_zoo, in_zoo

FREE_TO_CHANGE = (
    "train.workers", "train.threads", "train.checkpoint_every", "train.keep_checkpoints", "train.parallel",
    "train.patience", "seeds",
)  # fmt: skip
"""Settings that may differ when a run resumes: like the number of ranks, they change nothing but rounding."""
TOKENIZERS = ("bpe", "bytes")
"""Values of ``data.tokenizer`` that are not files."""
PACKAGES = ("intbmoe", "torch", "accelerate", "safetensors", "numpy", "timm", "torchvision", "scikit-learn")
"""Packages whose versions may affect a result."""


class RunDirectory:
    """A run on disk, finished or not."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.loads_path = self.path / "loads.jsonl"
        self.model_path = self.path / "model.safetensors"
        self.outcomes_path = self.path / "outcomes.npz"
        self.result_path = self.path / "done.json"
        self.environment_path = self.path / "environment.json"

    @classmethod
    def of(cls, recipe: Recipe, root: str | Path) -> "RunDirectory":
        """Return where a recipe's run belongs: root/<recipe>/<label or method>/<seed>."""
        return cls(Path(root) / recipe.name / (recipe.moe.label or recipe.moe.name) / str(recipe.train.seed))

    @classmethod
    def existing(cls, run: str | PathLike[str]) -> "RunDirectory":
        try:
            run = cls(find_in_zoo(run) if in_zoo(run) else run)
        except KeyError as error:
            raise TrainingError(error.args[0]) from error
        if not run.config_path.is_file():
            below = [
                str(path.parent) for depth in (1, 2, 3) for path in sorted(run.path.glob("*/" * depth + "config.yaml"))
            ]
            found = f"; below it: {some(below, 4)}" if below else ""
            if (run.path / "artifact.json").is_file():
                found = (
                    f"; it is an artifact: serve it (intbmoe serve {run.path}), or open it with "
                    f"intbmoe.export.load_artifact"
                )
            raise TrainingError(f"{run.path} is not a run directory: it has no config.yaml{found}")
        return run

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def recipe(self) -> Recipe:
        try:
            return recipe_from_dict(self._config())
        except (ValueError, TypeError) as error:
            raise DamagedFileError(f"{self.config_path} cannot be read back: {error}") from error

    def recipe_on(self, data: str | PathLike[str] | None) -> Recipe:
        """Return the recipe with its data at ``data``, or where the run found it if that is None."""
        recipe = self.recipe
        if data is None:
            return recipe
        if not hasattr(recipe.data, "path"):
            raise DataError(f"data={os.fspath(data)!r}: the task {recipe.task!r} reads no files: leave data out")
        return replace(recipe, data=replace(recipe.data, path=os.path.abspath(os.path.expanduser(data))))

    @property
    def stand_in(self) -> Path | None:
        """Made-up data that a zoo model comes with if its real data may not be redistributed: see ``intbmoe.zoo``."""
        path = self.path / STAND_IN
        return path if path.is_file() else None

    @property
    def finished(self) -> bool:
        return self.result_path.is_file()

    @property
    def begun(self) -> bool:
        """Whether training ever began here; a start that failed on its data leaves only a config.yaml."""
        written = self.metrics_path.is_file() and self.metrics_path.stat().st_size > 0
        return self.finished or written or any(self.path.glob("checkpoints/step-*"))

    @property
    def result(self) -> dict[str, Any]:
        """The final metrics of ``valid`` and ``test``, with the steps and time they took."""
        if not self.finished:
            raise TrainingError(f"{self.path} is not finished: train it to the end first")
        match result := read_json(self.result_path):
            case {"test": dict(test), "sha256": {"model.safetensors": str()}}:
                if all(isinstance(value, int | float) for value in test.values()):
                    return result
        lacking = "it lacks the metrics (test) or checksums (sha256)"
        raise DamagedFileError(f"{self.result_path} cannot be read back: {lacking}")

    def outcomes(self) -> dict[str, np.ndarray] | None:
        """Return the result on each test example, by name, (N,) in the split's order; None if the run kept none."""
        checksum = self.result["sha256"].get(self.outcomes_path.name)
        return None if checksum is None else read_outcomes(self.outcomes_path, checksum)

    def metrics(self) -> list[dict[str, Any]]:
        """Return all lines of metrics, except a last line that a kill cut short."""
        return _read_lines(self.metrics_path)

    def loads(self) -> list[dict[str, Any]]:
        """Return all lines of loads, like ``metrics``; none for a method without routing, nor in early runs."""
        return _read_lines(self.loads_path)

    def _config(self) -> dict[str, Any]:
        try:
            found = yaml.safe_load(self.config_path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise DamagedFileError(f"{self.config_path} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise DamagedFileError(f"{self.config_path} cannot be read back: it contains no settings")
        return found

    # What training calls.

    def claim(self, recipe: Recipe) -> None:
        """Write ``config.yaml``, or make sure that the existing run has the same recipe."""
        if self.begun:
            if not self.config_path.is_file():
                raise RunConflictError(
                    f"{self.path} has been trained but has no config.yaml: restore it, or remove the folder"
                )
            differing = differing_settings(self.recipe, recipe)
            if set(differing) - set(FREE_TO_CHANGE):
                lines = [
                    f"{self.path} holds a run of another configuration:\n{list_differences(differing)}",
                    "To resume it, repeat its settings. For a new run, add --moe.label LABEL, --name NAME or --root "
                    "FOLDER, or remove the folder.",
                ]
                if None not in differing.get("data.path", (None,)):
                    lines.append(f"If the same data has moved, set data.path in {self.config_path}.")
                if "data.fingerprint" in differing:
                    lines.append("The data itself has changed since that run began (data.fingerprint).")
                raise RunConflictError("\n".join(lines))
            if not differing:
                return
        text = yaml.safe_dump(_from_anywhere(recipe_to_dict(recipe)), sort_keys=False, allow_unicode=True)
        self.write("config.yaml", text.encode())

    def starts(self) -> list[dict[str, Any]]:
        """Return the entries of ``environment.json``, one for each start."""
        found = read_json(self.environment_path) if self.environment_path.is_file() else []
        if isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
            return found
        raise DamagedFileError(f"{self.environment_path} is not a list of starts: remove it, only notes are lost")

    def threads(self) -> int | None:
        """Return the number of threads the run has used so far, or None if it has not begun."""
        last = self.starts()[-1:]
        count = last[0].get("threads") if last else None
        return count if isinstance(count, int) and count > 0 else None

    def add_environment(self, entry: Mapping[str, Any]) -> None:
        self.write(self.environment_path.name, to_json([*self.starts(), entry]))

    def write(self, name: str, content: bytes) -> None:
        with full_disk_is_explained(self.path / name, "free some space and start again; the run resumes where it was"):
            replace_file(self.path / name, content)


@contextmanager
def moved_data_is_explained(path: str | Path) -> Iterator[None]:
    """Say where a run's data was expected, if it is no longer there."""
    try:
        yield
    except DataError as error:
        run = RunDirectory.existing(path)
        if run.stand_in is not None:
            raise DataError(f"{path} comes without its data: give its path with --data\n({error})") from error
        if getattr(run.recipe.data, "path", None) is None:
            raise
        told = f"data.path comes from {run.config_path}: if the data has moved, set it there or give eval --data"
        raise DataError(f"{error}\n({told})") from error


def differing_settings(there: Recipe, now: Recipe, free: Collection[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Return dotted key → (there, now) for every setting in which two recipes differ, except those in ``free``."""
    found = differing_keys(*(_from_anywhere(recipe_to_dict(recipe)) for recipe in (there, now)))
    return {key: values for key, values in found.items() if key not in free}


def list_differences(differing: Mapping[str, tuple[Any, Any]]) -> str:
    return "\n".join(f"  {key}: {old!r} there, {new!r} now" for key, (old, new) in differing.items())


def differing_keys(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return dotted key → (old, new) for everything that differs; None means that it is missing."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new else {prefix: (old, new)}
    differing = {}
    for key in [*old, *(key for key in new if key not in old)]:
        path = f"{prefix}.{key}" if prefix else str(key)
        differing |= differing_keys(old.get(key), new.get(key), path)
    return differing


def _from_anywhere(config: dict[str, Any]) -> dict[str, Any]:
    """Make the paths of data and start absolute, so that they are found from any working directory."""
    config = {part: dict(values) if isinstance(values, dict) else values for part, values in config.items()}
    for part, name in (("data", "path"), ("data", "tokenizer"), ("train", "start")):
        path = (config.get(part) or {}).get(name)
        is_path = isinstance(path, str) and not in_zoo(path) and not (name == "tokenizer" and path in TOKENIZERS)
        if is_path:
            config[part][name] = os.path.abspath(os.path.expanduser(path))
    return config


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    rows = []
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise DamagedFileError(f"{path} line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DamagedFileError(f"{path} line {number} is not an object with names and values")
        rows.append(row)
    return rows


# Only one process trains in a run directory.

_held: set[Path] = set()  # record locks do not stop a second attempt by the same process


@contextmanager
def run_lock(folder: Path, wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Take the run's lock; raise ``RunConflictError``, naming the process that holds it, if it is taken.

    With ``wait``, which gets a message, wait until the holder ends instead. It is a record lock: the operating system
    releases it however its holder dies, and child processes, such as data workers, do not inherit it.
    """
    path = folder.resolve() / "lock"
    if path in _held:
        raise RunConflictError(f"this process is already training in {path.parent}")
    # The file stays: removing it would let two later processes hold locks on two files of one name.
    with open(path, "a+b", buffering=0) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:  # either may mean that the lock is taken
            holder = os.pread(file.fileno(), 32, 0).decode(errors="replace").strip() or "unknown"
            taken = f"process {holder} is training in {path.parent}"
            if wait is None:
                raise RunConflictError(f"{taken}: wait for it, or stop it (kill {holder})") from error
            wait(f"{taken}: waiting for it to end")
            fcntl.lockf(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        _held.add(path)
        try:
            yield
        finally:
            _held.discard(path)


# What a result depends on besides its recipe.


def describe_environment(device: torch.device, world: int, seed: int, step: int) -> dict[str, Any]:
    """One entry of ``environment.json``, without anything that names the machine."""
    packages = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "from_step": step,
        "command": sys.argv,
        "seed": seed,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": packages,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": world,
        "threads": torch.get_num_threads(),
        "git": git_state(Path(__file__).parent),
        **({"plugins": plugins} if (plugins := describe_plugins()) else {}),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the source and whether it has changed since; None if the package is not in a checkout."""
    commit = _git(folder, "rev-parse", "HEAD")
    # An installed package may lie inside another repository (a virtual environment in a checkout).
    if commit is None or _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": bool(changed)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
