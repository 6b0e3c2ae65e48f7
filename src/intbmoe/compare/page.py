"""The page of a comparison: runs/<recipe>/compare/<methods>/report.html, with its data and pictures beside it.

``collect`` gathers the data of the finished runs; pictures and page are made from that data alone.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from intbmoe.compare.answer import answer_comparison
from intbmoe.compare.plan import Job, Plan
from intbmoe.compare.summary import trained_rows
from intbmoe.compare.table import (
    SHARES,
    WITH_ATTENTION,
    anchor,
    by_students_t,
    difference_notes,
    file_stem,
    floors_table,
    number_cell,
    other_metric_cell,
    protocol_notes,
    results_table,
    tuning_notes,
)
from intbmoe.compare.tuning import tuning_table
from intbmoe.files import replace_file, to_json
from intbmoe.recipes.sets import SETS
from intbmoe.report.numbers import NOTHING, format_difference, format_metric
from intbmoe.report.page import Figure, Notice, Page, Section, read_figure, write_page
from intbmoe.report.tables import Cell, Column, Table
from intbmoe.report.trace import trace_run
from intbmoe.tasks import find_task
from intbmoe.tasks.recipe import Recipe
from intbmoe.train.files import read_json
from intbmoe.train.metrics import LOAD_RATIOS

GRIDS = ("K", "k", "E", "L")
ABLATIONS = "ablations"
MOST_POINTS = 400  # per curve; a picture has no more pixels, and metrics.jsonl has all of them
DIGEST = 12  # digits shown of a SHA-256; the data has all of them
Data = Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    plan: Plan
    sound: Sequence[Job]
    rows: Sequence[Mapping[str, Any]]  # from ``make_rows``
    floors: Mapping[str, Mapping[str, float]]
    left_out: Sequence[Mapping[str, str]]
    methods: str  # as given to ``--methods``
    command: str
    ceilings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tuning: Mapping[str, Any] | None = None  # from ``tuning.choose``

    @property
    def stem(self) -> str:
        """The name of its files: with --tune another one, so that both comparisons can be read side by side."""
        return file_stem(self.methods) + ("-tuned" if self.tuning else "")


def collect(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Return what is written: file name → content."""
    plan = comparison.plan
    task = find_task(plan.recipe.task)
    refused = [{"title": title, "path": "", "reason": reason} for title, reason in plan.refused.items()]
    described = {
        "recipe": plan.recipe.name,
        "task": plan.recipe.task,
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "methods": comparison.methods,
        "command": comparison.command,
        "rows": [{key: row[key] for key in row if key != "results"} for row in comparison.rows],
        "sets": _sets(plan.recipe, comparison.methods),
        "floors": {name: dict(values) for name, values in comparison.floors.items()},
        "ceilings": {name: dict(values) for name, values in comparison.ceilings.items()},
        "tuning": comparison.tuning,
        "runs": [_traced(job, plan) for job in comparison.sound],
        "left_out": [*comparison.left_out, *refused],
    }
    return {"comparison": described, "curves": {"curves": _curves(comparison.sound)}}


def _traced(job: Job, plan: Plan) -> dict[str, Any]:
    link = os.path.relpath(job.run.path, plan.folder / "a page's folder").replace(os.sep, "/")
    about = {"title": job.variant.title, "label": job.variant.label}
    return {**about, "path": str(job.run.path), "link": f"{link}/", **trace_run(job.run)}


def _sets(recipe: Recipe, methods: str) -> dict[str, list[dict[str, Any]]]:
    """Return the sensitivity grids and ablations that were asked for by name: in order, value or title and label."""
    asked = [name.strip() for name in methods.split(",")]
    found = {}
    for name in (*GRIDS, ABLATIONS):
        if name in asked:
            variants = SETS[name].make(recipe)
            found[name] = [{"title": v.title, "value": v.title.rpartition("= ")[2], "label": v.label} for v in variants]
    return found


def _curves(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    found = []
    for job in jobs:
        metric = find_task(job.recipe.task).metric
        wanted = {("train", "loss"), ("valid", "loss"), ("valid", metric), *(("train", name) for name in LOAD_RATIOS)}
        points: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for line in job.run.metrics():
            for name, value in line.items():
                if (line["split"], name) in wanted:
                    points.setdefault((line["split"], name), []).append((line["step"], value))
        for (split, name), curve in points.items():
            steps, values = zip(*thin(curve, MOST_POINTS), strict=True)
            about = {"title": job.variant.title, "label": job.variant.label, "seed": job.seed}
            found.append({**about, "split": split, "name": name, "steps": list(steps), "values": list(values)})
    return found


def thin(points: Sequence[Any], most: int) -> list[Any]:
    """Return at most ``most`` of the points, evenly spread, including the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(place * (len(points) - 1) / (most - 1))] for place in range(most)]


def write_comparison_page(comparison: Comparison) -> Path:
    """Save the comparison's data, draw its pictures and write its page; return the page's path."""
    folder = comparison.plan.folder / comparison.stem  # one per --methods, as its tables have their names
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    for name, content in collect(comparison).items():
        replace_file(data / f"{name}.json", to_json(content))
    return redraw_comparison(folder)


def redraw_comparison(folder: str | Path) -> Path:
    """Draw the pictures and write the page again, from the saved data alone."""
    folder = Path(folder)
    data = read_json(folder / "data" / "comparison.json")
    pictures = folder / "pictures"
    pictures.mkdir(exist_ok=True)
    for old in pictures.iterdir():  # from an earlier comparison, which may have had other parts
        old.unlink()
    if find_spec("matplotlib") is not None:
        from intbmoe.compare.pictures import draw_comparison  # an optional dependency
        from intbmoe.report.canvas import save_pictures

        save_pictures(draw_comparison(data, read_json(folder / "data" / "curves.json")["curves"]), pictures)
    return write_page(folder, comparison_page(data, pictures))


def comparison_page(data: Data, pictures: Path) -> Page:
    """Return the page, without parts that have no runs or pictures."""
    figures = {path.stem: read_figure(path, "data/") for path in sorted(pictures.glob("*.json"))}
    answer = answer_comparison(data)
    sections = [
        _results(data, answer.leaders),
        _tuning(data),
        *(_part(name, figures) for name in LEADS),
        _ablations(data),
    ]
    sections += [*(_bounds(data, name) for name in BOUNDS), _left_out(data, figures), _runs(data)]
    overline = f"intbmoe compare · {data['recipe']} · --methods {data['methods']}"
    return Page(overline, answer, [section for section in sections if section is not None])


# The parts.

LEADS = {
    "cost": ("cost", "Quality and cost", "What does each method's quality cost in parameters, FLOPs and time?"),
    "curves": ("training", "Training", "How did the runs go?"),
    "load": ("load", "Load", "How evenly did each method use its experts or blocks?"),
    "sensitivity": ("sensitivity", "Sensitivity", "How much do K, k, E and L matter?"),
}


def _part(name: str, figures: Mapping[str, Figure]) -> Section | None:
    return Section(*LEADS[name], [figures[name]]) if name in figures else None


def _results(data: Data, leaders: Sequence[str]) -> Section:
    sign = -1 if data["higher_is_better"] else 1
    rows = sorted(data["rows"], key=lambda row: (row["mean"] is None, sign * (row["mean"] or 0)))
    table = results_table(
        rows,
        f"{data['metric']} on the test split, and what it takes",
        "descending" if data["higher_is_better"] else "ascending",
        notes=_result_notes(data, leaders),
        marked=frozenset(index for index, row in enumerate(rows) if row["title"] in leaders),
        starred=frozenset(index for index, row in enumerate(rows) if row["method"] == "intbmoe"),
    )
    return Section("results", "Results", "Click a heading to sort by it. A method's name links to its runs.", [table])


def _result_notes(data: Data, leaders: Sequence[str]) -> list[str]:
    several = any(row["interval_95"] is not None for row in data["rows"])
    better = "right" if data["higher_is_better"] else "left"
    notes = [
        f"±: half the 95 % interval of the mean, {by_students_t(data['rows'])}. Below it, the dot is the mean, the bar "
        f"the interval, and thin marks are single seeds; all rows share one axis, and better is further {better}."
        if several
        else "One seed each, so there is no interval, and differences may be chance (--seeds 3 gives intervals). "
        f"The dots share one axis; better is further {better}.",
        f"{'; '.join(f'{name.capitalize()}: {hint}' for name, hint in SHARES.items())}. Per layer, mean over the "
        "layers, without shared experts.",
        *difference_notes(data["rows"]),
        f"FLOPs: one example by itself, {WITH_ATTENTION}. Seconds: training, mean over "
        "runs, several of which may have shared the machine.",
    ]
    if any(row["method"] == "intbmoe" for row in data["rows"]):
        notes.insert(0, "★: IntBMoE and its variants.")
    notes += [*protocol_notes(data["rows"]), *tuning_notes(data["rows"])]
    if leaders:
        notes.insert(0, "Tinted rows: the best mean, and what cannot be distinguished from it.")
    if any(row["active_experts"] is not None for row in data["rows"]):
        notes.append("~: at the average number of experts of a test token, which a trained router decides.")
    if any(row["mean"] is None for row in data["rows"]):
        notes.append("A precomposed form is the same model with its blocks built once: same outputs, no new training.")
    return notes


def _tuning(data: Data) -> Section | None:
    lead = "With which settings is each method best? Every combination was trained with one seed."
    found = data.get("tuning")
    return Section("tuning", "Tuning", lead, [tuning_table(found)]) if found else None


def _ablations(data: Data) -> Section | None:
    """Return the paper's tables: every metric of the full model and of each ablation, and their differences."""
    rows = {row["label"]: row for row in trained_rows(data["rows"])}
    variants = [one for one in data["sets"].get(ABLATIONS, []) if one["label"] in rows]
    if len(variants) < 2:
        return None
    metrics = [data["metric"], *(name for name in rows[variants[0]["label"]]["metrics"] if name != data["metric"])]
    full = rows.get("intbmoe")
    cells, differences = [], []
    for one in variants:
        row = rows[one["label"]]
        title = one["title"].rpartition(", ")[2] if row is not full else "full"
        name = Cell(title, title, href=f"#run-{anchor(row['label'])}")
        found = (other_metric_cell(row, metric) for metric in metrics)
        cells.append([name, *found, number_cell(row["params"] / 1e6, 3)])
        if full is not None and row is not full:
            differences.append([name, *(_difference(row, full, metric) for metric in metrics)])
    columns = [Column("Variant", numeric=False), *(Column(name) for name in metrics)]
    tables = [Table("IntBMoE and its ablations, on the test split", [*columns, Column("Params (M)")], cells)]
    if differences:
        better = f"{'Below' if data['higher_is_better'] else 'Above'} zero: the part that was left out helps"
        note = f"Mean of the ablation minus mean of the full model. {better}, as far as the intervals above allow."
        tables.append(Table("Difference from the full model", columns, differences, notes=[note]))
    return Section("ablations", "Ablations", "What does each part of IntBMoE do? One is left out at a time.", tables)


def _difference(row: Data, full: Data, metric: str) -> Cell:
    if metric not in row["metrics"] or metric not in full["metrics"]:
        return Cell(NOTHING)
    gap = row["metrics"][metric]["mean"] - full["metrics"][metric]["mean"]
    return Cell(format_difference(metric, gap, "points", sign="+"), gap)


BOUNDS = {
    "floors": ("Floor", "Predictions that need no learning. A method that does not beat these has learned nothing."),
    "ceilings": (
        "Ceiling",
        "The data was generated by a known rule: no model can be expected to beat one that knows the rule.",
    ),
}


def _bounds(data: Data, name: str) -> Section | None:
    kind, lead = BOUNDS[name]
    table = floors_table(data[name], f"{kind}s, on the test split", kind)
    return Section(name, f"{kind}s", lead, [table]) if data[name] else None


def _left_out(data: Data, figures: Mapping[str, Figure]) -> Section | None:
    items = [
        (f"{one['title']}{' (' + one['path'] + ')' if one['path'] else ''}:", one["reason"]) for one in data["left_out"]
    ]
    if not figures and find_spec("matplotlib") is None:
        items.append(("Pictures:", "matplotlib is not installed: pip install 'intbmoe[plots]'"))
    lead = "Runs that are unfinished or damaged, and variants that the task does not accept. No number includes them."
    return Section("left-out", "Left out", lead, [Notice(items)]) if items else None


def _runs(data: Data) -> Section:
    metric = data["metric"]
    columns = [
        Column("Run", numeric=False),
        Column("Seed"),
        Column(metric),
        Column("Seconds"),
        Column("Settings", numeric=False, hint="SHA-256 of config.yaml, first digits"),
        Column("Model", numeric=False, hint="SHA-256 of model.safetensors, first digits"),
        Column("On", numeric=False),
        Column("Command", numeric=False),
    ]
    cells, anchors, seen = [], [], set()
    for run in data["runs"]:
        where = " · ".join(str(run[key]) for key in ("device", "torch") if run[key])
        cells.append(
            [
                Cell(run["title"], run["title"], href=run["link"], small=run["path"]),
                Cell(str(run["seed"]), run["seed"]),
                Cell(format_metric(metric, run["test"][metric]), run["test"][metric]),
                number_cell(run["seconds"], 1),
                Cell(run["config_sha256"][:DIGEST], run["config_sha256"], code=True),
                Cell(run["model_sha256"][:DIGEST], run["model_sha256"], code=True),
                Cell(where or NOTHING, where or None),
                Cell(run["command"] or "not recorded", run["command"], code=True),
            ]
        )
        first = run["label"] not in seen
        seen.add(run["label"])
        anchors.append(f"run-{anchor(run['label'])}" + ("" if first else f"-{run['seed']}"))
    notes = [
        "Settings and Model: the first digits of the SHA-256 of config.yaml and of model.safetensors in the run's "
        "folder; data/comparison.json has all digits, and every digit of every number here.",
        f"This page was made by: {data['command']}",
    ]
    table = Table("Every run", columns, cells, notes=notes, anchors=anchors)
    return Section("runs", "Where this comes from", "Each number above comes from these runs.", [table])
