"""The page of a comparison: runs/<recipe>/compare/<methods>/report.html, with its data and pictures beside it."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from intbmoe.analysis.compare_report import file_stem, floor_cells, format_metric
from intbmoe.analysis.report.answer import Answer, Contender, Question, answer_comparison
from intbmoe.analysis.report.comparison import ABLATIONS, Comparison, collect
from intbmoe.analysis.report.images import read_image
from intbmoe.analysis.report.page import Cell, Column, Figure, Notice, Page, Section, Span, Table, render
from intbmoe.analysis.report.run_report import NAME, NOTHING, trained_for
from intbmoe.files import replace_file, to_json
from intbmoe.train.files import read_json
from intbmoe.version import program_version

DIGEST = 12
"""Digits of a SHA-256 that are shown; the data has all."""
Data = Mapping[str, Any]
SHARES = {
    "participation": "how many experts contribute to a token's output",
    "execution": "how many experts or blocks are computed for a token",
    "materialization": "how many expert-sized weight sets are merged from experts",
}


def write_comparison_report(comparison: Comparison) -> Path:
    """Save the comparison's data, draw its pictures and make its page; returns the page's path."""
    folder = comparison.plan.folder / file_stem(comparison.methods)  # of its own, as its tables have their names
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    for name, content in collect(comparison).items():
        replace_file(data / f"{name}.json", to_json(content))
    return redraw_comparison(folder)


def redraw_comparison(folder: str | Path) -> Path:
    """Draw pictures and page again, from the saved data alone."""
    folder = Path(folder)
    data = read_json(folder / "data" / "comparison.json")
    pictures = folder / "pictures"
    pictures.mkdir(exist_ok=True)
    for old in pictures.iterdir():  # of an earlier comparison, which had other parts
        old.unlink()
    if find_spec("matplotlib") is not None:
        from intbmoe.analysis.drawing import FORMATS
        from intbmoe.analysis.report.comparison_pictures import draw_comparison

        curves = read_json(folder / "data" / "curves.json")["curves"]
        for picture in draw_comparison(data, curves):
            for form in FORMATS:
                (pictures / f"{picture.name}.{form}").write_bytes(picture.content(form))
            (pictures / f"{picture.name}.json").write_bytes(to_json(picture.caption()))
    path = folder / NAME
    replace_file(path, render(comparison_page(data, pictures)).encode())
    return path


def comparison_page(data: Data, pictures: Path) -> Page:
    """The page; parts without runs or pictures are not on it."""
    figures = {path.stem: _figure(path) for path in sorted(pictures.glob("*.json"))}
    answer = _answer(data)
    sections = [
        _results(data, answer.leaders),
        _part("cost", figures),
        _part("curves", figures),
        _part("load", figures),
    ]
    sections += [_part("sensitivity", figures), _ablations(data), _floors(data), _left_out(data, figures), _runs(data)]
    overline = f"intbmoe compare · {data['recipe']} · --methods {data['methods']}"
    footer = f"Made by intbmoe {program_version()} from data/ and pictures/ beside this page; it loads nothing else."
    return Page(overline, answer, [section for section in sections if section is not None], footer)


def _answer(data: Data) -> Answer:
    trained = _trained(data)
    run = data["runs"][0]
    training = trained_for({**run, "seconds": None})
    question = Question(
        recipe=data["recipe"],
        task=data["task"],
        metric=data["metric"],
        higher_is_better=data["higher_is_better"],
        training="not trained" if training == NOTHING else f"{training} each",
        left_out=sum(bool(one["path"]) for one in data["left_out"]),
    )
    contenders = [
        Contender(row["title"], tuple(row["values"]), row["mean"], row["interval_95"], row["flops"], row["params"])
        for row in trained
    ]
    return answer_comparison(question, contenders, data["floors"])


def _trained(data: Data) -> list[Data]:
    return [row for row in data["rows"] if row["mean"] is not None]


# The parts.

LEADS = {
    "cost": ("cost", "Quality and cost", "What does each method's quality cost in parameters, FLOPs and time?"),
    "curves": ("training", "Training", "How did the runs go?"),
    "load": ("load", "Load", "How evenly did each method use its experts or blocks?"),
    "sensitivity": ("sensitivity", "Sensitivity", "How much do K, k, E and L matter?"),
}


def _part(name: str, figures: Mapping[str, Figure]) -> Section | None:
    return Section(*LEADS[name], [figures[name]]) if name in figures else None


def _figure(path: Path) -> Figure:
    caption, image = read_json(path), read_image(path.parent, path.stem)
    if image is None:
        raise FileNotFoundError(f"{path} is the caption of a picture that is not there")
    source = f"pictures/{path.stem}.svg, data/"
    return Figure(caption["title"], caption["see"], caption["how"], image, source)


def _results(data: Data, leaders: Sequence[str]) -> Section:
    sign = -1 if data["higher_is_better"] else 1
    rows = sorted(data["rows"], key=lambda row: (row["mean"] is None, sign * (row["mean"] or 0)))
    unit, letter = (1e9, "G") if max(row["flops"] for row in rows) >= 1e9 else (1e6, "M")
    others = [name for name in (_trained(data)[0]["metrics"]) if name != data["metric"]]
    columns = [
        Column("Method", numeric=False),
        Column(data["metric"], sorted="descending" if data["higher_is_better"] else "ascending"),
        *(Column(name.capitalize(), hint=hint) for name, hint in SHARES.items()),
        Column("Params (M)"),
        Column("Activated (M)", hint="parameters that one token uses"),
        Column(f"FLOPs ({letter})", hint="of one example by itself, without attention's score and value products"),
        Column("Seconds", hint="measured time of one training run"),
        *(Column(name) for name in others),
    ]
    scale = _scale(_trained(data))
    cells = [
        [
            Cell(row["title"], row["title"], href=f"#run-{_anchor(row['label'])}"),
            _metric_cell(row, scale),
            *(_share_cell(row, name) for name in SHARES),
            _number(row["params"] / 1e6, 3),
            _number(row["activated"] / 1e6, 3, "~" if row["active_experts"] is not None else ""),
            _number(row["flops"] / unit, 3, "~" if row["active_experts"] is not None else ""),
            _number(row["seconds"], 1),
            *(_other_metric(row, name) for name in others),
        ]
        for row in rows
    ]
    marked = frozenset(index for index, row in enumerate(rows) if row["title"] in leaders)
    title = f"{data['metric']} on the test split, and what it takes"
    lead = "Click a heading to sort by it. A method's name leads to its runs."
    table = Table(title, columns, cells, notes=_result_notes(data, leaders), marked=marked)
    return Section("results", "Results", lead, [table])


def _result_notes(data: Data, leaders: Sequence[str]) -> list[str]:
    several = any(row["interval_95"] is not None for row in data["rows"])
    better = "right" if data["higher_is_better"] else "left"
    notes = [
        "±: half the 95 % interval of the mean, by Student's t. Under it the dot is the mean, the bar the interval, "
        f"thin marks are single seeds; the axis is the same in all rows, and better is further {better}."
        if several
        else "One seed each, so there is no interval, and differences may be chance (--seeds 3 gives intervals). "
        f"The dots share one axis; better is further {better}.",
        f"{'; '.join(f'{name.capitalize()}: {hint}' for name, hint in SHARES.items())}. For one layer, mean over the "
        "layers; shared experts left out.",
        "FLOPs: one example by itself, without attention's score and value products. Seconds: training, mean over "
        "runs, of which several may have shared the machine.",
    ]
    if leaders:
        notes.insert(0, "Tinted rows: the best mean, and what is tied with it because their intervals overlap.")
    if any(row["active_experts"] is not None for row in data["rows"]):
        notes.append("~: at the number of experts that a test token had on average, which a trained router decides.")
    if any(row["mean"] is None for row in data["rows"]):
        notes.append("A precomposed form is the same model with its blocks built once: same outputs, not trained anew.")
    return notes


def _scale(rows: Sequence[Data]) -> tuple[float, float]:
    """The ends of the common axis."""
    low = min(min(row["mean"] - (row["interval_95"] or 0), *row["values"]) for row in rows)
    high = max(max(row["mean"] + (row["interval_95"] or 0), *row["values"]) for row in rows)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _metric_cell(row: Data, scale: tuple[float, float]) -> Cell:
    if row["mean"] is None:
        return Cell(NOTHING)
    low, high = scale
    place = [
        0.04 + 0.92 * (value - low) / (high - low)
        for value in (row["mean"], row["mean"] - (row["interval_95"] or 0), row["mean"] + (row["interval_95"] or 0))
    ]
    points = tuple(0.04 + 0.92 * (value - low) / (high - low) for value in row["values"])
    span = Span(*place, points if len(points) > 1 else ())
    return Cell(format_metric(row["metric"], row["mean"], row["interval_95"]), row["mean"], span=span)


def _share_cell(row: Data, name: str) -> Cell:
    value = row[name]
    decided = row["active_experts"] is not None and name != "materialization"
    return Cell(f"~{value:.2f}" if decided else f"{value:g}", value)


def _other_metric(row: Data, name: str) -> Cell:
    found = row["metrics"].get(name)
    if not found:
        return Cell(NOTHING)
    whole = format_metric(name, found["mean"], found["interval_95"])
    mean, _, reach = whole.partition(" ± ")
    return Cell(mean, found["mean"], small=f"± {reach}" if reach else None)


def _number(value: float | None, digits: int, before: str = "") -> Cell:
    return Cell(NOTHING) if value is None else Cell(f"{before}{value:,.{digits}f}", value)


def _ablations(data: Data) -> Section | None:
    """The paper's tables: every metric of the full model and of each ablation, and the distance of the two."""
    rows = {row["label"]: row for row in _trained(data)}
    variants = [one for one in data["sets"].get(ABLATIONS, []) if one["label"] in rows]
    if len(variants) < 2:
        return None
    metrics = [data["metric"], *(name for name in rows[variants[0]["label"]]["metrics"] if name != data["metric"])]
    full = rows.get("intbmoe")
    cells, differences = [], []
    for one in variants:
        row = rows[one["label"]]
        title = one["title"].rpartition(", ")[2] if row is not full else "full"
        name = Cell(title, title, href=f"#run-{_anchor(row['label'])}")
        cells.append([name, *(_other_metric(row, metric) for metric in metrics), _number(row["params"] / 1e6, 3)])
        if full is not None and row is not full:
            differences.append([name, *(_difference(row, full, metric) for metric in metrics)])
    columns = [Column("Variant", numeric=False), *(Column(name) for name in metrics)]
    tables = [Table("IntBMoE and its ablations, on the test split", [*columns, Column("Params (M)")], cells)]
    if differences:
        better = (
            "Below zero: the part that was left out helped"
            if data["higher_is_better"]
            else ("Above zero: the part that was left out helped")
        )
        note = f"Mean of the ablation minus mean of the full model. {better}, as far as the intervals above allow."
        tables.append(Table("Distance from the full model", columns, differences, notes=[note]))
    return Section("ablations", "Ablations", "What does each part of IntBMoE do? One is left out at a time.", tables)


def _difference(row: Data, full: Data, metric: str) -> Cell:
    if metric not in row["metrics"] or metric not in full["metrics"]:
        return Cell(NOTHING)
    gap = row["metrics"][metric]["mean"] - full["metrics"][metric]["mean"]
    text = f"{100 * gap:+.2f} points" if metric.startswith("accuracy") else f"{gap:+.4f}"
    return Cell(text.replace("-", "−"), gap)


def _floors(data: Data) -> Section | None:
    if not data["floors"]:
        return None
    header, rows = floor_cells(data["floors"])
    columns = [Column(header[0], numeric=False), *(Column(name) for name in header[1:])]
    cells = [
        [
            Cell(row[0], row[0]),
            *(Cell(text, data["floors"][row[0]].get(name)) for name, text in zip(header[1:], row[1:], strict=True)),
        ]
        for row in rows
    ]
    lead = "What needs no learning. A method that does not beat these has learned nothing."
    return Section("floors", "Floors", lead, [Table("Floors, on the test split", columns, cells)])


def _left_out(data: Data, figures: Mapping[str, Figure]) -> Section | None:
    items = [
        (f"{one['title']}{' (' + one['path'] + ')' if one['path'] else ''}:", one["reason"]) for one in data["left_out"]
    ]
    if not figures and find_spec("matplotlib") is None:
        items.append(("Pictures:", "matplotlib is not installed: pip install 'intbmoe[plots]'"))
    lead = "Runs that are unfinished or damaged, and variants that the task does not take. No number here counts them."
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
                Cell(format_metric(metric, run["test"][metric], None), run["test"][metric]),
                _number(run["seconds"], 1),
                Cell(run["config_sha256"][:DIGEST], run["config_sha256"], code=True),
                Cell(run["model_sha256"][:DIGEST], run["model_sha256"], code=True),
                Cell(where or NOTHING, where or None),
                Cell(run["command"] or "not recorded", run["command"], code=True),
            ]
        )
        first = run["label"] not in seen
        seen.add(run["label"])
        anchors.append(f"run-{_anchor(run['label'])}" + ("" if first else f"-{run['seed']}"))
    notes = [
        "Settings and Model: the beginning of the SHA-256 of config.yaml and of model.safetensors in the run's folder; "
        "data/comparison.json has them whole, with every digit of every number here.",
        f"This page was made by: {data['command']}",
    ]
    table = Table("Every run", columns, cells, notes=notes, anchors=anchors)
    return Section("runs", "Where this comes from", "Each number above is made of these runs.", [table])


def _anchor(label: str) -> str:
    """Fit for an id and a link to it; different labels give different anchors."""
    return "".join(
        char if char.isascii() and (char.isalnum() or char in "-_") else f".{ord(char):x}." for char in label
    )
