"""Makes the study's tables of settings that were tried: learning rates, warm-ups, mixing, and what no table shows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.study.plan import TUNING, goodness, rates_of
from benchmarks.study.rows import Rows, find_broken, find_rows, place, warm_up_steps
from benchmarks.study.studies import STUDIES

from intbmoe.report.numbers import NOTHING, format_metric
from intbmoe.report.tables import Table

Summary = Mapping[str, Any]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return Table.of_texts("", header, rows).markdown() if rows else "No run yet."


def tuning_text(summaries: Sequence[Summary]) -> str:
    runs, lines = [summary for summary in summaries if summary["stage"] == TUNING], []
    for run in sorted(runs, key=lambda run: (run["study"], run["recipe"]["train"]["lr"], run["label"])):
        value = format_metric(run["metric"], run["valid"][run["metric"]], None)
        rate = f"{run['recipe']['train']['lr']:g}"
        lines.append([run["study"], rate, run["title"], f"{run['steps']:,}", run["metric"], value])
    return markdown(["Study", "lr", "Method", "Steps", "Metric", "valid"], lines)


def rates_text(name: str, summaries: Sequence[Summary]) -> str:
    """Tabulates each method at the same rates, first seed."""
    return _tried_text(rates_of(name, summaries), STUDIES[name].labels, STUDIES[STUDIES[name].recipe].rates)


def warmups_text(study: str, found: Mapping[str, Rows], summaries: Sequence[Summary]) -> str:
    """Tabulates first seeds with the study's warm-up and with longer ones, in steps, at the study's learning rate."""
    shown = [run for rows in found[study].values() for run in rows]
    rates = {_rate(run) for run in shown}
    runs = [*shown, *(run for run in summaries if run["study"] == f"{study}-warmup" and _rate(run) in rates)]
    tried: dict[str, dict[float, Summary]] = {}
    for run in runs:
        if run["seed"] == run["recipe"]["seeds"][0]:
            tried.setdefault(run["label"], {})[warm_up_steps(run)] = run
    steps = sorted({steps for runs_at in tried.values() for steps in runs_at})
    return _tried_text(tried, STUDIES[f"{study}-warmup"].labels, steps)


def _tried_text(found: Mapping[str, Mapping[float, Summary]], labels: Sequence[str], values: Sequence[float]) -> str:
    """Tabulates runs by label and value of a setting, on validation; a row's best is bold once all are known."""
    lines = []
    for label in labels:
        if len(runs := found.get(label, {})) > 1:
            cells = {at: format_metric(run["metric"], run["valid"][run["metric"]], None) for at, run in runs.items()}
            if {*values} <= {*runs}:
                best = max(runs, key=lambda at: goodness(runs[at]))
                cells[best] = f"**{cells[best]}**"
            lines.append([next(iter(runs.values()))["title"], *(cells.get(at, NOTHING) for at in values)])
    return markdown(["Method", *(f"{at:g}" for at in values)], lines)


def settings_text(studies: Iterable[str], summaries: Sequence[Summary], earlier: Sequence[Summary]) -> str:
    """Tabulates complete runs at settings that the other tables do not show, including earlier forms of methods."""
    lines = []
    for study in studies:
        runs_shown = [*find_rows(study, summaries)[0].values(), find_broken(study, summaries)]
        shown = {run["digest"] for runs in runs_shown for run in runs}
        runs = [(run, "") for run in summaries if run["digest"] not in shown]
        runs += [(run, ", earlier form") for run in earlier]
        for run, form in sorted(
            runs, key=lambda pair: (_rate(pair[0]), _mixed(pair[0]), place(pair[0]), pair[0]["seed"])
        ):
            if run["study"] == study and run["stage"] != TUNING:
                metric, mixed = run["metric"], _mixed(run)
                cells = [format_metric(name, run["test"][name]) for name in (metric, "loss")]
                valid = format_metric(metric, run["valid"][metric])
                setting = f"{_rate(run):g}" + (f", {mixed:.0%} mixed" if mixed else "")
                setting += f", warm-up {warm_up_steps(run)} steps" if study.endswith("-warmup") else ""
                lines.append([study, setting, run["title"] + form, str(run["seed"]), metric, cells[0], valid, cells[1]])
    return markdown(["Study", "lr", "Method", "Seed", "Metric", "test", "valid", "loss, test"], lines)


def _rate(run: Summary) -> float:
    return run["recipe"]["train"]["lr"]


def _mixed(run: Summary) -> float:
    return run["recipe"]["data"].get("augmentation", {}).get("mix_probability", 0.0)


def mixing_text(summaries: Sequence[Summary]) -> str:
    """Tabulates the runs by which the share of mixed batches was chosen, on the validation split."""
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
    return markdown(["Batches mixed", *titles], lines)
