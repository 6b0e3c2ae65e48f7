"""Commands that train, compare and prepare data."""

import json
import os
import shlex
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from intbmoe.checks import did_you_mean
from intbmoe.commands.device import use_device
from intbmoe.commands.terminal import DEFAULT_IS_TOLD, about, explained, say
from intbmoe.registry import plugin_options
from intbmoe.settings import Checked, Positive, PositiveInt

Unparsed = tyro.conf.Positional[list[str]]


@dataclass(frozen=True)
class TrainOptions:
    """Options of ``train`` besides the recipe's settings."""

    root: Path = Path("runs")
    """Where runs are kept."""
    quiet: bool = False
    """Show no progress, only the path of the run."""
    device: str | None = None
    """cpu, cuda or cuda:1; None for a GPU if there is one."""


def train(args: Unparsed) -> None:
    """Train one model: intbmoe train RECIPE [--moe.name switch --train.epochs 3 …].

    Every setting of the recipe is an option. The same command resumes an interrupted run.
    """
    with explained(KeyError, ValueError, ModuleNotFoundError):
        from intbmoe.commands.overrides import parse_recipe

        recipe, options = parse_recipe("train", TrainOptions(), args, about(train))
        use_device(options.device)
        from intbmoe.train import RunDirectory
        from intbmoe.train import train as run_training
        from intbmoe.train.signals import belongs_to_another

        already = "already " if RunDirectory.of(recipe, options.root).finished else ""
    with explained(ModuleNotFoundError):  # some data needs a package of its own
        wait = say if belongs_to_another() else None  # an earlier attempt of a comparison may still hold the run
        run = run_training(recipe, root=options.root, quiet=options.quiet, wait=wait)
        if int(os.environ.get("RANK", "0")) == 0:
            test = "  ".join(f"{name} {value:.4f}" for name, value in run.result["test"].items())
            again = shlex.join(["intbmoe", "eval", str(run.path), *plugin_options()])
            say(f"{already}finished: {run.path}\ntest: {test}\nevaluate it again: {again}")


def evaluate(
    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]],
    split: Literal["test", "valid"] = "test",
    data: Annotated[Path | None, DEFAULT_IS_TOLD] = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    device: Annotated[str | None, DEFAULT_IS_TOLD] = None,
) -> None:
    """Evaluate a finished run's model.

    Args:
        run: A run directory, runs/<recipe>/<method>/<seed>, or a model of the zoo, such as zoo:digits.
        split: Which examples to use.
        data: Path of the data. Default: where it was in training.
        as_json: Print JSON with all digits.
        device: cpu, cuda or cuda:1. Default: a GPU if there is one.
    """
    with explained(ModuleNotFoundError, ValueError):
        use_device(device)
        from intbmoe.train import evaluate as evaluate_run
        from intbmoe.train.run import moved_data_is_explained
    with explained(), moved_data_is_explained(run):
        metrics = evaluate_run(run, split, data)
    if as_json:
        say(json.dumps(metrics, indent=2))
    else:
        say("\n".join(f"{split} {name}: {value:.4f}" for name, value in metrics.items()))


def compare(args: Unparsed) -> None:
    """Compare methods: intbmoe compare RECIPE --methods all --seeds 3.

    Trains what is not finished, several runs side by side, and prints accuracy, parameters and FLOPs. --methods takes
    methods and sets (all, everything, ablations, compute, place, K, k, E, L). Every setting of the recipe is an option;
    --options.METHOD.OPTION VALUE sets an option of a method other than the recipe's. --tune lets each method choose its
    own learning rate, warm-up and so on.
    """
    with explained(KeyError, ValueError, ModuleNotFoundError):
        from intbmoe.commands.overrides import parse_recipe, take_method_options
        from intbmoe.compare.compare import compare as run_comparison
        from intbmoe.compare.plan import CompareOptions

        own, args = take_method_options(_gather(_gather(args, "--methods", ","), "--tune"))
        recipe, options = parse_recipe("compare", CompareOptions(), args, about(compare))
        use_device(options.device)
        if recipe.moe.label is not None:
            raise ValueError("the comparison sets --moe.label itself: name the comparison with --name")
        if _without(args, "--train.seed") != list(args):
            raise ValueError(
                "the comparison sets --train.seed itself: --seeds N takes the first N of the recipe's seeds "
                f"({', '.join(map(str, recipe.seeds))}), which you can set in a .yaml file (seeds:)"
            )
        settings = _without(args, "--methods", "--seeds", "--jobs", "--root", "--tune", "--baseline")
        status = run_comparison(recipe, options, settings, own)
    sys.exit(status)


def demo(no_browser: bool = False) -> None:
    """Compare all methods on handwritten digits, in a few minutes, and open the report.

    Args:
        no_browser: Only print where the report is.
    """
    try:
        compare(["digits", "--methods", "all"])
    except SystemExit as end:
        if end.code:
            raise
    report = Path("runs/digits/compare/all/report.html").resolve()
    say(f"the report: {report}")
    if not no_browser:
        webbrowser.open(report.as_uri())


@dataclass(frozen=True)
class PlanOptions(Checked):
    """Options of ``plan`` besides the recipe's settings."""

    devices: PositiveInt = 8
    """Number of devices."""
    memory: Positive = 80.0
    """Memory of one device, in GB."""
    bandwidth: Positive = 400.0
    """Gbit/s that a device sends: 400 if each has one network card of that speed, thousands inside a machine."""
    tflops: Positive = 300.0
    """TFLOP/s that a device actually reaches in training, not its advertised peak."""
    picture: Path | None = None
    """File for a picture of the bytes against experts, tokens and devices, .png or .svg."""
    markdown: bool = False
    """Print Markdown."""
    json: bool = False
    """Print JSON."""


def plan(args: Unparsed) -> None:
    """Plan a training on many devices: intbmoe plan RECIPE --devices 64 --memory 80 --bandwidth 400.

    Counts memory and bytes of a step for ddp, fsdp, pools and experts, and says which to use.
    """
    with explained(KeyError, ValueError, ModuleNotFoundError):
        from intbmoe.analysis.scaling_report import print_plan
        from intbmoe.commands.overrides import parse_recipe

        recipe, options = parse_recipe("plan", PlanOptions(), args, about(plan))
        form = "json" if options.json else "markdown" if options.markdown else "text"
        rates = options.devices, options.memory, options.bandwidth, options.tflops
        print_plan(recipe, *rates, options.picture, form)


def prepare(
    name: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="NAME")]],
    source: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="SOURCE")]],
    target: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="TARGET")]],
    skip_bad: bool = False,
    workers: PositiveInt = 1,
    ray: str | None = None,
) -> None:
    """Prepare large data for training, once: intbmoe prepare NAME SOURCE TARGET.

    It can be interrupted: the same command resumes from what is finished. TARGET is then the recipe's --data.path.

    Args:
        name: imagenet, inttravel, minipile or wikipedia; or a name that a task of your own prepares.
        source: The folder with the original files.
        target: The folder to write.
        skip_bad: Count malformed rows and leave them out; without this option the first one stops the preparation.
        workers: Processes that share the work.
        ray: Share it over the Ray cluster that this machine belongs to: auto, or its HOST:PORT; local to try it out.
    """
    with explained(ModuleNotFoundError, ValueError):
        from intbmoe.tasks import list_preparations
        from intbmoe.tasks.workers import choose_workers
        from intbmoe.train.progress import PreparationProgress

        chosen = choose_workers(workers, ray)
    preparations = list_preparations()
    if name not in preparations:
        sys.exit(f"intbmoe: no data to prepare is called {name!r}: {did_you_mean(name, preparations)}")
    try:
        progress = PreparationProgress()
        with explained(ModuleNotFoundError), progress.bars:
            options = {"skip_bad": skip_bad, "progress": progress.show, "workers": chosen}
            counted = preparations[name].run(source, target, **options)
    except KeyboardInterrupt:
        again = shlex.join(["intbmoe", "prepare", name, str(source), str(target)])
        sys.exit(f"stopped: {again} resumes from what is finished")
    say(
        "\n".join(
            f"{key}: {value:,}" if isinstance(value, int) else f"{key}: {value}" for key, value in counted.items()
        )
    )
    say(f"ready: {target}\ntrain on it: intbmoe train {name} --data.path {shlex.quote(str(target))}")


def _gather(args: Sequence[str], option: str, separator: str | None = None) -> list[str]:
    """Put the words after all mentions of an option behind one at the end, joined if there is a separator.

    So ``--methods dense switch`` means ``--methods dense,switch``, and a second ``--tune`` adds to the first.
    """
    words, rest, taken, asked = [], [], False, False
    for argument in args:
        name, equals, value = argument.partition("=")
        if argument.startswith("-"):
            taken = name == option
            asked |= taken
        if not taken:
            rest.append(argument)
        elif name != option:
            words.append(argument)
        elif equals:
            words.append(value)
    if not asked:
        return list(args)
    if not words:
        raise ValueError(f"{option} needs a value: intbmoe compare --help has an example")
    return [*rest, option, *(words if separator is None else [separator.join(words)])]


def _without(args: Sequence[str], *options: str) -> list[str]:
    """Return ``args`` without ``options`` and the words after them."""
    kept, left_out = [], False
    for argument in args:
        if argument.startswith("-"):
            left_out = argument.partition("=")[0] in options
        if not left_out:
            kept.append(argument)
    return kept
