"""The run directory: what passes between commands.

config.yaml          the recipe, resolved
environment.json     versions, device, source and command of every start
metrics.jsonl        one object a line: step, epoch, split, name → value
loads.jsonl          of methods whose tokens choose, each expert's assignments between two lines of metrics, by layer
events.…             the same for TensorBoard, and throughput
checkpoints/         see checkpoint.py
model.safetensors    the trained model
done.json            the results, once finished
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from intbmoe.recipes import recipe_from_dict, recipe_to_dict
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.recipe import Recipe
from intbmoe.train.errors import DamagedFileError, RunConflictError, TrainingError
from intbmoe.train.files import full_disk_is_explained, read_json, replace_file, to_json

FREE_TO_CHANGE = ("train.workers", "train.checkpoint_every", "train.keep_checkpoints", "seeds")
"""Settings that may differ when a run goes on: they change nothing that is computed."""


class RunDirectory:
    """A run on the disk, finished or not."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def of(cls, recipe: Recipe, root: str | Path) -> "RunDirectory":
        """Where a recipe's run belongs: root/<recipe>/<label or method>/<seed>."""
        return cls(Path(root) / recipe.name / (recipe.moe.label or recipe.moe.name) / str(recipe.train.seed))

    @classmethod
    def existing(cls, run: "RunDirectory | str | Path") -> "RunDirectory":
        """The run at a path; an error if there is none."""
        run = run if isinstance(run, RunDirectory) else cls(run)
        if not run.config_path.is_file():
            raise TrainingError(f"{run.path} is not a run directory: it has no config.yaml")
        return run

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @property
    def config_path(self) -> Path:
        """The resolved recipe."""
        return self.path / "config.yaml"

    @property
    def metrics_path(self) -> Path:
        """Lines of metrics."""
        return self.path / "metrics.jsonl"

    @property
    def loads_path(self) -> Path:
        """Lines of loads."""
        return self.path / "loads.jsonl"

    @property
    def model_path(self) -> Path:
        """The trained weights."""
        return self.path / "model.safetensors"

    @property
    def recipe(self) -> Recipe:
        """The recipe this run was started with."""
        try:
            return recipe_from_dict(self._config())
        except (ValueError, TypeError) as error:
            raise DamagedFileError(f"{self.config_path} cannot be read back: {error}") from error

    @property
    def finished(self) -> bool:
        """Whether training came to its end."""
        return (self.path / "done.json").is_file()

    @property
    def begun(self) -> bool:
        """Whether anything is left of a training here. A start that failed on its data leaves a config.yaml alone."""
        written = self.metrics_path.is_file() and self.metrics_path.stat().st_size > 0
        return self.finished or written or any(self.path.glob("checkpoints/step-*"))

    @property
    def result(self) -> dict[str, Any]:
        """The final metrics of ``valid`` and ``test``, and what it took to get there."""
        if not self.finished:
            raise TrainingError(f"{self.path} is not finished: train it to its end first")
        path = self.path / "done.json"
        result = read_json(path)
        sound = isinstance(result, dict) and _numbers(result.get("test")) and isinstance(result.get("sha256"), dict)
        if not sound or not isinstance(result["sha256"].get("model.safetensors"), str):
            raise DamagedFileError(f"{path} cannot be read back: it lacks the metrics (test) or checksums (sha256)")
        return result

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics. A last line that a kill cut short is left out."""
        return _read_lines(self.metrics_path)

    def loads(self) -> list[dict[str, Any]]:
        """All lines of loads, like ``metrics``; none of a method that does not choose, and of runs of old."""
        return _read_lines(self.loads_path)

    def _config(self) -> dict[str, Any]:
        try:
            found = yaml.safe_load(self.config_path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise DamagedFileError(f"{self.config_path} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise DamagedFileError(f"{self.config_path} cannot be read back: it holds no settings")
        return found

    # What training does.

    def claim(self, recipe: Recipe) -> None:
        """Write ``config.yaml``, or make sure that the run there is of the same recipe."""
        if self.begun:
            if not self.config_path.is_file():
                raise RunConflictError(
                    f"{self.path} has been trained but has no config.yaml: restore it, or remove the folder"
                )
            differing = differing_settings(self._config(), recipe)
            if set(differing) - set(FREE_TO_CHANGE):
                listed = "\n".join(f"  {key}: {old!r} there, {new!r} now" for key, (old, new) in differing.items())
                moved = f"\nIf the same data has moved, set data.path in {self.config_path}."
                raise RunConflictError(
                    f"{self.path} holds a run of another configuration:\n{listed}\nRepeat its settings to go on with "
                    f"it, give the new one its own name (moe.label) or another root, or remove the folder."
                    f"{moved if 'data.path' in differing else ''}"
                )
            if not differing:
                return
        text = yaml.safe_dump(_from_anywhere(recipe_to_dict(recipe)), sort_keys=False, allow_unicode=True)
        self.write("config.yaml", text.encode())

    def add_environment(self, entry: Mapping[str, Any]) -> None:
        """Add a start to ``environment.json``."""
        path = self.path / "environment.json"
        self.write(path.name, to_json([*(read_json(path) if path.is_file() else []), entry]))

    def write(self, name: str, content: bytes) -> None:
        """Put a whole file into the run."""
        with full_disk_is_explained(self.path / name, "free some space and start again; the run goes on where it was"):
            replace_file(self.path / name, content)


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


def _numbers(values: Any) -> bool:
    return isinstance(values, dict) and all(isinstance(value, int | float) for value in values.values())


def _from_anywhere(config: dict[str, Any]) -> dict[str, Any]:
    """Settings whose data is found from other working directories too."""
    data = config.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("path"), str):
        return config
    return {**config, "data": {**data, "path": os.path.abspath(data["path"])}}


@contextmanager
def moved_data_is_explained(path: str | Path) -> Iterator[None]:
    """Say where a run's data was to be found, if it is not there any more."""
    try:
        yield
    except DataError as error:
        run = RunDirectory(path)
        if getattr(run.recipe.data, "path", None) is None:
            raise
        where = f"data.path is the one in {run.config_path}: set it there if the data has moved"
        raise DataError(f"{error}\n({where})") from error


class MetricsFile:
    """Appends lines to ``metrics.jsonl`` or ``loads.jsonl``, after cutting off what a checkpoint does not know of."""

    def __init__(self, path: Path, length: int) -> None:
        self.path = path
        found = path.stat().st_size if path.is_file() else 0
        if found < length:
            raise DamagedFileError(
                f"{path} has {found} bytes, the checkpoint knows of {length}: restore it from a copy"
            )
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._file.truncate(length)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line and hand it to the operating system: a kill loses nothing."""
        with full_disk_is_explained(self.path, "free some space and start again; the run goes on from its checkpoint"):
            line = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
            while line:
                line = line[self._file.write(line) :]

    def sync(self) -> int:
        """Wait until all lines are on the disk; returns the file's length."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """No more lines."""
        self._file.close()


def find_runs(root: str | Path = "runs") -> list[RunDirectory]:
    """All runs below a folder, by path."""
    return [RunDirectory(path.parent) for path in sorted(Path(root).rglob("config.yaml"))]


def differing_settings(config: dict[str, Any], recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """Dotted key → (there, now) of the settings in which ``recipe`` is another than a run's, free ones included."""
    return differing_keys(_from_anywhere(config), _from_anywhere(recipe_to_dict(recipe)))


def differing_keys(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted key → (old, new) of everything that differs; None stands for what is not there."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new else {prefix: (old, new)}
    differing = {}
    for key in [*old, *(key for key in new if key not in old)]:
        path = f"{prefix}.{key}" if prefix else str(key)
        differing |= differing_keys(old.get(key), new.get(key), path)
    return differing
