"""The table of a comparison: brief on the screen and in Markdown, complete on the page, with all digits in files."""

import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from intbmoe.compare.pairs import find_unsteady
from intbmoe.compare.summary import Row, trained_rows
from intbmoe.layer import OnePer
from intbmoe.report.numbers import NOTHING, flops_unit, format_difference, format_metric
from intbmoe.report.tables import Cell, Column, Span, Table

Floors = Mapping[str, Mapping[str, float]]
SHARES = {
    "participation": "how many experts contribute to a token's output",
    "execution": "how many experts or blocks are computed for a token",
    "materialization": "how many expert-sized weight sets are built from experts, for one example by itself",
}
DIFFERENCE = "the difference of the means over the seeds that both have"
IN_CSV = (
    *("label", "title", "method", "metric", "mean", "interval_95", "seeds", "values", *SHARES, "materialization_per"),
    *("params", "activated", "flops", "flops_executed", "active_experts", "seconds"),
    *("difference", *(f"difference_{name}" for name in ("baseline", "interval_95", "p", "p_holm", "seeds"))),
)
STEMS = {"K": "blocks", "k": "top_k", "E": "experts", "L": "layers"}
"""File names for sets whose own names would differ only in case."""
LONGEST_STEM = 60
WITH_ATTENTION = "attention's score and value products included"
SURE = 0.05


def results_table(rows: Sequence[Row], title: str, order: str | None = None, **more: Any) -> Table:
    """Return the table with all columns; ``order`` says how the rows are sorted by the deciding metric, if they are."""
    first = trained_rows(rows)[0]
    metric, headings = first["metric"], first["reported"]
    unit, letter = flops_unit(row["flops"] for row in rows)
    others = [name for name in first["metrics"] if name != metric]
    against = _baseline(rows)
    spare = against is not None  # differences take the room of other columns
    columns = [
        Column("Method", numeric=False, name="title"),
        Column(metric, sorted=order, name="mean"),
        *([Column(f"vs {against}", hint=DIFFERENCE, name="difference")] if against else []),
        *(Column(name.capitalize(), hint=hint, name=name) for name, hint in SHARES.items()),
        Column("Params (M)", name="params"),
        Column("Activated (M)", hint="parameters that one token uses", name="activated", spare=spare),
        Column(f"FLOPs ({letter})", hint=f"for one example by itself, {WITH_ATTENTION}", name="flops"),
        Column("Seconds", hint="measured time of one training run", name="seconds", spare=spare),
        *(Column(headings.get(name, name), name=name) for name in others),
    ]
    scale = _scale(trained_rows(rows))
    cells = [
        [
            Cell(row["title"], row["title"], href=f"#run-{anchor(row['label'])}", small=row.get("settings")),
            _metric_cell(row, scale),
            *([_difference_cell(row)] if against else []),
            *(_share_cell(row, name) for name in SHARES),
            number_cell(row["params"] / 1e6, 3),
            number_cell(row["activated"] / 1e6, 3, _about(row)),
            number_cell(row["flops"] / unit, 3, _about(row)),
            number_cell(row["seconds"], 1),
            *(other_metric_cell(row, name) for name in others),
        ]
        for row in rows
    ]
    return Table(title, columns, cells, **more)


def brief_table(rows: Sequence[Row], title: str, higher_is_better: bool) -> Table:
    """Return what fits on the screen and in Markdown, the best mean in bold; its records are the complete results."""
    records = [_record(row) for row in rows]
    trained = trained_rows(rows)
    first, best = trained[0], (max if higher_is_better else min)(trained, key=lambda row: row["mean"])
    marked = frozenset([rows.index(best)])
    beside = [name for name in first["reported"] if name in first["metrics"]]
    paired = ["difference"] if _baseline(rows) else []
    shown = ("title", "mean", *paired, *beside, "params", "activated", "flops", "seconds")
    return results_table(rows, title, notes=notes(rows), marked=marked, records=records).select(*shown)


def _record(row: Row) -> dict[str, Any]:
    """Flatten the row for a CSV: the mean and interval of each metric become entries of their own."""
    flat = {key: row[key] for key in row if key not in ("metrics", "reported", "difference", "to_best")}
    if difference := row.get("difference"):
        flat |= {"difference": difference["value"]}
        flat |= {f"difference_{name}": value for name, value in difference.items() if name != "value"}
    for name, found in row["metrics"].items():
        flat |= {name: found["mean"], f"{name}_interval_95": found["interval_95"]}
    return flat


def _about(row: Row) -> str:
    return "~" if row["active_experts"] is not None else ""


def _scale(rows: Sequence[Row]) -> tuple[float, float]:
    low = min(min(row["mean"] - (row["interval_95"] or 0), *row["values"]) for row in rows)
    high = max(max(row["mean"] + (row["interval_95"] or 0), *row["values"]) for row in rows)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _metric_cell(row: Row, scale: tuple[float, float]) -> Cell:
    if row["mean"] is None:
        return Cell(NOTHING)
    low, high = scale
    mean, reach = row["mean"], row["interval_95"] or 0
    ends, points = (
        tuple(0.04 + 0.92 * (value - low) / (high - low) for value in values)
        for values in ((mean, mean - reach, mean + reach), row["values"])
    )
    span = Span(*ends, points if len(points) > 1 else ())
    return Cell(format_metric(row["metric"], mean, row["interval_95"]), mean, span=span)


def _baseline(rows: Sequence[Row]) -> str | None:
    """Return the title of the method that the rows are compared with in pairs, if any."""
    labels = {row["difference"]["baseline"] for row in rows if row.get("difference")}
    return next((row["title"] for row in rows if row["label"] in labels), None)


def _difference_cell(row: Row) -> Cell:
    if not (found := row.get("difference")):
        return Cell(NOTHING)
    value = format_difference(row["metric"], found["value"], "", sign="+").rstrip()
    reach = format_difference(row["metric"], found["interval_95"], "").rstrip()
    return Cell(f"{value} ± {reach}{'*' * (found['p_holm'] < SURE)}", found["value"])


def difference_notes(rows: Sequence[Row]) -> list[str]:
    found = [row["difference"] for row in rows if row.get("difference")]
    if not found:
        return []
    one, pairs = found[0], len(found)
    covered = "the choice of test examples and, judged as for the means, that of seeds"
    if not one["over_seeds"]:
        covered = "the choice of test examples only; with one seed, the variation between training runs is unknown"
    corrected = f" after Holm's correction for {pairs} comparisons" if pairs > 1 else ""
    return [
        f"vs {_baseline(rows)}: {DIFFERENCE}, on the same {one['examples']:,} test examples, ± its 95 % interval "
        f"(this covers {covered}). *: a two-sided p-value below {100 * SURE:.0f} %{corrected}."
    ]


def _share_cell(row: Row, name: str) -> Cell:
    value, unit = row[name], row["materialization_per"]
    if name == "materialization":
        small = f"{value:g} for one example"
        return Cell(f"{value:g}", value) if unit is None else Cell(str(OnePer(unit)), value, small=small)
    return Cell(f"{value:g}" if row["active_experts"] is None else f"~{value:.2f}", value)


def other_metric_cell(row: Row, name: str) -> Cell:
    found = row["metrics"].get(name)
    if not found:
        return Cell(NOTHING)
    mean, _, reach = format_metric(name, found["mean"], found["interval_95"]).partition(" ± ")
    return Cell(mean, found["mean"], small=f"± {reach}" if reach else None)


def number_cell(value: float | None, digits: int, before: str = "") -> Cell:
    return Cell(NOTHING) if value is None else Cell(f"{before}{value:,.{digits}f}", value)


def anchor(label: str) -> str:
    """Return a string fit for an id and a link to it; different labels give different anchors."""
    return re.sub(r"[^A-Za-z0-9_-]", lambda found: f".{ord(found[0]):x}.", label)


def floors_table(floors: Floors, title: str, kind: str = "Floor") -> Table:
    metrics = list(dict.fromkeys(metric for values in floors.values() for metric in values))
    rows = []
    for name, values in floors.items():
        texts = {metric: format_metric(metric, value) for metric, value in values.items()}
        found = (Cell(texts.get(metric, NOTHING), values.get(metric)) for metric in metrics)
        rows.append([Cell(name, name), *found])
    return Table(title, [Column(kind, numeric=False), *map(Column, metrics)], rows)


def notes(rows: Sequence[Row]) -> list[str]:
    seeds = {len(row["seeds"]) for row in rows if row["values"]}
    told = []
    if min(seeds) > 1:
        told.append(
            f"±: 95 % interval of the mean over {' or '.join(map(str, sorted(seeds)))} seeds, {by_students_t(rows)}."
        )
    elif max(seeds) > 1:
        told.append(f"±: 95 % interval of the mean over the seeds, {by_students_t(rows)}.")
    else:
        told.append("One seed, so no interval: differences of this size may be chance (--seeds 3 gives intervals).")
    told += difference_notes(rows)
    told.append(f"FLOPs: one example, {WITH_ATTENTION}. Seconds: training, one run.")
    told += [*protocol_notes(rows), *tuning_notes(rows)]
    active = [f"{row['title']} {row['active_experts']:.2f}" for row in rows if row["active_experts"] is not None]
    if active:
        told.append(f"~: at the average experts of a test token, which the router decides: {', '.join(active)}.")
    return told


def by_students_t(rows: Sequence[Row]) -> str:
    values = [row["values"] for row in rows]
    if sum(map(bool, values)) < 2:
        return "by Student's t"
    unsteady = [rows[place]["title"] for place in sorted(find_unsteady(values))]
    wide = f", except for {' and '.join(unsteady)}, whose seeds differ much more" if unsteady else ""
    return f"by Student's t, with the spread of all methods pooled{wide}"


def tuning_notes(rows: Sequence[Row]) -> list[str]:
    if not any(row.get("settings") for row in rows):
        return []
    return [
        "Each method has settings of its own, chosen on the validation split. The first seed also chose them, so its "
        "result is a little optimistic; no interval includes that choice."
    ]


def protocol_notes(rows: Sequence[Row]) -> list[str]:
    """Say how the reported numbers were chosen, if not as usual."""
    trained, told = trained_rows(rows), []
    if not all(row["validated"] for row in trained):
        told.append("Nothing was validated: no example was held out of training.")
    if any(row["report"] == "best" for row in trained):
        told.append("The best of all evaluations on the test split is reported, chosen on that split: an upper bound.")
    elif told:
        told.append("The last step is reported.")
    return told


def file_stem(methods: str) -> str:
    names = [STEMS.get(name.strip(), name.strip()) for name in methods.split(",") if name.strip()]
    return "+".join(dict.fromkeys(names))[:LONGEST_STEM]


def write_files(
    folder: Path,
    stem: str,
    rows: Sequence[Row],
    title: str,
    higher_is_better: bool,
    floors: Floors | None = None,
    tuning: Table | None = None,
) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    table = brief_table(rows, title, higher_is_better)
    below = [*([floors_table(floors, "")] if floors else []), *([tuning] if tuning else [])]
    metrics = dict.fromkeys(name for row in rows for name in row["metrics"])
    columns = (*IN_CSV, *(column for name in metrics for column in (name, f"{name}_interval_95")))
    columns += ("settings",) if tuning else ()
    contents = {
        "csv": table.csv(columns, line_end="\r\n"),
        "json": table.json(),
        "md": table.markdown_document(*below),
    }
    if floors:
        contents["floors.json"] = json.dumps(floors, indent=2, ensure_ascii=False) + "\n"
    for suffix, content in contents.items():
        (folder / f"{stem}.{suffix}").write_text(content, encoding="utf-8", newline="")
    paths = [folder / f"{stem}.{suffix}" for suffix in contents]
    if find_spec("matplotlib") is not None:
        from intbmoe.compare.pictures import draw_table  # an optional dependency
        from intbmoe.report.canvas import FORMATS, save_picture

        picture, drawn = draw_table(rows, title, higher_is_better), [folder / f"{stem}.{form}" for form in FORMATS]
        for path in drawn:
            save_picture(picture, path)
        paths += drawn
    return paths
