"""Makes the tables of docs/results/ and README.md from the summaries of the study.

    python -m benchmarks.study.tables                       # writes them into the pages, between their markers
    python -m benchmarks.study.tables --print               # prints them

For each study: equal parameters, equal compute (also for IntBMoE's one-layer form), dense in the mixture's place,
ablations, and the commands of all rows. The runs of a table agree in all settings except the method and the seed. If
there are several such groups, the best on the validation split is shown, and the others are in the table of other
settings. ``claims.py`` says which differences are more than chance.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.study.attention import count_attention
from benchmarks.study.claims import claims_text, name_unsteady, row_spreads, values_text
from benchmarks.study.clock import TIMING
from benchmarks.study.paper import gains
from benchmarks.study.plan import CLASS_TOKEN, RESULTS, TUNED, read_summaries
from benchmarks.study.rows import ORDER, Rows, find_broken, find_rows, rows_at_own_rates
from benchmarks.study.studies import ONE_LAYER, STUDIES
from benchmarks.study.tried import markdown, mixing_text, rates_text, settings_text, tuning_text, warmups_text

from intbmoe.recipes import load_recipe
from intbmoe.recipes.sets import PLACED
from intbmoe.report.numbers import NOTHING, flops_unit, format_metric
from intbmoe.report.tables import Table

HOUSE = Path(__file__).parents[2]
PAGES = (*sorted((HOUSE / "docs" / "results").glob("*.md")), HOUSE / "README.md")
SECOND = {"accuracy": "accuracy5", "loss": "perplexity", "HR@10": "HR@10 new", "HR@5": "HR@1"}
"""The second metric shown for each main metric."""
TITLES = {
    "tiny-imagenet": "Images: Tiny-ImageNet",
    "wikipedia-warmup": "Text: Wikipedia",
    "wikipedia": "Text, with a short warm-up",
    "foursquare": "Places: Foursquare, New York",
    "foursquare-us": "Places: Foursquare, US",
    "checkins": "Places with context: Foursquare, New York",
    "checkins-us": "Places with context: Foursquare, US",
    "checkins-told": "Two tasks, which some methods are told: Foursquare, New York",
    "yelp": "Businesses: Yelp",
    "planted": "A control: journeys with a planted rule",
}
OVERVIEW = {
    "tiny-imagenet": TITLES["tiny-imagenet"],
    "wikipedia-warmup": "Text: Wikipedia, 1,000 steps",
    "wikipedia-long-warmup": "Text: Wikipedia, 4,000 steps",
    "foursquare": TITLES["foursquare"],
    "foursquare-us": TITLES["foursquare-us"],
}
"""The first page's rows, and panels of its picture, by study. On text, those with the better warm-up."""
PARAMETERS, COMPUTE, ABLATIONS = "Equal parameters", "Equal compute", "Ablations"
NARROW, CONTROL = "Equal compute with one layer", "The backbone's FFN in the mixture's place"
BESIDE = {PARAMETERS: "intbmoe", COMPUTE: "intbmoe", NARROW: ONE_LAYER, CONTROL: "dense", ABLATIONS: "intbmoe"}
"""For each table, in order, the row that it repeats from another table."""
USUAL_SEEDS = 3
BASES = {"dense": "over dense", PLACED: "over dense in its place", "intbmoe": "over IntBMoE"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the study's tables from its summaries.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES)
    parser.add_argument("--print", action="store_true", help="print the tables and change no file")
    options = parser.parse_args()
    parts = make_parts(options.results)
    if options.print:
        print("\n\n".join(f"## {name}\n\n{text}" for name, text in parts.items()))
        return 0
    for page in options.pages:
        fill(page, parts)
    return 0


def make_parts(results: Path) -> dict[str, str]:
    """Returns the text between the markers of each name."""
    summaries = count_attention(read_summaries(results))
    earlier = count_attention(read_summaries(results / "earlier"))
    parts = {study: study_text(study, summaries, read_timing(results, STUDIES[study].recipe)) for study in TITLES}
    parts["tuning"] = tuning_text(summaries)
    parts["mixing"] = mixing_text([*summaries, *earlier])
    parts["settings"] = settings_text(TITLES, summaries, earlier)
    parts["overview"] = overview_text(OVERVIEW, summaries)
    found = {study: find_rows(study, summaries)[0] for study in STUDIES}
    warmed = {**found, "wikipedia": found["wikipedia-warmup"]}
    parts["gains"] = gains(warmed, {"dense": "over dense", PLACED: "over dense in its place"}).markdown()
    parts["ablations"] = gains(warmed, {"intbmoe": "here"}).markdown()
    for study in TITLES:
        rows = found[study]
        shown = {label: runs for label, runs in rows.items() if table_of(label) != ABLATIONS or label == ONE_LAYER}
        ablated = {label: runs for label, runs in rows.items() if label.startswith("intbmoe")}
        parts[f"claims-{study}"] = claims_text(shown, BASES, rows)
        parts[f"ablated-{study}"] = claims_text(ablated, {"intbmoe": "over the full method"}, rows)
        if not study.startswith(("tiny-imagenet", "wikipedia")):  # the hit rate tells few methods apart
            parts[f"loss-{study}"] = claims_text(shown, BASES, rows, "loss")
    parts["place"] = claims_text(_place_rows(found), {"dense": "over dense"}, found["tiny-imagenet"])
    for study in ("tiny-imagenet", "wikipedia"):
        longer = {f"{label} longer": _retitled(runs) for label, runs in found[f"{study}-time"].items()}
        own = {label: runs for label, runs in found[study].items() if label in ("intbmoe", *found[f"{study}-time"])}
        rows = {**own, **longer} if longer else {}
        parts[f"time-{study}"] = claims_text(rows, {"intbmoe": "over IntBMoE"}, found[study])
        swept = {label: runs for label, runs in found[study].items() if label == "intbmoe"} | found[f"{study}-sweep"]
        parts[f"sweep-{study}"] = claims_text(swept, {"intbmoe": "over the default"}, found[study])
        parts[f"rates-{study}"] = rates_text(f"{study}-rates", summaries)
        own = rows_at_own_rates(f"{study}-rates", found, summaries)
        parts[f"own-{study}"] = claims_text(own, BASES, found[study])
        parts[f"warmups-{study}"] = warmups_text(study, found, summaries)
    for study in ("wikipedia-long", "wikipedia-long-warmup", "tiny-imagenet-mixed"):
        parts[study] = claims_text(found[study], BASES, {})
    parts["foursquare-warmup"] = claims_text(found["foursquare-warmup"], BASES, {}, "loss")
    # One seed each, so the spread between seeds is that of the trainings of 4,000 steps.
    long = ("wikipedia-long", "wikipedia-long-warmup")
    others = {f"{label}, {other}": runs for other in long for label, runs in found[other].items()}
    parts["wikipedia-whole"] = claims_text(found["wikipedia-whole"], BASES, others)
    return parts


def _place_rows(found: Mapping[str, Rows]) -> Rows:
    """Returns dense, dense with each part of a mixture's place separately, and with both."""
    images, start = found["tiny-imagenet"], found["tiny-imagenet-start"].get(PLACED)
    started = {"dense-start": _retitled(start, "Dense, a mixture's initialisation only")} if start else {}
    rows = {label: images[label] for label in ("dense", CLASS_TOKEN) if label in images}
    return {**rows, **started, **{label: images[label] for label in (PLACED, "intbmoe") if label in images}}


def _retitled(runs: Sequence[Mapping[str, Any]], title: str | None = None) -> list[dict[str, Any]]:
    return [{**run, "title": title or f"{run['title']}, {run['steps']:,} steps"} for run in runs]


def fill(page: Path, parts: Mapping[str, str]) -> None:
    """Replaces the text between the page's markers."""
    text = page.read_text(encoding="utf-8")
    for name in re.findall("<!-- study:(.*?) -->", text):
        if name not in parts:
            raise ValueError(f"{page} has a marker {name!r}: there is no such table, there are {', '.join(parts)}")
        text = put(text, name, parts[name], page)
    page.write_text(text, encoding="utf-8")


def put(text: str, name: str, part: str, where: Path) -> str:
    """Returns ``text`` with the part between the markers of ``name`` replaced."""
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
    values = {
        (split, metric): values_text(rows, split, metric)
        for split, metric in _shown_metrics(next(iter(rows.values()))[0]["metric"])
    }
    parts = [_about([run for runs in rows.values() for run in runs], timing)]
    if left_out:
        parts.append(f"{left_out} runs with other settings are [below](#other-settings).")
    parts += [
        f"Left out: {run['title']}, seed {run['seed']}, which broke down (test loss {run['test']['loss']:.1f})."
        for run in find_broken(study, summaries)
    ]
    for title, beside in BESIDE.items():
        if any(table_of(label) == title for label in rows):
            shown = {label: found for label, found in rows.items() if table_of(label) == title or label == beside}
            parts.append(f"**{title}**\n\n{table(shown, timing['rows'], values)}")
    parts += _besides(rows, "floors", "Predictors without learning")
    parts += _besides(rows, "ceilings", "Best possible")
    parts.append(_spread(rows))
    commands = "\n".join(command for found in rows.values() for command in _commands(found))
    parts.append(f"<details><summary>Commands</summary>\n\n```\n{commands}\n```\n\n</details>")
    return "\n\n".join(parts)


def table_of(label: str) -> str:
    """Returns the table that a variant belongs to; IntBMoE also appears in others (``BESIDE``)."""
    if label in (PLACED, CLASS_TOKEN):
        return CONTROL
    if label.endswith("-narrow"):
        return NARROW
    if label.endswith(("-wide", "-more")):
        return COMPUTE
    return ABLATIONS if label.startswith("intbmoe-") else PARAMETERS


def overview_text(titles: Mapping[str, str], summaries: Sequence[Mapping[str, Any]]) -> str:
    """Makes a row per study that has IntBMoE: dense, dense in its place, the best other method by validation, IntBMoE,
    and dense with equal compute."""
    dense, lines = ["Dense", "Dense in the mixture's place"], []
    header = ["Test", *dense, "Best other method", "IntBMoE", "Dense SwiGLU, IntBMoE's FLOPs"]
    for study, title in titles.items():
        rows, _ = find_rows(study, summaries)
        if "intbmoe" not in rows:
            continue
        one = rows["intbmoe"][0]
        metric, sign = one["metric"], 1 if one["higher_is_better"] else -1
        # Not with fewer seeds than IntBMoE or than most rows: the best of many single runs would often be the luckiest.
        seeds = min(len(rows["intbmoe"]), USUAL_SEEDS)
        others = [label for label in rows if label in ORDER and label not in TUNED and len(rows[label]) >= seeds]
        best = max(others, key=lambda label: sign * _mean(rows[label], "valid", metric), default=None)
        values = values_text(rows, "test", metric)
        other = f"{rows[best][0]['title']} {values[best]}" if best else NOTHING
        plain, placed, wide = (values.get(label, NOTHING) for label in ("dense", PLACED, "swiglu-wide"))
        lines.append([f"{title}, {metric}", plain, placed, other, values["intbmoe"], wide])
    return markdown(header, lines)


def _shown_metrics(metric: str) -> list[tuple[str, str]]:
    second = SECOND.get(metric)
    return [("test", metric), ("valid", metric), *([("test", second)] if second else [])]


def _spread(rows: Rows) -> str:
    metric = next(iter(rows.values()))[0]["metric"]
    pooled = next((spread for spread in row_spreads(rows, metric).values() if spread and not spread.own), None)
    if pooled is None:
        return "With one seed each, there is no interval."
    return (
        "± is the 95 % interval of the mean over the seeds. Three seeds are too few to estimate a method's own spread, "
        "so the spread is pooled over all rows of this study: the standard deviation of a single run on the test split "
        f"is {format_metric(metric, pooled.deviation)}, with {pooled.freedom} degrees of freedom (Student's t). Rows "
        "with one seed have an interval too, which assumes that their spread is like that of the others."
        f"{name_unsteady(rows, metric)}"
    )


def table(rows: Rows, timing: Mapping[str, Any], values: Mapping[tuple[str, str], Mapping[str, str]]) -> str:
    """Makes one row per variant, with the best mean in bold unless it has a single seed: one run proves nothing.

    ``values`` are texts by (split, metric) and label; their intervals come from all rows of a study.
    """
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
    header += [f"FLOPs, one example ({letter})", f"in a batch ({letter})", "ms per step", "GiB", "Seeds"]
    sign = 1 if first["higher_is_better"] else -1
    best = max(rows, key=lambda label: sign * _mean(rows[label], "test", metric))
    lines = []
    for label, found in rows.items():
        one, measured = found[0], timing.get(label, {})
        about = "~" if one["active_experts"] is not None else ""
        cells = [one["title"], *(values[shown][label] for shown in _shown_metrics(metric))]
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


def _about(runs: Sequence[Mapping[str, Any]], timing: Mapping[str, Any]) -> str:
    first = runs[0]
    machines = sorted({run["environment"]["device"] for run in runs})
    torches = sorted({run["environment"]["packages"]["torch"] for run in runs})
    commits = sorted({_commit(run["environment"]["git"] or {}) for run in runs})
    text = (
        f"{len(runs)} runs of {first['steps']:,} steps ({first['epochs']:.3g} epochs) on {', '.join(machines)}, torch "
        f"{', '.join(torches)}, source {', '.join(commits)}; "
        f"{_span(run['side_by_side'] for run in runs)} at a time, {_span(run['seconds'] for run in runs)} s each."
    )
    if timing["rows"]:
        text += f" Milliseconds are for a training step run alone on {timing['device']}."
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


def _commands(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns a row's commands: one, or more if steps were compiled or captured for some of its seeds only.

    These settings are not in the stored commands because a plan leaves them open; the stored recipes have them. Nor is
    the warm-up if the recipe had another one when the command was made.
    """
    found, groups = list(found), {}
    usual = load_recipe(STUDIES[found[0]["study"]].recipe).train
    for run in found:
        own = run["recipe"]["train"]
        names = [name for name in ("warmup", "compile", "capture") if own[name] != getattr(usual, name)]
        added = "".join(f" --train.{name} {own[name]}" for name in names if f"--train.{name} " not in run["command"])
        groups.setdefault(added, []).append(run)
    return [_command(runs) + added for added, runs in groups.items()]


def _command(found: Sequence[Mapping[str, Any]]) -> str:
    seeds = [str(run["seed"]) for run in found]
    several = seeds[0] if len(seeds) == 1 else "{" + ",".join(seeds) + "}"
    return re.sub(r"--train\.seed \d+", f"--train.seed {several}", found[0]["command"])


if __name__ == "__main__":
    sys.exit(main())
