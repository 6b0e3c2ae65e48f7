"""``intbmoe analyse RUN``: look inside a trained model, and write data and pictures to RUN/analysis.

data/analysis.json      what was analysed, on what, and which parts were left out and why
data/PART.json, .csv    raw numbers of each of ``PARTS``
pictures/*.png, *.svg   drawn from the JSON files alone; ``redraw`` draws them again
pictures/*.json         captions: title, what to see, how it was computed
report.html             one page with everything (``page.py``)
"""

import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from intbmoe.analysis.bases import collect_coefficients, measure_participation
from intbmoe.analysis.loads import choosing_layers, evaluated_load, load_history, training_curves, unit_of
from intbmoe.analysis.page import run_page
from intbmoe.analysis.routing import Chosen, choose, example_routing, routing_shares
from intbmoe.analysis.run_cost import measure_run_cost
from intbmoe.analysis.sample import Sample
from intbmoe.files import replacing_folder, to_json
from intbmoe.layer import moe_layers
from intbmoe.methods.intbmoe import IntBMoE
from intbmoe.registry import find_method
from intbmoe.report import require_matplotlib
from intbmoe.report.page import write_page
from intbmoe.report.tables import Table
from intbmoe.report.trace import trace_run
from intbmoe.tasks import Task, make_task
from intbmoe.tasks.recipe import Recipe
from intbmoe.train.distribution import Ranks
from intbmoe.train.errors import DamagedFileError, TrainingError
from intbmoe.train.evaluation import BATCH, load
from intbmoe.train.files import full_disk_is_explained, read_json
from intbmoe.train.run import RunDirectory
from intbmoe.zoo import in_zoo

FOLDER = "analysis"
PARTS = ("training", "load_training", "load", "routing", "examples", "coefficients", "participation", "cost")
OF_CHOICES = ("load_training", "load", "routing", "examples")  # only for methods whose tokens choose
OF_BASES = {
    "coefficients": "only IntBMoE composes blocks from expert bases",
    "participation": "only IntBMoE composes blocks from expert bases",
    "cost": "only IntBMoE can be precomposed; intbmoe compare counts what every method costs",
}
Tell = Callable[[str], None]


@dataclass(frozen=True)
class AnalyseOptions:
    split: str = "valid"
    examples: int = 1000  # at most this many, evenly spread over the split
    classes: tuple[str, ...] = ()
    """Classes for the routing shares, by name or number; all if empty. Only examples of these classes are counted."""
    layers: tuple[str, ...] = ()  # layers for the routing shares, by name or number; all if empty
    draw: bool = True
    """If False, only data is written, which needs no matplotlib; ``redraw`` can draw it later, also elsewhere."""


class LeftOut(Exception):  # noqa: N818 — not an error: a part that does not apply
    """A part of the analysis does not apply; the message says why."""


def analyse(
    run: RunDirectory | str | Path, options: AnalyseOptions | None = None, tell: Tell = lambda line: None
) -> Path:
    """Analyse a finished run; return the folder. An earlier analysis is replaced as a whole."""
    options = options or AnalyseOptions()
    if options.draw:
        require_matplotlib()
    if in_zoo(run):
        raise TrainingError(
            f"{run} is part of the installed package, so nothing can be written into it: train it (its card has the "
            f"command) and analyse that"
        )
    run = RunDirectory.existing(run)
    recipe, task, model = _open(run)
    ranks = Ranks(recipe.train.precision)
    model = model.to(ranks.device)
    size = min(recipe.train.device_batch or recipe.train.batch, BATCH)
    sample = Sample(task, options.split, options.examples, ranks, size)
    chosen = choose(model, sample, options.classes, options.layers)  # first, to report a wrong name at once
    found, left_out = {}, {}
    for name in PARTS:
        tell(name)
        try:
            found[name] = _compute(name, run, recipe, model, sample, chosen, tell)
        except LeftOut as reason:
            left_out[name] = str(reason)
    summary = {**_describe(run, recipe, sample), "parts": list(found), "left_out": left_out}
    folder = run.path / FOLDER
    with full_disk_is_explained(folder, "free some space and analyse again"), replacing_folder(folder) as beside:
        data = beside / "data"
        data.mkdir()
        (data / "analysis.json").write_bytes(to_json(summary))
        for name, part in found.items():
            (data / f"{name}.json").write_bytes(to_json(asdict(part)))
            (data / f"{name}.csv").write_text(Table.of_records(name, part.rows()).csv(), encoding="utf-8", newline="")
        if options.draw:
            _draw(data, beside / "pictures")
            write_page(beside, run_page(beside))
    return folder


def redraw(folder: str | Path) -> list[Path]:
    """Draw the pictures of an analysis again, from its data alone; return their paths."""
    require_matplotlib()
    folder = Path(folder)
    if not (folder / "data" / "analysis.json").is_file():
        raise TrainingError(f"{folder} holds no analysis: it has no data/analysis.json; intbmoe analyse RUN makes one")
    summary = read_summary(folder)
    of_accuracy = "participation" in summary["parts"] and "sure" not in read_json(folder / "data/participation.json")
    if "run" not in summary or "recipes" in (*summary["parts"], *summary["left_out"]) or of_accuracy:
        again = shlex.join(["intbmoe", "analyse", str(folder.parent)])
        raise TrainingError(f"{folder} is from an earlier version of intbmoe: run {again}")
    with full_disk_is_explained(folder, "free some space and draw again"):
        with replacing_folder(folder / "pictures") as beside:
            _draw(folder / "data", beside)
        write_page(folder, run_page(folder))
    return sorted((folder / "pictures").iterdir())


def _open(run: RunDirectory) -> tuple[Recipe, Task, nn.Module]:
    """Load a run's recipe, task and model; raise a one-sentence error if its files are damaged."""
    recipe = run.recipe
    try:
        return recipe, make_task(recipe), load(run)
    except ValueError as error:
        raise DamagedFileError(f"{run.path} cannot be read back: {error}") from error


def _describe(run: RunDirectory, recipe: Recipe, sample: Sample) -> dict[str, Any]:
    result = run.result
    return {
        "recipe": recipe.name,
        "task": recipe.task,
        "method": recipe.moe.name,
        "title": find_method(recipe.moe.name).title,
        "label": recipe.moe.label or recipe.moe.name,
        "seed": recipe.train.seed,
        "metric": sample.task.metric,
        "higher_is_better": sample.task.higher_is_better,
        "test": result["test"],
        "model_sha256": result["sha256"]["model.safetensors"],
        "run": trace_run(run),
        "split": sample.split,
        "examples": sample.examples,
        "examples_of_split": sample.total,
    }


def _compute(
    name: str, run: RunDirectory, recipe: Recipe, model: nn.Module, sample: Sample, chosen: Chosen, tell: Tell
) -> Any:
    """Compute one part, as a dataclass that can be written as JSON and, with its ``rows``, as CSV."""
    layers, task = [layer for _, layer in moe_layers(model)], sample.task
    if name in OF_CHOICES and not choosing_layers(model):
        none = "its tokens do not choose experts" if layers else "the model has no MoE layer"
        raise LeftOut(f"{none}, so there is nothing to count")
    bases = [layer.config.experts for layer in layers if isinstance(layer, IntBMoE)]
    if name in OF_BASES and not bases:
        raise LeftOut(OF_BASES[name])
    if name == "training":
        if lines := run.metrics():
            return training_curves(lines, task.metric, task.higher_is_better)
        raise LeftOut("metrics.jsonl is missing or empty")
    if name == "load_training":
        if lines := run.loads():
            return load_history(lines, unit_of(model))
        raise LeftOut("loads.jsonl is missing or empty: older versions kept only means over the layers")
    if name == "load":
        return evaluated_load(model, sample)
    if name == "routing":
        if chosen.views:
            return routing_shares(model, chosen)
        raise LeftOut(f"the task {task.name!r} defines no views, which group its tokens")
    if name == "examples":
        if shown := task.shown(sample.source):
            return example_routing(model, sample, shown)
        raise LeftOut(f"the task {task.name!r} does not say how to show an example")
    if name == "coefficients":
        return collect_coefficients(model)
    if name == "participation":
        if min(bases) == 1:
            raise LeftOut("a layer has a single expert base, and removing it would leave nothing")
        if not task.has_outcomes():
            raise LeftOut(f"the task {task.name!r} defines no evaluate_examples, which gives the loss of each example")
        return measure_participation(model, sample, tell)
    found = measure_run_cost(recipe, sample.ranks.device)
    if not found.sweep:
        raise LeftOut("even with a single base the model has too many parameters to be built here")
    return found


def _draw(data: Path, pictures: Path) -> None:
    from intbmoe.analysis.drawing import DRAWERS  # an optional dependency
    from intbmoe.report.canvas import save_pictures

    for part in read_summary(data.parent)["parts"]:
        save_pictures(DRAWERS[part](read_json(data / f"{part}.json")), pictures)


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of an analysis: run, method, metric, split, parts, left_out."""
    return read_json(folder / "data" / "analysis.json")
