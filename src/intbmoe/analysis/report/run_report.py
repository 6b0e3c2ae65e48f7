"""The page of RUN/analysis: whatever parts and pictures are there, with where they come from.

Made from the folder alone. Pictures are found by their captions and tables by their data files, so that a new part of
the analysis appears here by itself; ``THEMES`` only says in which order, and what each asks.
"""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from intbmoe.analysis.compare_report import format_metric
from intbmoe.analysis.report.answer import Answer
from intbmoe.analysis.report.images import read_image
from intbmoe.analysis.report.page import Cell, Column, Facts, Figure, Notice, Page, Section, Table, render
from intbmoe.files import replace_file
from intbmoe.train.files import read_json
from intbmoe.version import program_version

NAME = "report.html"
MOST_ROWS = 300
"""Of a data table on the page; longer ones stay in their CSV file."""
NOTHING = "–"
THEMES = {
    "participation": ("Participation", "What does the model lose without one expert base?"),
    "routing": ("Routing", "Which tokens go where?"),
    "examples": ("Examples", "Where did each patch or token of single examples go?"),
    "recipes": ("Recipes", "How is each block composed?"),
    "load": ("Load", "How many tokens does each expert or block get, and how did that change over training?"),
    "cost": ("Cost", "What does inference take, and how does it grow with the experts?"),
    "training": ("Training", "How did loss and metric go?"),
}
COLUMN_TITLES = {
    "active": "experts a token",
    "worst_case": "largest load / mean",
    "smallest": "smallest drop",
    "mean": "mean drop",
    "factor_alone": "factor alone",
    "mean_cosine": "mean cosine",
}


def write_run_report(folder: str | Path) -> Path:
    """Make report.html of an analysis from its data and pictures; returns its path."""
    folder = Path(folder)
    path = folder / NAME
    replace_file(path, render(run_page(folder)).encode())
    return path


def run_page(folder: Path) -> Page:
    """The page of the analysis in ``folder``."""
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
    footer = f"Made by intbmoe {program_version()} from data/ and pictures/ beside this page; it loads nothing else."
    return Page(overline, answer_run(summary, parts), sections, footer)


def theme_of(name: str) -> str:
    """The first word of a part's or a picture's name: what begins alike stands together."""
    return re.split("[-_]", name)[0]


def answer_run(summary: Mapping[str, Any], parts: Mapping[str, Any]) -> Answer:
    """Five lines on a single run."""
    metric = summary["metric"]
    better = "higher" if summary["higher_is_better"] else "lower"
    others = [f"{name} {format_metric(name, value, None)}" for name, value in summary["test"].items() if name != metric]
    also = f" Also {', '.join(others)}." if others else ""
    share = f"{summary['examples']} of {summary['examples_of_split']}"
    inside = [text for text in (_told_participation(parts), _told_load(parts)) if text]
    lines = (
        ("What", f"{summary['title']}, seed {summary['seed']}: one run, compared with nothing."),
        (
            "On what",
            f"{summary['recipe']} ({summary['task']}); what is inside, on {share} {summary['split']} examples.",
        ),
        (
            "Result",
            f"{metric} {format_metric(metric, summary['test'][metric], None)} on the test split, {better} is better."
            f"{also}",
        ),
        ("Inside", " ".join(inside) or "This method has nothing to choose or to compose: its curves are below."),
        ("How sure", "One seed says nothing about the method; intbmoe compare with --seeds 3 gives intervals."),
    )
    return Answer("one run", f"{summary['title']} on {summary['recipe']}, seed {summary['seed']}", lines)


def _told_participation(parts: Mapping[str, Any]) -> str:
    layers = parts.get("participation", {}).get("layers", [])
    drops = [drop for layer in layers for drop in layer["drops"]]
    if not drops:
        return ""
    return f"Without one expert base the model is worse in {sum(drop > 0 for drop in drops)} of {len(drops)} cases."


def _told_load(parts: Mapping[str, Any]) -> str:
    load = parts.get("load", {})
    layers = load.get("layers", [])
    if not layers:
        return ""
    unit, total = load["unit"], sum(len(layer["present"]) for layer in layers)
    dead = sum(len(layer["dead"]) for layer in layers)
    worst = max(layer["worst_case"] or 0 for layer in layers)
    return f"{dead or 'None'} of {total} {unit}s got no token; the fullest has {worst:.2f} times the mean load."


def _section(folder: Path, theme: str, parts: Mapping[str, Any], captions: Sequence[Path]) -> Section:
    """Pictures first, then what parts say of each layer, then their numbers."""
    title, question = THEMES.get(theme, (theme.capitalize(), ""))
    own = [part for part in parts if theme_of(part) == theme]
    source = ", ".join(f"data/{part}.json" for part in own)
    blocks: list[Any] = []
    for path in captions:
        image = read_image(path.parent, path.stem) if theme_of(path.stem) == theme else None
        if image is not None:
            caption = read_json(path)
            files = ", ".join(part for part in (f"pictures/{path.stem}.svg", source) if part)
            blocks.append(Figure(caption["title"], caption["see"], caption["how"], image, files))
    for part in own:
        layers = parts[part].get("layers")
        if isinstance(layers, list) and layers and all(isinstance(layer, dict) for layer in layers):
            table = layer_table(layers)
            blocks += [table] if table else []
    for part in own:
        blocks += _data_table(folder, part)
    return Section(theme, title, question, blocks)


def layer_table(layers: Sequence[Mapping[str, Any]]) -> Table | None:
    """What a part says of each layer in single numbers; None if it says nothing but the layer's name."""
    names = list(dict.fromkeys(name for layer in layers for name, value in layer.items() if _is_single(value)))
    columns = [Column(COLUMN_TITLES.get(name, name.replace("_", " ")), _numeric(layers, name)) for name in names]
    rows = [[_cell(layer.get(name)) for name in names] for layer in layers]
    if all("dead" in layer and "present" in layer for layer in layers):
        columns.append(Column("without a token"))
        for row, layer in zip(rows, layers, strict=True):
            row.append(_cell(len(layer["dead"])))
    return Table("By layer", columns, rows) if len(columns) > 1 else None


def _is_single(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _numeric(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return not any(isinstance(row.get(name), str) for row in rows)


def _cell(value: Any) -> Cell:
    if value is None or value == "":
        return Cell(NOTHING)
    if isinstance(value, float):
        return Cell(f"{value:.4g}", value)
    return Cell(f"{value:,}" if isinstance(value, int) else str(value), value)


def _data_table(folder: Path, part: str) -> list[Table]:
    """The part's CSV file as a folded table; of a long file nothing, the caption names it."""
    path = folder / "data" / f"{part}.csv"
    if not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or len(rows) > MOST_ROWS:
        return []
    plain = [{name: _number(text) for name, text in row.items()} for row in rows]
    columns = [Column(name.replace("_", " "), _numeric(plain, name)) for name in plain[0]]
    cells = [[_cell(row[name]) for name in plain[0]] for row in plain]
    return [Table(f"The numbers: {len(rows)} rows of data/{part}.csv", columns, cells, folded=True)]


def _number(text: str | None) -> Any:
    if not text:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float) and not isinstance(value, bool) else text


def _source(summary: Mapping[str, Any]) -> Section:
    """What leads from the numbers back to the run."""
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
    lead = "Every number on this page comes from this run; all digits are in data/ beside the page."
    return Section("source", "Where this comes from", lead, [Facts(pairs)])


def _digest(whole: str) -> str:
    return f"SHA-256 {whole[:16]}…"


def trained_for(trace: Mapping[str, Any]) -> str:
    """How long a run took, in words."""
    words = []
    if trace["epochs"] is not None:
        words.append(f"{trace['epochs']:g} epochs")
    if trace["steps"] is not None:
        words.append(f"{trace['steps']:,} steps")
    if trace["seconds"] is not None:
        words.append(f"{trace['seconds']:,.1f} s")
    return ", ".join(words) or NOTHING
