"""``intbmoe compare``: plan, train, summarise, report."""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console

from intbmoe.checks import counted
from intbmoe.compare.jobs import Failure, choose_jobs, run_jobs
from intbmoe.compare.page import Comparison, write_comparison_page
from intbmoe.compare.plan import CompareOptions, Job, Plan, choose_baseline, make_plan, sort_out
from intbmoe.compare.summary import add_differences, make_rows, summarise
from intbmoe.compare.table import brief_table, floors_table, write_files
from intbmoe.compare.tuning import DIVERGED, TUNABLE, choose, plan_trials, tuning_table
from intbmoe.recipes.sets import PLACED, Options
from intbmoe.registry import plugin_options
from intbmoe.report.tables import Table
from intbmoe.tasks import find_task, make_task
from intbmoe.tasks.recipe import Recipe


def compare(recipe: Recipe, options: CompareOptions, settings: Sequence[str] = (), own: Options | None = None) -> int:
    """Plan, train, summarise and report; return the exit status.

    ``settings`` are the recipe and its settings as given on the command line, for the commands shown at the end;
    ``own`` are options of methods other than the recipe's.
    """
    own = own or {}
    started = time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    plan = make_plan(make_task(recipe).resolve(), options, own)
    baseline = choose_baseline(plan.jobs, options.baseline)
    tuning: dict[str, Any] | None = None
    failures: list[Failure] = []
    try:
        if options.tune and plan.jobs:
            plan, tuning, failures = _tune(console, plan, options)
            if baseline not in {job.variant.label for job in plan.jobs}:  # none of its runs could be used
                baseline = choose_baseline(plan.jobs, None)
        failures += _train(console, plan, options)
    except KeyboardInterrupt:
        console.print("Stopped; progress so far is saved. The same command resumes from there.")
        return 130
    sound, left_out = sort_out(plan.jobs)
    rows = make_rows(summarise(sound))
    if rows:
        add_differences(rows, sound, baseline)
        settings_of = {row["label"]: row["chosen"] for row in tuning["rows"]} if tuning else {}
        rows = [row | ({"settings": settings_of[row["label"]]} if tuning else {}) for row in rows]
        chosen = [*_own_words(own, options), "--methods", options.methods, "--seeds", str(options.seeds)]
        command = shlex.join(["intbmoe", "compare", *_with_root(plan, options, settings), *chosen])
        _report(console, Comparison(plan, sound, rows, {}, left_out, options.methods, command, tuning=tuning))
    damaged = _tell_damaged(console, plan, left_out)
    _tell_failures(console, plan, failures)
    if not plan.jobs:
        told = "no method can be trained with any value of --tune" if tuning else "choose others"
        console.print(f"--methods {options.methods} leaves nothing to compare: {told}.", markup=False)
    console.print(f"Done in {timedelta(seconds=round(time.monotonic() - started))}.")
    if rows and not failures:
        console.print(f"\nNext:\n{what_next(plan, options, settings, own)}", markup=False, soft_wrap=True)
    return 1 if failures or damaged or not rows else 0


def _report(console: Console, comparison: Comparison) -> None:
    plan, rows = comparison.plan, comparison.rows
    task = find_task(plan.recipe.task)
    title, stem = f"{plan.recipe.name}: {task.metric} on the test split", comparison.stem
    _show(console, brief_table(rows, title, task.higher_is_better))
    tuning = tuning_table(comparison.tuning) if comparison.tuning else None
    written = write_files(plan.folder, stem, rows, title, task.higher_is_better, tuning=tuning)
    asked = make_task(plan.recipe)
    floors = asked.floors()  # after the table is written: on large data they take a while
    if floors:
        console.print(floors_table(floors, "Without learning").terminal(console.width))
        written = write_files(plan.folder, stem, rows, title, task.higher_is_better, floors, tuning)
    ceilings = asked.ceilings()
    if ceilings:
        console.print(floors_table(ceilings, "The best possible score", "Ceiling").terminal(console.width))
    written.append(write_comparison_page(replace(comparison, floors=floors, ceilings=ceilings)))
    console.print("\nSaved:", *(f"\n  {path}" for path in written), sep="", markup=False, soft_wrap=True)


def _show(console: Console, table: Table) -> None:
    console.print(table.terminal(console.width))
    for note in table.notes:
        console.print(note, soft_wrap=not console.is_terminal)


def _train(console: Console, plan: Plan, options: CompareOptions, about: str | None = None) -> list[Failure]:
    """Train what is not finished, and say so; ``about`` describes the runs if they are not those of the comparison."""
    waiting = [job for job in plan.jobs if not job.run.finished]
    jobs = choose_jobs(plan, len(waiting), options.jobs)
    variants, seeds = len({job.variant.label for job in plan.jobs}), f"seed{'s' if options.seeds > 1 else ''}"
    text = f"[bold]{plan.recipe.name}[/]: {about or f'{variants} variants × {options.seeds} {seeds}'}"
    if len(waiting) < len(plan.jobs):
        text += f", {len(plan.jobs) - len(waiting)} of {len(plan.jobs)} runs already finished"
    if waiting:
        text += f"; {len(waiting)} to train, {jobs} at a time"
    console.print(text, soft_wrap=True)
    for title, reason in plan.refused.items() if about is None else ():
        console.print(f"left out: {title}: {reason}", markup=False, soft_wrap=True)
    return run_jobs(plan, waiting, jobs, console) if waiting else []


def _tune(console: Console, plan: Plan, options: CompareOptions) -> tuple[Plan, dict[str, Any], list[Failure]]:
    """Train all combinations; return the plan with each method's best, how it was found, and what failed."""
    trials = plan_trials(plan, options.tune, options.root)
    first = replace(plan, jobs=[trial.job for trial in trials])
    failures = _train(console, first, options, f"tuning, {counted(len(trials), 'run')} with the first seed")
    sound, left_out = sort_out(first.jobs)
    plan, found = choose(plan, trials, sound, options.root)
    _show(console, tuning_table(found))
    lost = {row["label"] for row in found["rows"] if row["chosen"] is None}
    label_of = {trial.job.title: trial.job.variant.label for trial in trials}
    serious = [one for one in failures if DIVERGED not in one.tail or label_of[one.title] in lost]
    ended = {job.title for job in first.jobs if job.run.finished}
    damaged = [one for one in left_out if one["title"] in ended]
    return plan, found, serious + [Failure(one["title"], Path(one["path"]), one["reason"]) for one in damaged]


def _tell_failures(console: Console, plan: Plan, failures: Sequence[Failure]) -> None:
    for failure in failures:
        console.print(f"\n[bold red]FAILED[/] {failure.title}; the end of {failure.log}:", soft_wrap=True)
        for line in failure.tail.splitlines():
            console.print(f"  | {line}", markup=False, soft_wrap=True)
    if failures:
        console.print(f"\n{counted(len(failures), 'run')} failed.")


def _tell_damaged(console: Console, plan: Plan, left_out: Sequence[Mapping[str, str]]) -> int:
    """Print the runs that finished but cannot be read back; return how many."""
    finished = {str(job.run.path) for job in plan.jobs if job.run.finished}
    damaged = [one for one in left_out if one["path"] in finished]
    for one in damaged:
        console.print(f"left out: {one['title']} ({one['path']}): {one['reason']}", markup=False, soft_wrap=True)
    return len(damaged)


def _own_words(own: Options, options: CompareOptions) -> list[str]:
    words = ["--tune", *options.tune] if options.tune else []
    words += ["--baseline", options.baseline] if options.baseline else []
    for method, given in own.items():
        for option, value in given.items():
            values = value if isinstance(value, list) else [value]
            words += [f"--options.{method}.{option.replace('_', '-')}", *map(str, values)]
    return words


def what_next(plan: Plan, options: CompareOptions, settings: Sequence[str], own: Options | None = None) -> str:
    program = "intbmoe" if shutil.which("intbmoe") else _own_program()
    recipe = shlex.join(_with_root(plan, options, settings))
    same = shlex.join([*_with_root(plan, options, settings), *_own_words(own or {}, options)])
    tune = f" {shlex.join(['--tune', *options.tune])}" if options.tune else ""
    last = plan.jobs[-1]
    # Options belong to one method: the recipe's, if none is named.
    named = any(setting.startswith(("--moe.name", "--moe.options.")) for setting in settings)
    own = f"{'' if named else f'--moe.name {last.variant.moe.name} '}--moe.experts 32 --moe.label more-experts"
    more = 3 if options.seeds < 3 else options.seeds + 2
    steps = [
        (f"compare {same} --methods {shlex.quote(options.methods)} --seeds {more}", "more seeds, for intervals"),
        (f"compare {recipe}{tune} --methods ablations", "IntBMoE with one part left out at a time"),
        (f"train {recipe} {_chosen_words(plan, last)}{own}", "a run of your own"),
        (f"eval {shlex.quote(str(last.run.path))}", "the metrics of a trained model"),
        (f"analyse {shlex.quote(str(last.run.path))}", "what its experts do and where its tokens go"),
        ("recipes", "which experiments there are"),
    ]
    labels = {job.variant.label for job in plan.jobs}
    if "dense" in labels and PLACED not in labels and find_task(plan.recipe.task).dense_in_place:
        beside = shlex.quote(f"{options.methods},place")
        about = "dense with everything that a mixture gets besides its experts"
        steps.insert(1, (f"compare {same} --methods {beside} --seeds {options.seeds}", about))
    plugins = "".join(f" {word}" for word in map(shlex.quote, plugin_options()))
    return "\n".join(f"  {program} {command}{plugins}   # {purpose}" for command, purpose in steps)


def _chosen_words(plan: Plan, job: Job) -> str:
    """Return the options that give a run the settings chosen for this one by ``--tune``."""
    names = [name.removeprefix("train.") for name in TUNABLE]
    values = {name: getattr(job.recipe.train, name) for name in names}
    changed = {name: value for name, value in values.items() if value != getattr(plan.recipe.train, name)}
    return "".join(f"--train.{name.replace('_', '-')} {value} " for name, value in changed.items())


def _own_program() -> str:
    """Return how this process was started, if intbmoe is not on the path."""
    path = Path(sys.argv[0])
    as_module = path.parent.name == "intbmoe" and path.name in ("__main__.py", "cli.py")
    return "python -m intbmoe" if as_module else shlex.quote(os.path.relpath(path))


def _with_root(plan: Plan, options: CompareOptions, settings: Sequence[str]) -> list[str]:
    root = [] if options.root == CompareOptions.root else ["--root", str(options.root)]
    return [*(settings or [plan.recipe.name]), *root]
