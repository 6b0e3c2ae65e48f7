"""``intbmoe analyse RUN``: look inside a trained model, and leave data and pictures in RUN/analysis.

data/analysis.json      what was analysed, on what, and which parts were left out, with the reason
data/PART.json, .csv    raw numbers of training, load_training, load, routing, examples, coefficients, participation,
                        cost
pictures/*.png, *.svg   drawn from the JSON files alone; ``redraw`` does it again
pictures/*.json         captions: title, what to see, how it was computed
report.html             one page with all of it (``page.py``)

Methods get the parts that apply: participation, coefficients and cost need expert bases, loads and routing need tokens
that choose.
"""

import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from intbmoe.analysis.coefficients import collect_coefficients
from intbmoe.analysis.examples import example_routing
from intbmoe.analysis.load_history import load_history
from intbmoe.analysis.loads import choosing_layers, evaluated_load, training_curves, unit_of
from intbmoe.analysis.page import run_page
from intbmoe.analysis.participation import measure_participation
from intbmoe.analysis.routing_share import routing_shares
from intbmoe.analysis.run_cost import measure_run_cost
from intbmoe.analysis.sample import Sample
from intbmoe.files import replacing_folder, to_json
from intbmoe.layer import moe_layers
from intbmoe.methods.intbmoe import IntBMoE
from intbmoe.registry import find_method
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

FOLDER = "analysis"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class AnalyseOptions:
    split: str = "valid"
    examples: int = 1000  # at most so many, evenly spread over the split
    draw: bool = True
    """Without it the numbers alone are left, which needs no matplotlib; ``redraw`` draws them, elsewhere too."""


class LeftOut(Exception):  # noqa: N818 — not an error: a part that does not apply
    """A part of the analysis does not apply; the message says why."""


def analyse(
    run: RunDirectory | str | Path, options: AnalyseOptions | None = None, tell: Tell = lambda line: None
) -> Path:
    """Analyse a finished run; returns the folder, in which an earlier analysis is replaced as a whole."""
    options = options or AnalyseOptions()
    if options.draw:
        require_matplotlib()
    run = RunDirectory.existing(run)
    recipe, task, model = _open(run)
    ranks = Ranks(recipe.train.precision)
    model = model.to(ranks.device)
    size = min(recipe.train.device_batch or recipe.train.batch, BATCH)
    sample = Sample(task, options.split, options.examples, ranks, size)
    parts: dict[str, Callable[[], Any]] = {
        "training": lambda: _training(run, task),
        "load_training": lambda: _load_training(run, model),
        "load": lambda: _load(model, sample),
        "routing": lambda: _routing(model, sample),
        "examples": lambda: _examples(model, sample),
        "coefficients": lambda: _coefficients(model),
        "participation": lambda: _participation(model, sample, tell),
        "cost": lambda: _cost(model, recipe, ranks),
    }
    found, left_out = {}, {}
    for name, compute in parts.items():
        tell(name)
        try:
            found[name] = compute()
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
    """Draw the pictures of an analysis again, from its data alone; returns their paths."""
    require_matplotlib()
    folder = Path(folder)
    if not (folder / "data" / "analysis.json").is_file():
        raise TrainingError(f"{folder} holds no analysis: it has no data/analysis.json; intbmoe analyse RUN makes one")
    summary = read_summary(folder)
    if "run" not in summary or "recipes" in (*summary["parts"], *summary["left_out"]):
        again = shlex.join(["intbmoe", "analyse", str(folder.parent)])
        raise TrainingError(f"{folder} is of an earlier version of intbmoe: {again} makes it anew")
    with full_disk_is_explained(folder, "free some space and draw again"):
        with replacing_folder(folder / "pictures") as beside:
            _draw(folder / "data", beside)
        write_page(folder, run_page(folder))
    return sorted((folder / "pictures").iterdir())


def require_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError("analyses are drawn with matplotlib: pip install 'intbmoe[plots]'")


def _open(run: RunDirectory) -> tuple[Recipe, Task, nn.Module]:
    """What a run was and what came of it; anything wrong with its files is said in one sentence."""
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


def _training(run: RunDirectory, task: Task) -> Any:
    lines = run.metrics()
    if not lines:
        raise LeftOut("metrics.jsonl is missing or empty")
    return training_curves(lines, task.metric, task.higher_is_better)


def _require_choices(model: nn.Module) -> None:
    if not choosing_layers(model):
        none = "the model has no MoE layer" if not list(moe_layers(model)) else "its tokens do not choose experts"
        raise LeftOut(f"{none}, so there is nothing to count")


def _require_bases(model: nn.Module) -> None:
    if not any(isinstance(layer, IntBMoE) for _, layer in moe_layers(model)):
        raise LeftOut("only IntBMoE composes blocks from expert bases")


def _load_training(run: RunDirectory, model: nn.Module) -> Any:
    _require_choices(model)
    lines = run.loads()
    if not lines:
        raise LeftOut("loads.jsonl is missing or empty: runs trained by older versions kept means over the layers only")
    return load_history(lines, unit_of(model))


def _load(model: nn.Module, sample: Sample) -> Any:
    _require_choices(model)
    return evaluated_load(model, sample)


def _routing(model: nn.Module, sample: Sample) -> Any:
    _require_choices(model)
    views = sample.task.views()
    if not views:
        raise LeftOut(f"the task {sample.task.name!r} defines no views, which tell its tokens apart")
    return routing_shares(model, sample, views)


def _examples(model: nn.Module, sample: Sample) -> Any:
    _require_choices(model)
    shown = sample.task.shown(sample.source)
    if shown is None:
        raise LeftOut(f"the task {sample.task.name!r} does not say how to show an example")
    return example_routing(model, sample, shown)


def _coefficients(model: nn.Module) -> Any:
    _require_bases(model)
    return collect_coefficients(model)


def _participation(model: nn.Module, sample: Sample, tell: Tell) -> Any:
    _require_bases(model)
    if any(isinstance(layer, IntBMoE) and layer.config.experts == 1 for _, layer in moe_layers(model)):
        raise LeftOut("a layer has a single expert base, without which nothing is left")
    return measure_participation(model, sample, tell)


def _cost(model: nn.Module, recipe: Recipe, ranks: Ranks) -> Any:
    if not any(isinstance(layer, IntBMoE) for _, layer in moe_layers(model)):
        raise LeftOut("only IntBMoE can be composed beforehand; intbmoe compare counts what every method costs")
    found = measure_run_cost(recipe, ranks.device)
    if not found.sweep:
        raise LeftOut("the model has too many parameters to be built anew here, with a single base even")
    return found


def _draw(data: Path, pictures: Path) -> None:
    from intbmoe.analysis.drawing import DRAWERS  # an optional dependency
    from intbmoe.report.canvas import save_pictures

    for part in read_summary(data.parent)["parts"]:
        save_pictures(DRAWERS[part](read_json(data / f"{part}.json")), pictures)


def read_summary(folder: Path) -> dict[str, Any]:
    """What an analysis says of itself: run, method, metric, split, parts, left_out."""
    return read_json(folder / "data" / "analysis.json")
