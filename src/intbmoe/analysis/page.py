"""The page of RUN/analysis: all parts and pictures in the folder, and where they come from.

It is made from the folder alone. Pictures are found by their captions and tables by their data files, so that a new
part of the analysis appears by itself; ``THEMES`` only gives the order and the question that each theme answers.
"""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from intbmoe.report.numbers import NOTHING, format_metric
from intbmoe.report.page import Answer, Facts, Notice, Page, Section, read_figure
from intbmoe.report.tables import Cell, Table
from intbmoe.report.trace import trained_for
from intbmoe.train.files import read_json

MOST_ROWS = 300  # of a data table on the page; longer ones stay in their CSV file
THEMES = {
    "participation": ("Participation", "What does the model lose without one expert base?"),
    "routing": ("Routing", "Which tokens go where?"),
    "examples": ("Examples", "Where did each patch or token of single examples go?"),
    "coefficients": ("Coefficients", "How is each block composed?"),
    "load": ("Load", "How many tokens does each expert or block get, and how did that change over training?"),
    "cost": ("Cost", "What does inference cost, and how does it grow with the experts?"),
    "training": ("Training", "How did the loss and the metric change?"),
}
SINGLE = (str, int, float)
ONE_SIDED = 0.0228  # the share of a normal distribution beyond two standard deviations on one side
COLUMN_TITLES = {
    "active": "experts per token",
    "worst_case": "largest load / mean",
    "smallest": "smallest rise of the loss",
    "mean": "mean rise of the loss",
    "factor_alone": "factor alone",
    "mean_cosine": "mean cosine",
}


def run_page(folder: Path) -> Page:
    summary = read_json(folder / "data" / "analysis.json")
    parts = {part: read_json(folder / "data" / f"{part}.json") for part in summary["parts"]}
    captions = sorted((folder / "pictures").glob("*.json"))
    themes = {theme_of(name) for name in (*parts, *(path.stem for path in captions))}
    order = sorted(themes, key=lambda theme: (list(THEMES).index(theme) if theme in THEMES else len(THEMES), theme))
    sections = [_section(folder, theme, parts, captions) for theme in order]
    if summary["left_out"]:
        items = [
            (f"{part.replace('_', ' ').capitalize()}:", f"{reason}.") for part, reason in summary["left_out"].items()
        ]
        lead = "Parts that do not apply to this run, and why."
        sections.append(Section("left-out", "Left out", lead, [Notice(items)]))
    sections.append(_source(summary))
    overline = f"intbmoe analyse · {summary['recipe']}/{summary['label']}/{summary['seed']}"
    return Page(overline, answer_run(summary, parts), sections)


def theme_of(name: str) -> str:
    """The first word of a part's or a picture's name, by which they are grouped."""
    return re.split("[-_]", name)[0]


def answer_run(summary: Mapping[str, Any], parts: Mapping[str, Any]) -> Answer:
    metric = summary["metric"]
    better = "higher" if summary["higher_is_better"] else "lower"
    others = [f"{name} {format_metric(name, value)}" for name, value in summary["test"].items() if name != metric]
    also = f" Also {', '.join(others)}." if others else ""
    share = f"{summary['examples']} of {summary['examples_of_split']}"
    inside = [told_participation(parts["participation"])] if "participation" in parts else []
    inside += [told_load(parts["load"])] if "load" in parts else []
    lines = (
        ("What", f"{summary['title']}, seed {summary['seed']}: a single run, without a comparison."),
        (
            "On what",
            f"{summary['recipe']} ({summary['task']}); analysed on {share} {summary['split']} examples.",
        ),
        (
            "Result",
            f"{metric} {format_metric(metric, summary['test'][metric])} on the test split, {better} is better.{also}",
        ),
        ("Inside", " ".join(inside) or "This method does not choose experts or compose blocks: its curves are below."),
        ("How sure", "One seed says nothing about the method; intbmoe compare with --seeds 3 gives intervals."),
    )
    return Answer("one run", f"{summary['title']} on {summary['recipe']}, seed {summary['seed']}", lines)


def told_participation(found: Mapping[str, Any]) -> str:
    """Say how many removals hurt by more than two standard errors, and how many would by chance."""
    cases = sum(len(layer["rises"]) for layer in found["layers"])
    if found["examples"] < 2:
        return "A single example has no standard error, so nothing can be said about what a base does."
    sure = f"{found['sure'] or 'none'} of the rises {'is' if found['sure'] == 1 else 'are'} certain"
    return (
        f"Without one expert base the loss rises by more than two standard errors in {found['hurting']} of {cases} "
        f"cases and falls by as much in {found['helping']}; by chance alone it would be about "
        f"{ONE_SIDED * cases:.1f} each. Corrected for {cases} comparisons, {sure}."
    )


def told_load(load: Mapping[str, Any]) -> str:
    layers, unit = load["layers"], load["unit"]
    total, dead = (sum(len(layer[kind]) for layer in layers) for kind in ("present", "dead"))
    worst = max(layer["worst_case"] or 0 for layer in layers)
    return f"{dead or 'None'} of {total} {unit}s got no token; the fullest has {worst:.2f} times the mean load."


def _section(folder: Path, theme: str, parts: Mapping[str, Any], captions: Sequence[Path]) -> Section:
    """A theme's section: pictures first, then a table of layers for each part, then the parts' numbers."""
    title, question = THEMES.get(theme, (theme.capitalize(), ""))
    own = [part for part in parts if theme_of(part) == theme]
    source = ", ".join(f"data/{part}.json" for part in own)
    blocks: list[Any] = [read_figure(path, source) for path in captions if theme_of(path.stem) == theme]
    for part in own:
        layers = parts[part].get("layers")
        if isinstance(layers, list) and layers and all(isinstance(layer, dict) for layer in layers):
            table = layer_table(layers)
            blocks += [table] if table else []
    for part in own:
        blocks += _data_table(folder, part)
    return Section(theme, title, question, blocks)


def layer_table(layers: Sequence[Mapping[str, Any]]) -> Table | None:
    """A table of a part's single numbers for each layer; None if there is only the layer's name."""
    names = dict.fromkeys(name for layer in layers for name, value in layer.items() if isinstance(value, SINGLE))
    records = [{name: layer.get(name) for name in names} for layer in layers]
    if all("dead" in layer and "present" in layer for layer in layers):
        records = [
            {**record, "without a token": len(layer["dead"])} for record, layer in zip(records, layers, strict=True)
        ]
    return Table.of_records("By layer", records, COLUMN_TITLES) if len(records[0]) > 1 else None


def _data_table(folder: Path, part: str) -> list[Table]:
    """The part's CSV file as a folded table; nothing for a long file, which the caption names."""
    path = folder / "data" / f"{part}.csv"
    if not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or len(rows) > MOST_ROWS:
        return []
    plain = [{name: _number(text) for name, text in row.items()} for row in rows]
    return [Table.of_records(f"The numbers: {len(rows)} rows of data/{part}.csv", plain, folded=True)]


def _number(text: str | None) -> Any:
    if not text:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float) and not isinstance(value, bool) else text


def _source(summary: Mapping[str, Any]) -> Section:
    trace = summary["run"]
    pairs = [
        ("Run", Cell(trace["name"], href="../")),
        ("Seed", Cell(str(trace["seed"]))),
        ("Settings", Cell("config.yaml", href="../config.yaml", small=_digest(trace["config_sha256"]))),
        ("Model", Cell("model.safetensors", href="../model.safetensors", small=_digest(trace["model_sha256"]))),
        ("Parameters", Cell(f"{trace['params']:,}" if trace["params"] else NOTHING)),
        ("Trained for", Cell(trained_for(trace))),
        ("On", Cell(" · ".join(str(trace[key]) for key in ("device", "torch") if trace[key]) or NOTHING)),
        ("Started", Cell(trace["started"] or NOTHING)),
        ("Code", Cell((trace["commit"] or NOTHING)[:12], code=True)),
        ("Command", Cell(trace["command"] or "not recorded", code=True)),
    ]
    lead = "Every number on this page comes from this run; all digits are in data/ next to the page."
    return Section("source", "Where this comes from", lead, [Facts(pairs)])


def _digest(whole: str) -> str:
    return f"SHA-256 {whole[:16]}…"
