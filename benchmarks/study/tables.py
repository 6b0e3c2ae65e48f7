"""The tables of docs/results.md, from the summaries of the study.

    python -m benchmarks.study.tables                       # into docs/results.md and README.md, between their markers
    python -m benchmarks.study.tables --print               # on the screen

For each study: equal parameters, equal compute (with IntBMoE's one-layer form too), dense in the mixture's place,
ablations, and the commands of all rows. A table holds runs whose settings agree in everything but the method and the
seed; if there are several such groups the one that is best on the validation split is shown, and a line says what was
left out. Over all studies: an overview of a line each, and what the paper reports.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.study.clock import TIMING
from benchmarks.study.paper import gains
from benchmarks.study.plan import RESULTS, TUNED, TUNING, read_summaries
from benchmarks.study.studies import ONE_LAYER, REAL, STUDIES

from intbmoe.budget import TABLE_1, TABLE_2
from intbmoe.compare.summary import confidence_intervals
from intbmoe.recipes.sets import PLACED
from intbmoe.report.numbers import NOTHING, flops_unit, format_metric
from intbmoe.report.tables import Table

HOUSE = Path(__file__).parents[2]
DOCUMENT, README = HOUSE / "docs" / "results.md", HOUSE / "README.md"
SECOND = {"accuracy": "accuracy5", "loss": "perplexity", "HR@10": "HR@10 new", "HR@5": "HR@1"}
"""What is shown beside the metric that decides."""
ORDER = {label: place for place, label in enumerate(dict.fromkeys((*TABLE_1, *TABLE_2)))}
TITLES = {
    "tiny-imagenet": "Images: Tiny-ImageNet",
    "wikipedia": "Text: Wikipedia",
    "foursquare": "Places: Foursquare, New York",
    "foursquare-us": "Places: Foursquare, US",
    "checkins": "Places with context: Foursquare, New York",
    "checkins-us": "Places with context: Foursquare, US",
    "checkins-told": "Two tasks, and who is told which: Foursquare, New York",
    "yelp": "Businesses: Yelp",
    "planted": "A control: journeys with a planted rule",
}
PARAMETERS, COMPUTE, ABLATIONS = "Equal parameters", "Equal compute", "Ablations"
NARROW, CONTROL = "Equal compute with one layer", "The backbone's FFN in the mixture's place"
BESIDE = {PARAMETERS: "intbmoe", COMPUTE: "intbmoe", NARROW: ONE_LAYER, CONTROL: "dense", ABLATIONS: "intbmoe"}
"""Which row of another table stands in a table too, in the order of the tables."""
Rows = dict[str, list[dict[str, Any]]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the study's tables from its summaries.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--studies", nargs="+", choices=list(STUDIES), default=list(REAL))
    parser.add_argument("--print", action="store_true", help="on the screen, and change no file")
    options = parser.parse_args()
    summaries = read_summaries(options.results)
    parts = {study: study_text(study, summaries, read_timing(options.results, study)) for study in options.studies}
    parts["tuning"] = tuning_text(summaries)
    parts["mixing"] = mixing_text(summaries)
    parts["overview"] = overview_text(REAL, summaries)
    found = {study: find_rows(study, summaries)[0] for study in REAL}
    parts["gains"] = gains(found, {"dense": "over dense", PLACED: "over dense in its place"}).markdown()
    parts["ablations"] = gains(found, {"intbmoe": "here"}).markdown()
    if options.print:
        print("\n\n".join(f"## {name}\n\n{text}" for name, text in parts.items()))
        return 0
    fill(options.document, parts)
    fill(options.readme, {"overview": parts["overview"]})
    return 0


def fill(document: Path, parts: Mapping[str, str]) -> None:
    text = document.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = put(text, name, part, document)
    document.write_text(text, encoding="utf-8")


def put(text: str, name: str, part: str, where: Path) -> str:
    """``text`` with what lies between the markers of ``name`` replaced."""
    begin, end = f"<!-- study:{name} -->", f"<!-- /study:{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{where} must hold {begin} and {end} once each")
    return re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{part}\n{end}", text, flags=re.DOTALL)


def read_timing(results: Path, study: str) -> dict[str, Any]:
    path = results / TIMING.format(study)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": {}}


def study_text(study: str, summaries: Sequence[Mapping[str, Any]], timing: Mapping[str, Any]) -> str:
    rows, left_out = find_rows(study, summaries)
    if not rows:
        return "No run yet."
    parts = [_about([run for runs in rows.values() for run in runs], timing)]
    if left_out:
        parts.append(f"{left_out} runs of other settings are left out.")
    for title, beside in BESIDE.items():
        if any(table_of(label) == title for label in rows):
            shown = {label: found for label, found in rows.items() if table_of(label) == title or label == beside}
            parts.append(f"**{title}**\n\n{table(shown, timing['rows'])}")
    parts += _besides(rows, "floors", "What needs no learning")
    parts += _besides(rows, "ceilings", "The best that is possible")
    commands = "\n".join(_command(found) for found in rows.values())
    parts.append(f"<details><summary>Commands</summary>\n\n```\n{commands}\n```\n\n</details>")
    return "\n\n".join(parts)


def table_of(label: str) -> str:
    """Which table a variant stands in; IntBMoE itself stands in others too."""
    if label == PLACED:
        return CONTROL
    if label.endswith("-narrow"):
        return NARROW
    if label.endswith(("-wide", "-more")):
        return COMPUTE
    return ABLATIONS if label.startswith("intbmoe-") else PARAMETERS


def find_rows(study: str, summaries: Sequence[Mapping[str, Any]]) -> tuple[Rows, int]:
    """The runs by which a study goes on, label by label in the paper's order, and how many others there are."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for summary in summaries:
        if summary["study"] == study and summary["stage"] != TUNING:
            groups.setdefault(summary["shared_digest"], []).append(summary)
    chosen = max(groups.values(), key=_standing, default=[])
    rows: Rows = {}
    for summary in sorted(chosen, key=lambda summary: (_place(summary), summary["seed"])):
        rows.setdefault(summary["label"], []).append(summary)
    return rows, sum(map(len, groups.values())) - len(chosen)


def overview_text(studies: Sequence[str], summaries: Sequence[Mapping[str, Any]]) -> str:
    """A line for each study that has IntBMoE: beside dense in both places, the best other method by validation, and
    equal compute."""
    dense, lines = ["Dense", "Dense in the mixture's place"], []
    header = ["Test", *dense, "Best other method", "IntBMoE", "Dense SwiGLU, IntBMoE's FLOPs"]
    for study in studies:
        rows, _ = find_rows(study, summaries)
        if "intbmoe" not in rows:
            continue
        one = rows["intbmoe"][0]
        metric, sign = one["metric"], 1 if one["higher_is_better"] else -1
        others = [label for label in rows if label in ORDER and label not in TUNED]
        best = max(others, key=lambda label: sign * _mean(rows[label], "valid", metric), default=None)
        values = {label: _value(found, "test", metric) for label, found in rows.items()}
        other = f"{rows[best][0]['title']} {values[best]}" if best else NOTHING
        plain, placed, wide = (values.get(label, NOTHING) for label in ("dense", PLACED, "swiglu-wide"))
        lines.append([f"{TITLES[study]}, {metric}", plain, placed, other, values["intbmoe"], wide])
    return _markdown(header, lines)


def _standing(group: Sequence[Mapping[str, Any]]) -> tuple[float, int]:
    """By which of several settings the study goes on: dense and IntBMoE's mean on validation, then how many runs."""
    sign = 1 if group[0]["higher_is_better"] else -1
    found = [[sign * run["valid"][run["metric"]] for run in group if run["label"] == label] for label in TUNED]
    return fmean(map(fmean, found)) if all(found) else -math.inf, len(group)


def _place(summary: Mapping[str, Any]) -> tuple[bool, int, str]:
    return summary["label"] not in ORDER, ORDER.get(summary["method"], len(ORDER)), summary["label"]


def table(rows: Rows, timing: Mapping[str, Any]) -> str:
    """One row a variant, the best by its mean in bold, unless it has a single seed: one value is no claim."""
    first = next(iter(rows.values()))[0]
    metric, second = first["metric"], SECOND.get(first["metric"])
    unit, letter = flops_unit(found[0]["flops_training"] for found in rows.values())
    header = [
        "Method",
        f"{metric}, test",
        "valid",
        *([f"{second}, test"] if second else []),
        "Params (M)",
        "Activated (M)",
    ]
    header += [f"FLOPs, one example ({letter})", f"in a batch ({letter})", "ms a step", "GiB", "Seeds"]
    sign = 1 if first["higher_is_better"] else -1
    best = max(rows, key=lambda label: sign * _mean(rows[label], "test", metric))
    lines = []
    for label, found in rows.items():
        one, measured = found[0], timing.get(label, {})
        about = "~" if one["active_experts"] is not None else ""
        cells = [one["title"], *(_value(found, split, metric) for split in ("test", "valid"))]
        cells += [_value(found, "test", second)] if second else []
        cells += [f"{one['params'] / 1e6:.3f}", f"{about}{fmean(row['activated'] for row in found) / 1e6:.3f}"]
        cells += [f"{about}{fmean(row[name] for row in found) / unit:.3f}" for name in ("flops", "flops_training")]
        cells.append(f"{measured['step_ms']:.1f}" if "step_ms" in measured else NOTHING)
        most = max(row["peak_gpu_bytes"] or 0 for row in found)
        cells.append(f"{most / 2**30:.1f}" if most else NOTHING)
        cells.append(" ".join(str(row["seed"]) for row in found))
        lines.append(cells)
    marked = frozenset([list(rows).index(best)] if len(rows[best]) > 1 else [])
    return Table.of_texts("", header, lines, marked=marked).markdown()


def _mean(found: Sequence[Mapping[str, Any]], split: str, metric: str) -> float:
    return fmean(row[split][metric] for row in found)


def _value(found: Sequence[Mapping[str, Any]], split: str, metric: str) -> str:
    values = [row[split][metric] for row in found]
    return format_metric(metric, fmean(values), confidence_intervals([values])[0])


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return Table.of_texts("", header, rows).markdown() if rows else "No run yet."


def _about(runs: Sequence[Mapping[str, Any]], timing: Mapping[str, Any]) -> str:
    first = runs[0]
    machines = sorted({run["environment"]["device"] for run in runs})
    torches = sorted({run["environment"]["packages"]["torch"] for run in runs})
    commits = sorted({_commit(run["environment"]["git"] or {}) for run in runs})
    text = (
        f"{len(runs)} runs of {first['steps']:,} steps ({first['epochs']:.3g} epochs) on {', '.join(machines)}, torch "
        f"{', '.join(torches)}, source {', '.join(commits)}; "
        f"{_span(run['side_by_side'] for run in runs)} side by side, {_span(run['seconds'] for run in runs)} s each."
    )
    if timing["rows"]:
        text += f" Milliseconds: a training step alone on {timing['device']}."
    return text


def _span(values: Iterable[float]) -> str:
    found = list(values)
    low, high = f"{min(found):.0f}", f"{max(found):.0f}"
    return low if low == high else f"{low} to {high}"


def _commit(git: Mapping[str, Any]) -> str:
    name = (git.get("commit") or "unknown")[:10]
    return f"{name} with changes" if git.get("changed") else name


def _besides(rows: Rows, kind: str, what: str) -> list[str]:
    found = next((run[kind] for runs in rows.values() for run in runs if run.get(kind)), None)
    if not found:
        return []
    metric = next(iter(rows.values()))[0]["metric"]
    told = ", ".join(f"{name} {format_metric(metric, values[metric])}" for name, values in found.items())
    return [f"{what}, {metric} on the test split: {told}."]


def _command(found: Sequence[Mapping[str, Any]]) -> str:
    seeds = [str(run["seed"]) for run in found]
    several = seeds[0] if len(seeds) == 1 else "{" + ",".join(seeds) + "}"
    return re.sub(r"--train\.seed \d+", f"--train.seed {several}", found[0]["command"])


def tuning_text(summaries: Sequence[Mapping[str, Any]]) -> str:
    runs, lines = [summary for summary in summaries if summary["stage"] == TUNING], []
    for run in sorted(runs, key=lambda run: (run["study"], run["recipe"]["train"]["lr"], run["label"])):
        value = format_metric(run["metric"], run["valid"][run["metric"]], None)
        rate = f"{run['recipe']['train']['lr']:g}"
        lines.append([run["study"], rate, run["title"], f"{run['steps']:,}", run["metric"], value])
    return _markdown(["Study", "lr", "Method", "Steps", "Metric", "valid"], lines)


def mixing_text(summaries: Sequence[Mapping[str, Any]]) -> str:
    """What the share of mixed batches was chosen by: full runs, on the validation split."""
    found: dict[float, dict[str, float]] = {}
    for summary in summaries:
        if summary["study"] == "tiny-imagenet" and summary["stage"] == "first" and summary["seed"] == 0:
            mix = summary["recipe"]["data"]["augmentation"]["mix_probability"]
            found.setdefault(mix, {})[summary["title"]] = summary["valid"][summary["metric"]]
    titles = sorted({title for values in found.values() for title in values})
    lines = []
    for mix, values in sorted(found.items()):
        cells = [format_metric("accuracy", values[title], None) if title in values else NOTHING for title in titles]
        lines.append([f"{mix:g}", *cells])
    return _markdown(["Batches mixed", *titles], lines)


if __name__ == "__main__":
    sys.exit(main())
