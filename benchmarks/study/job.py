"""Runs one run of the study, from a job file to a small summary and the outcomes of the test examples.

    python benchmarks/study/job.py JOB.json

The study starts one process per run. It trains like ``intbmoe train``, counts the trained model's parameters and FLOPs,
measures the peak of GPU memory, and writes the summary at the end.
"""

import importlib.util
import io
import json
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

import torch

from intbmoe.compare.page import thin
from intbmoe.compare.plan import Job
from intbmoe.compare.summary import summarise
from intbmoe.files import replace_file, to_json
from intbmoe.recipes import recipe_from_dict
from intbmoe.recipes.compute import training_flops
from intbmoe.recipes.sets import Variant
from intbmoe.tasks import make_task
from intbmoe.tasks.recipe import Recipe
from intbmoe.train import RunDirectory, load, train
from intbmoe.train.evaluation import halve
from intbmoe.train.files import read_json
from intbmoe.train.signals import belongs_to_another

CURVE_POINTS = 100
LOADS = ("utilisation", "worst_case", "entropy", "dropped")
LAST_ROWS = 10  # lines of metrics that the load statistics are averaged over
KEPT = (".yaml", ".json", ".jsonl", ".npz")
PART_BYTES = 15 * 2**20
FORMAT = 2
"""From 2 on, FLOPs include attention's score and value products."""


def main() -> None:
    belongs_to_another()  # so that training stops if the study is killed
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    without_tensorboard()
    recipe = recipe_from_dict(job["entry"]["recipe"])
    run = train(recipe, root=job["root"])
    summary = summarise_run(recipe, run, job)
    Path(job["summary"]).parent.mkdir(parents=True, exist_ok=True)
    kept = run.outcomes_path
    if summary["test"] is not None and kept.is_file():  # the test split of a tuning run is not used
        replace_file(Path(job["summary"]).with_suffix(kept.suffix), kept.read_bytes())
    replace_file(Path(job["summary"]), to_json(summary))
    if job["weights"]:
        write_run(run, Path(job["weights"]))


def without_tensorboard() -> None:
    """Writes nothing for TensorBoard if it is not installed: the summary has what matters."""
    if importlib.util.find_spec("tensorboard") is not None:
        return

    class SummaryWriter:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def add_scalar(self, *_: Any) -> None: ...

        def flush(self) -> None: ...

        def close(self) -> None: ...

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    sys.modules[module.__name__] = module


def summarise_run(recipe: Recipe, run: RunDirectory, job: dict[str, Any]) -> dict[str, Any]:
    entry, result = job["entry"], run.result
    on_gpu = torch.cuda.is_available()
    memory = torch.cuda.max_memory_allocated() if on_gpu else None
    row, *composed = summarise([Job(Variant(entry["title"], recipe.moe), recipe, run)])
    environment = read_json(run.path / "environment.json")
    # The entry has the command that repeats the run; this process's command and data path name a machine's folders.
    last = {key: value for key, value in environment[-1].items() if key != "command"}
    recipe_without_path = {**entry["recipe"], "data": {**entry["recipe"]["data"], "path": None}}
    rows = run.metrics()
    tuning = entry["stage"] == "tune"  # only the validation split may be used
    return {
        "format": FORMAT,
        **{name: entry[name] for name in ("study", "stage", "title", "label", "seed", "digest", "shared_digest")},
        "method": recipe.moe.name,
        "command": entry["command"],
        "metric": result["metric"],
        "higher_is_better": result["higher_is_better"],
        "valid": result["valid"],
        "test": None if tuning else result["test"],
        **row.counts._asdict(),
        "flops_training": _training_flops(recipe, run, row.active),
        "flops_precomposed": composed[0].counts.flops if composed else None,
        "active_experts": row.active,
        "steps": result["steps"],
        "epochs": result["epochs"],
        "examples": result["examples"],
        "seconds": result["seconds"],
        "steps_per_second": result["steps"] / result["seconds"],
        "side_by_side": job["side_by_side"],
        "peak_gpu_bytes": memory,
        "load": _load(rows),
        "curve": _curve(rows, "train"),
        "curve_valid": _curve(rows, "valid", result["metric"]),
        # The same for every method.
        "floors": make_task(recipe).floors() if recipe.moe.name == "dense" else None,
        "ceilings": make_task(recipe).ceilings() if recipe.moe.name == "dense" else None,
        "starts": len(environment),
        "environment": {**last, "git": job["commit"] or last["git"]},
        "recipe": recipe_without_path,
    }


def _training_flops(recipe: Recipe, run: RunDirectory, active: float | None) -> float:
    task = make_task(recipe)
    torch.manual_seed(0)
    model = (task.make_model() if active else load(run).cpu()).eval()
    batch = recipe.train.device_batch or recipe.train.batch
    return training_flops(model, task.example_inputs(), batch, active or None, attention=True)


def _load(rows: list[dict[str, Any]]) -> dict[str, float]:
    last = [row for row in rows if row["split"] == "train"][-LAST_ROWS:]
    found = {name: [row[name] for row in last if name in row] for name in LOADS}
    return {name: sum(values) / len(values) for name, values in found.items() if values}


def _curve(rows: list[dict[str, Any]], split: str, name: str = "loss") -> list[list[float]]:
    return thin([[row["step"], row[name]] for row in rows if row["split"] == split and name in row], CURVE_POINTS)


def write_run(run: RunDirectory, stem: Path) -> None:
    """Packs the finished run, with weights in half precision, into a tar split into parts of limited size.

    ``cat STEM.part* | tar x`` restores the run directory.
    """
    files = {path.name: path.read_bytes() for path in run.path.iterdir() if path.suffix in KEPT} | halve(run)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo("/".join([*run.path.parts[-3:], name]))
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    content = packed.getvalue()
    stem.parent.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(content), PART_BYTES)):
        stem.with_name(f"{stem.name}.part{number}").write_bytes(content[start : start + PART_BYTES])


if __name__ == "__main__":
    main()
