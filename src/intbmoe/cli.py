"""The command line. A new command is one function here and one entry in ``COMMANDS``.

``train`` and ``compare`` take a recipe and any of its settings as options, so their parser depends on the recipe: they
get their arguments unparsed (``overrides.py``).
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from intbmoe.checks import did_you_mean
from intbmoe.registry import Method, find_method, list_methods

Unparsed = tyro.conf.Positional[list[str]]


@dataclass(frozen=True)
class TrainOptions:
    """What ``train`` takes beside the recipe's settings."""

    root: Path = Path("runs")
    """Where runs are kept."""
    quiet: bool = False
    """No progress, only where the run is."""


def train(args: Unparsed) -> None:
    """Train one model: intbmoe train RECIPE [--moe.name switch --train.epochs 3 …].

    Every setting of the recipe is an option. The same command goes on with a run that was interrupted.
    """
    with _explained(KeyError, ValueError, OSError, ModuleNotFoundError):
        from intbmoe.overrides import parse_recipe

        recipe, options = parse_recipe("train", TrainOptions(), args, _first_line(train))
        from intbmoe.tasks import DataError
        from intbmoe.train import TrainingError
        from intbmoe.train import train as run_training
    with _explained(TrainingError, DataError):
        run = run_training(recipe, root=options.root, quiet=options.quiet)
        if int(os.environ.get("RANK", "0")) == 0:
            test = "  ".join(f"{name} {value:.4f}" for name, value in run.result["test"].items())
            _say(f"finished: {run.path}\ntest: {test}\nevaluate it again: intbmoe eval {run.path}")


def evaluate(
    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]],
    split: Literal["test", "valid"] = "test",
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Evaluate a finished run's model.

    Args:
        run: A run directory: runs/<recipe>/<method>/<seed>.
        split: Which examples.
        as_json: Print JSON with all digits.
    """
    with _explained(ModuleNotFoundError):
        from intbmoe.tasks import DataError
        from intbmoe.train import TrainingError
        from intbmoe.train import evaluate as evaluate_run
    with _explained(TrainingError, DataError):
        metrics = evaluate_run(run, split)
    if as_json:
        _say(json.dumps(metrics, indent=2))
    else:
        _say("\n".join(f"{split} {name}: {value:.4f}" for name, value in metrics.items()))


def compare(args: Unparsed) -> None:
    """Compare methods: intbmoe compare RECIPE --methods all --seeds 3.

    Trains what is not finished, several runs side by side, and prints accuracy, parameters and FLOPs. --methods takes
    methods and sets (all, ablations, K, k, E, L) with commas between them. Every setting of the recipe is an option.
    """
    with _explained(KeyError, ValueError, OSError, ModuleNotFoundError):
        from intbmoe.analysis.compare import CompareOptions
        from intbmoe.analysis.compare_report import compare as run_comparison
        from intbmoe.overrides import parse_recipe
        from intbmoe.tasks import DataError
        from intbmoe.train import TrainingError

        recipe, options = parse_recipe("compare", CompareOptions(), args, _first_line(compare))
        if recipe.moe.label is not None:
            raise ValueError("--moe.label is the comparison's own choice: give it a name with --name")
    with _explained(TrainingError, DataError, ValueError, KeyError):
        status = run_comparison(recipe, options, _without(args, "--methods", "--seeds", "--jobs", "--root"))
    sys.exit(status)


def analyse(
    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]],
    split: Literal["valid", "test"] = "valid",
    examples: int = 1000,
    redraw: bool = False,
) -> None:
    """Look inside a finished run's model: what its experts do, where its tokens go; data and pictures in RUN/analysis.

    Args:
        run: A run directory: runs/<recipe>/<method>/<seed>.
        split: Which examples.
        examples: At most so many of them, evenly spread; more make small differences surer.
        redraw: Compute nothing, draw the pictures again from the data of an earlier analysis.
    """
    with _explained(ModuleNotFoundError):
        from intbmoe.analysis import analyse as analysis
        from intbmoe.tasks import DataError
        from intbmoe.train import TrainingError
    with _explained(TrainingError, DataError, ValueError, ModuleNotFoundError):
        if redraw:
            _say("\n".join(str(path) for path in analysis.redraw(run / analysis.FOLDER)))
            return
        with Console(stderr=True).status("") as status:
            folder = analysis.analyse(run, analysis.AnalyseOptions(split, examples), status.update)
    for part, reason in analysis.read_summary(folder)["left_out"].items():
        _say(f"left out: {part}: {reason}")
    _say(f"analysed: {folder}")


def prepare(
    name: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="NAME")]],
    source: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="SOURCE")]],
    target: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="TARGET")]],
    skip_bad: bool = False,
) -> None:
    """Make large data ready for training, once: intbmoe prepare NAME SOURCE TARGET.

    Can be interrupted: the same command goes on from what is finished. TARGET is then the recipe's --data.path.

    Args:
        name: minipile, wikipedia or inttravel.
        source: The folder with the original files.
        target: The folder to write.
        skip_bad: Count malformed rows and leave them out; without it the first one stops the preparation.
    """
    with _explained(ModuleNotFoundError):
        from intbmoe.tasks import DataError
        from intbmoe.tasks.preparation import PREPARATIONS
        from intbmoe.train.progress import PreparationProgress
    if name not in PREPARATIONS:
        sys.exit(f"intbmoe: no data to prepare is called {name!r}: {did_you_mean(name, PREPARATIONS)}")
    try:
        with _explained(DataError, OSError, ModuleNotFoundError), PreparationProgress() as progress:
            counted = PREPARATIONS[name].run(source, target, skip_bad=skip_bad, progress=progress.show)
    except KeyboardInterrupt:
        sys.exit(f"stopped: intbmoe prepare {name} {source} {target} goes on from what is finished")
    _say(
        "\n".join(
            f"{key}: {value:,}" if isinstance(value, int) else f"{key}: {value}" for key, value in counted.items()
        )
    )
    _say(f"ready: {target}\ntrain on it: intbmoe train {name} --data.path {target}")


def recipes() -> None:
    """List the recipes for train and compare, and the sets for compare --methods."""
    with _explained(ModuleNotFoundError):
        from intbmoe.recipes import SETS, describe_recipe, list_recipes, load_recipe
    table = Table("recipe", "task", "length", "batch", "about")
    for name in list_recipes():
        recipe = load_recipe(name)
        train = recipe.train
        length = f"{train.epochs:g} epochs" if train.steps is None else f"{train.steps:,} steps"
        table.add_row(name, recipe.task, length, str(train.batch), describe_recipe(name))
    _print(table)
    table = Table("set", "for compare --methods")
    for name, found in SETS.items():
        table.add_row(name, found.summary)
    _print(table)


def methods(as_json: Annotated[bool, tyro.conf.arg(name="json")] = False) -> None:
    """List the methods that intbmoe.create() knows, with their traits.

    Args:
        as_json: Print a JSON list instead of a table.
    """
    rows = [_traits(find_method(name)) for name in list_methods()]
    if as_json:
        _say(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    table = Table("name", "title", "participation", "causal", "paper")
    for row in rows:
        causal = "yes" if row["causal"] else f"no: {row['noncausal_reason']}"
        table.add_row(row["name"], row["title"], row["participation"], causal, row["paper"])
    _print(table)


def _traits(method: Method) -> dict[str, object]:
    reason = method.noncausal_reason()
    return {
        "name": method.name,
        "title": method.title,
        "participation": method.participation,
        "causal": reason is None,
        "noncausal_reason": reason,
        "paper": method.paper,
    }


def cost(
    setting: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="SETTING")]],
    markdown: bool = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    attention: bool = False,
    sweep: Literal["experts"] | None = None,
    output: Path | None = None,
) -> None:
    """Measure parameters, activated parameters and FLOPs of every method, beside the paper's figures.

    Args:
        setting: One of the paper's experiments: imagenet, minipile or inttravel.
        markdown: Print Markdown instead of a table for the terminal.
        as_json: Print JSON with raw integers.
        attention: Count attention's score and value products too.
        sweep: Instead of the methods, IntBMoE with 1 to 128 experts: FLOPs and peak memory, printed and drawn.
        output: Where the sweep's picture goes. Default: cost_experts.png.
    """
    from intbmoe.analysis import cost_report

    if markdown and as_json:
        sys.exit("--markdown and --json exclude each other")
    if output is not None and sweep is None:
        sys.exit("--output is the picture of a sweep: add --sweep experts")
    form = "json" if as_json else "markdown" if markdown else "text"
    with _explained(KeyError, ModuleNotFoundError):
        if sweep is None:
            cost_report.print_cost(setting, form=form, attention=attention)
        else:
            cost_report.print_sweep(setting, output or Path("cost_experts.png"), form=form, attention=attention)


def doctor() -> None:
    """Say what this machine has, how a layer runs on it, and whether it runs right."""
    from intbmoe.doctor import examine

    table = Table("what", "found", show_header=False)
    findings = examine()
    for finding in findings:
        table.add_row(finding.name, escape(finding.value), style="bold red" if finding.good is False else None)
    _print(table)
    if any(finding.good is False for finding in findings):
        sys.exit("intbmoe: something above does not work as it should")


def _print(table: Table) -> None:
    # Away from a terminal there is no width to fit into, and a cell broken over lines cannot be searched.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _without(args: Sequence[str], *options: str) -> list[str]:
    """``args`` less these options and their values."""
    kept, values = [], iter(args)
    for argument in values:
        if argument in options:
            next(values, None)
        elif argument.partition("=")[0] not in options:
            kept.append(argument)
    return kept


def _first_line(command: Callable[..., None]) -> str:
    return (command.__doc__ or "").splitlines()[0]


@contextmanager
def _explained(*kinds: type[Exception]) -> Iterator[None]:
    """Errors whose messages are for the person at the keyboard end the program with the message alone."""
    try:
        yield
    except kinds as error:
        # A KeyError shows its message in quotes; a missing module's says what to install where it is one of ours.
        message = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
        if isinstance(error, ModuleNotFoundError) and "pip install" not in message:
            message = f"{message}: training needs more packages, pip install 'intbmoe[train]'"
        sys.exit(f"intbmoe: {message}")


COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "eval": evaluate,
    "compare": compare,
    "analyse": analyse,
    "prepare": prepare,
    "recipes": recipes,
    "methods": methods,
    "cost": cost,
    "doctor": doctor,
}
TAKE_A_RECIPE = ("train", "compare")


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line on ``args``, by default those the process was given."""
    args = list(sys.argv[1:] if args is None else args) or ["--help"]
    command = args[0]
    if command == "--version":
        sys.stdout.write(f"intbmoe {version('intbmoe')}\n")
        return
    if command not in COMMANDS and not command.startswith("-"):
        # The parser's own message lists what it expected, but not which of it comes nearest.
        sys.exit(f"intbmoe has no command {command!r}: {did_you_mean(command, COMMANDS)} (see intbmoe --help)")
    if command in TAKE_A_RECIPE:
        COMMANDS[command](args[1:])
        return
    tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="intbmoe",
        description="Mixture-of-experts layers on one contract. Also: intbmoe --version; intbmoe COMMAND --help.",
        args=args,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


if __name__ == "__main__":
    main()
