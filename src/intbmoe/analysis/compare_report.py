"""What ``intbmoe compare`` leaves: a table on the screen, CSV, JSON, Markdown and a picture beside the runs."""

import csv
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from intbmoe.analysis.compare import CompareOptions, Job, Plan, Summary, make_plan, summarise
from intbmoe.analysis.compare_jobs import Failure, choose_jobs, run_jobs
from intbmoe.analysis.report.trace import sort_out
from intbmoe.recipes.sets import PLACED
from intbmoe.tasks import find_task, make_task
from intbmoe.tasks.recipe import Recipe

Floors = Mapping[str, Mapping[str, float]]
NOTHING = "–"
STEMS = {"K": "blocks", "k": "top_k", "E": "experts", "L": "layers"}
"""Names of files for sets whose own would differ in case alone."""
LONGEST_STEM = 60
COLUMNS = (
    *("participation", "execution", "materialization"),
    *("params", "activated", "flops", "flops_executed", "active_experts", "seconds"),
)


def compare(recipe: Recipe, options: CompareOptions, settings: Sequence[str] = ()) -> int:
    """Plan, train, summarise, report; returns the exit status.

    ``settings`` are the recipe and its settings as given on the command line, for the commands shown at the end.
    """
    started = time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    plan = make_plan(recipe, options)
    waiting = [job for job in plan.jobs if not job.run.finished]
    jobs = choose_jobs(plan, len(waiting), options.jobs)
    _announce(console, plan, waiting, jobs, options)
    try:
        failures = run_jobs(plan, waiting, jobs, console) if waiting else []
    except KeyboardInterrupt:
        console.print("Stopped; what was reached is saved. The same command goes on from there.")
        return 130
    sound, left_out = sort_out(plan.jobs)
    summaries = summarise(sound)
    if summaries:
        title = f"{recipe.name}: {find_task(recipe.task).metric} on the test split"
        console.print(make_table(summaries, title))
        for note in notes(summaries):
            console.print(f"  {note}", soft_wrap=True)
        stem = file_stem(options.methods)
        written = write_files(plan.folder, stem, summaries, title)
        floors = make_task(recipe).floors()  # after the table is safe: on large data they take their time
        if floors:
            console.print(floor_table(floors))
            written = write_files(plan.folder, stem, summaries, title, floors)
        # Imported here because the page asks this file how numbers are written.
        from intbmoe.analysis.report.comparison_report import Comparison, write_comparison_report

        chosen = ["--methods", options.methods, "--seeds", str(options.seeds)]
        command = shlex.join(["intbmoe", "compare", *_with_root(plan, options, settings), *chosen])
        comparison = Comparison(plan, sound, summaries, floors, left_out, options.methods, command)
        written.append(write_comparison_report(comparison))
        console.print(f"\nSaved: {', '.join(str(path) for path in written)}", markup=False, soft_wrap=True)
    damaged = _tell_damaged(console, plan, left_out)
    _tell_failures(console, plan, failures)
    if not plan.jobs:
        console.print(f"Nothing is left of --methods {options.methods} to compare: choose others.", markup=False)
    console.print(f"Done in {_duration(time.monotonic() - started)}.")
    if summaries and not failures:
        console.print(f"\nNext:\n{what_next(plan, options, settings)}", markup=False, soft_wrap=True)
    return 1 if failures or damaged or not summaries else 0


def _announce(console: Console, plan: Plan, waiting: Sequence[Job], jobs: int, options: CompareOptions) -> None:
    variants = len({job.variant.label for job in plan.jobs})
    finished = len(plan.jobs) - len(waiting)
    text = f"[bold]{plan.recipe.name}[/]: {variants} variants × {options.seeds} seed{'s' if options.seeds > 1 else ''}"
    if finished:
        text += f", {finished} of {len(plan.jobs)} runs already finished"
    if waiting:
        text += f"; {len(waiting)} to train, {jobs} at a time"
    console.print(text, soft_wrap=True)
    for title, reason in plan.refused.items():
        console.print(f"left out: {title}: {reason}", markup=False, soft_wrap=True)


def _tell_failures(console: Console, plan: Plan, failures: Sequence[Failure]) -> None:
    for failure in failures:
        console.print(f"\n[bold red]FAILED[/] {failure.title}; the end of {failure.log}:", soft_wrap=True)
        for line in failure.tail.splitlines():
            console.print(f"  | {line}", markup=False, soft_wrap=True)
    if failures:
        console.print(f"\n{len(failures)} of {len(plan.jobs)} runs failed and are left out of the table.")


def _tell_damaged(console: Console, plan: Plan, left_out: Sequence[Mapping[str, str]]) -> int:
    """Runs that came to their end and cannot be read back; returns how many."""
    finished = {str(job.run.path) for job in plan.jobs if job.run.finished}
    damaged = [one for one in left_out if one["path"] in finished]
    for one in damaged:
        console.print(f"left out: {one['title']} ({one['path']}): {one['reason']}", markup=False, soft_wrap=True)
    return len(damaged)


def make_table(summaries: Sequence[Summary], title: str) -> Table:
    """One row a variant, the best in bold."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    header, rows = cells(summaries)
    for index, name in enumerate(header):
        heading = name.replace(" (", "\n(")  # two lines, so that the table fits into 80 columns
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True, vertical="bottom")
    best = best_row(summaries)
    for index, row in enumerate(rows):
        table.add_row(*row, style="bold" if index == best else None)
    return table


def floor_table(floors: Floors) -> Table:
    """What needs no learning, a row each."""
    table = Table(
        title="What needs no learning", title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    header, rows = floor_cells(floors)
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def floor_cells(floors: Floors) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The header and the rows of the floors, as text."""
    metrics = list(dict.fromkeys(metric for values in floors.values() for metric in values))
    rows = [
        (title, *(format_metric(metric, values[metric], None) if metric in values else NOTHING for metric in metrics))
        for title, values in floors.items()
    ]
    return ("Floor", *metrics), rows


def cells(summaries: Sequence[Summary]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The header and the rows, as text."""
    unit, letter = (1e9, "G") if max(row.counts.flops for row in summaries) >= 1e9 else (1e6, "M")
    header = ("Method", summaries[0].metric, "Params (M)", "Activated (M)", f"FLOPs ({letter})", "Seconds")
    rows = []
    for row in summaries:
        assumed = "~" if row.active is not None else ""
        rows.append(
            (
                row.title,
                NOTHING if row.mean is None else format_metric(row.metric, row.mean, row.interval),
                f"{row.counts.params / 1e6:.3f}",
                f"{assumed}{row.counts.activated / 1e6:.3f}",
                f"{assumed}{row.counts.flops / unit:.3f}",
                NOTHING if row.seconds is None else f"{row.seconds:.1f}",
            )
        )
    return header, rows


def best_row(summaries: Sequence[Summary]) -> int:
    """Where the best mean stands."""
    trained = [index for index, row in enumerate(summaries) if row.mean is not None]
    sign = 1 if summaries[trained[0]].results[0]["higher_is_better"] else -1
    return max(trained, key=lambda index: sign * summaries[index].mean)


def format_metric(metric: str, value: float, interval: float | None) -> str:
    """Accuracies in per cent, perplexities with two digits, all else with four; with ± where there is an interval."""
    factor, digits, unit = 1, 4, ""
    if metric.startswith("accuracy"):
        factor, digits, unit = 100, 2, " %"
    elif metric == "perplexity":
        digits = 2
    text = f"{value * factor:.{digits}f}"
    return f"{text}{unit}" if interval is None else f"{text} ± {interval * factor:.{digits}f}{unit}"


def notes(summaries: Sequence[Summary]) -> list[str]:
    """What a reader of the table must know."""
    seeds = {len(row.seeds) for row in summaries if row.values}
    told = []
    if min(seeds) > 1:
        told.append(f"±: 95 % interval of the mean over {_list(sorted(seeds))} seeds, by Student's t.")
    elif max(seeds) > 1:
        told.append("±: 95 % interval of the mean over the seeds, by Student's t; rows without it have one seed.")
    else:
        told.append("One seed, so no interval: differences of this size may be chance (--seeds 3 gives intervals).")
    told.append("FLOPs: one example, without attention's score and value products. Seconds: training, one run.")
    active = [f"{row.title} {row.active:.2f}" for row in summaries if row.active is not None]
    if active:
        told.append(f"~: at the experts a test token had on average, which the router decides: {', '.join(active)}.")
    return told


def _list(values: Sequence[int]) -> str:
    return " or ".join(str(value) for value in values)


def file_stem(methods: str) -> str:
    """The name of the result files for a choice of ``--methods``."""
    names = [STEMS.get(name.strip(), name.strip()) for name in methods.split(",") if name.strip()]
    return "+".join(dict.fromkeys(names))[:LONGEST_STEM]


def write_files(
    folder: Path, stem: str, summaries: Sequence[Summary], title: str, floors: Floors | None = None
) -> list[Path]:
    """CSV, JSON, Markdown and, with matplotlib, the picture; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.{suffix}" for suffix in ("csv", "json", "md")]
    records = [row.as_dict() for row in summaries]
    with open(paths[0], "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("label", "title", "method", "metric", "mean", "interval_95", "seeds", "values", *COLUMNS))
        for record in records:
            several = (" ".join(map(str, record[key])) for key in ("seeds", "values"))
            single = (record[key] for key in ("label", "title", "method", "metric", "mean", "interval_95"))
            writer.writerow((*single, *several, *(record[column] for column in COLUMNS)))
    paths[1].write_text(json.dumps(records, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    paths[2].write_text(markdown(summaries, title, floors), encoding="utf-8")
    if floors:
        paths.append(folder / f"{stem}.floors.json")
        paths[-1].write_text(json.dumps(floors, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if find_spec("matplotlib") is not None:
        from intbmoe.analysis.compare_picture import draw

        paths.append(draw(summaries, title, folder / f"{stem}.png"))
    return paths


def markdown(summaries: Sequence[Summary], title: str, floors: Floors | None = None) -> str:
    """The table, what needs no learning, and notes, as Markdown."""
    header, rows = cells(summaries)
    best = best_row(summaries)
    lines = [f"**{title}**", "", _line(header), _line([":--", *["--:"] * (len(header) - 1)])]
    lines += [_line([f"**{cell}**" for cell in row] if index == best else row) for index, row in enumerate(rows)]
    if floors:
        header, rows = floor_cells(floors)
        lines += ["", _line(header), _line([":--", *["--:"] * (len(header) - 1)]), *map(_line, rows)]
    lines += [line for note in notes(summaries) for line in ("", note)]
    return "\n".join(lines) + "\n"


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def what_next(plan: Plan, options: CompareOptions, settings: Sequence[str]) -> str:
    """Commands that lead on from here; with the same settings they find the finished runs again."""
    program = shlex.quote("intbmoe" if shutil.which("intbmoe") else os.path.relpath(sys.argv[0]))
    recipe = shlex.join(_with_root(plan, options, settings))
    last = plan.jobs[-1]
    # Options belong to one method, the recipe's where none is named.
    named = any(setting.startswith(("--moe.name", "--moe.options.")) for setting in settings)
    own = f"{'' if named else f'--moe.name {last.variant.moe.name} '}--moe.experts 32 --moe.label more-experts"
    more = 3 if options.seeds < 3 else options.seeds + 2
    steps = [
        (f"compare {recipe} --methods {shlex.quote(options.methods)} --seeds {more}", "more seeds, for intervals"),
        (f"compare {recipe} --methods ablations", "IntBMoE with one part left out at a time"),
        (f"train {recipe} {own}", "a run of your own"),
        (f"eval {shlex.quote(str(last.run.path))}", "the metrics of a trained model"),
        ("recipes", "which experiments there are"),
    ]
    labels = {job.variant.label for job in plan.jobs}
    if "dense" in labels and PLACED not in labels and find_task(plan.recipe.task).dense_in_place:
        beside = shlex.quote(f"{options.methods},place")
        about = "dense with all that a mixture gets besides its experts"
        steps.insert(1, (f"compare {recipe} --methods {beside} --seeds {options.seeds}", about))
    return "\n".join(f"  {program} {command}   # {purpose}" for command, purpose in steps)


def _with_root(plan: Plan, options: CompareOptions, settings: Sequence[str]) -> list[str]:
    """The recipe and its settings, as given."""
    root = [] if options.root == CompareOptions.root else ["--root", str(options.root)]
    return [*(settings or [plan.recipe.name]), *root]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
