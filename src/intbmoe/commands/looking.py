"""Commands that inspect: a run, the methods and recipes, costs, and this machine."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from intbmoe.commands.device import use_device
from intbmoe.commands.terminal import DEFAULT_IS_TOLD, cleaned_up_on_sigterm, explained, fitted, say, show
from intbmoe.registry import find_method, list_methods


def analyse(
    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]],
    split: Literal["valid", "test"] = "valid",
    examples: int = 1000,
    classes: Annotated[tuple[str, ...], DEFAULT_IS_TOLD] = (),
    layers: Annotated[tuple[str, ...], DEFAULT_IS_TOLD] = (),
    numbers_only: bool = False,
    redraw: bool = False,
    device: Annotated[str | None, DEFAULT_IS_TOLD] = None,
) -> None:
    """Look inside a finished run's model (what its experts do, where its tokens go) and write RUN/analysis/report.html.

    Args:
        run: A run directory: runs/<recipe>/<method>/<seed>.
        split: Which examples to use.
        examples: The most examples to use, evenly spread; more make small differences more certain.
        classes: Classes in the routing pictures, by name or number; only their examples are used. Default: all.
        layers: Layers in the routing pictures, by number or name. Default: all.
        numbers_only: Draw nothing, for a machine without matplotlib; --redraw can do it later, also elsewhere.
        redraw: Compute nothing; draw the pictures again from the data of an earlier analysis.
        device: cpu, cuda or cuda:1. Default: a GPU if there is one.
    """
    with explained(ModuleNotFoundError, ValueError):
        use_device(device)
        from intbmoe.analysis import analyse as analysis
        from intbmoe.train.run import moved_data_is_explained
    with cleaned_up_on_sigterm(), explained(ValueError, ModuleNotFoundError), moved_data_is_explained(run):
        if numbers_only and redraw:
            raise ValueError("--numbers-only draws nothing and --redraw computes nothing: give only one of them")
        if redraw and (classes or layers):
            raise ValueError("--classes and --layers choose what is computed, --redraw computes nothing: omit --redraw")
        if redraw:
            say("\n".join(str(path) for path in analysis.redraw(run / analysis.FOLDER)))
            return
        with Console(stderr=True).status("") as status:
            options = analysis.AnalyseOptions(split, examples, classes, layers, draw=not numbers_only)
            folder = analysis.analyse(run, options, status.update)
    for part, reason in analysis.read_summary(folder)["left_out"].items():
        say(f"left out: {part}: {reason}")
    draw = f"draw it: intbmoe analyse {shlex.quote(str(run))} --redraw"
    say(f"analysed: {folder}\n{draw if numbers_only else f'look at it: {folder}/report.html'}")


def recipes() -> None:
    """List the recipes for train and compare, and the sets for compare --methods."""
    with explained(ModuleNotFoundError):
        from intbmoe.recipes import describe_recipe, list_recipes, load_recipe
        from intbmoe.recipes.sets import SETS
    show(
        ("recipe", "task", "about"), [(name, load_recipe(name).task, describe_recipe(name)) for name in list_recipes()]
    )
    say("")
    show(("set", "for compare --methods"), [(name, found.summary) for name, found in SETS.items()])


def methods(
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    picture: Path | None = None,
) -> None:
    """List the methods that intbmoe.create() knows, with their traits and three quantities.

    The quantities are those at the paper's budget on images: participation (experts that contribute to a token's
    output), execution (experts or blocks computed for it), materialization (weight sets built for an input).

    Args:
        as_json: Print a JSON list instead of a table.
        picture: Also draw the quantities to this file: .png, or .svg, which adapts to dark screens.
    """
    from intbmoe.analysis.quantities import quantities_of

    rows, found = [], []
    for method in map(find_method, list_methods()):
        found.append(quantities_of(method))
        about = {"name": method.name, "title": method.title, "participation": method.participation}
        reason = method.noncausal_reason()
        three = {name: getattr(found[-1], name) for name in ("participation", "execution", "materialization")}
        causal = {"causal": reason is None, "noncausal_reason": reason, "paper": method.paper, "code": method.code}
        rows.append({**about, "dynamic": method.dynamic, "quantities": three, **causal})
    if as_json:
        say(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        cells = []
        for row in rows:
            three, about = row["quantities"], "~" if row["dynamic"] else ""
            numbers = f"{about}{three['participation']:g}", f"{about}{three['execution']:g}"
            cells.append((row["name"], row["title"], *numbers, str(three["materialization"])))
        show(("name", "title", "participation", "execution", "materialization"), cells)
        say("\nNot causal, so refused by models of text and of histories:")
        say("\n".join(fitted(row["noncausal_reason"], f"  {row['name']}: ") for row in rows if not row["causal"]))
        say("\nintbmoe methods --json also gives their papers and code.")
    if picture is not None:
        with explained(ModuleNotFoundError, ValueError):
            from intbmoe.report import require_matplotlib

            require_matplotlib()
            from intbmoe.analysis.drawing.quantities import draw_quantities
            from intbmoe.report.canvas import save_picture

            save_picture(draw_quantities(found), picture)
        sys.stderr.write(f"drawn: {picture}\n")


def cost(
    setting: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="SETTING")]],
    markdown: bool = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    attention: bool = False,
    everything: bool = False,
    sweep: Literal["experts"] | None = None,
    output: Annotated[Path | None, DEFAULT_IS_TOLD] = None,
) -> None:
    """Measure parameters, activated parameters and FLOPs of every method, beside the paper's figures.

    Args:
        setting: One of the paper's experiments: imagenet, minipile or inttravel.
        markdown: Print Markdown instead of a table for the terminal.
        as_json: Print JSON with raw integers.
        attention: Also count attention's score and value products.
        everything: Add the methods that the paper names without measuring them.
        sweep: Instead of the methods, measure IntBMoE with 1 to 128 experts: FLOPs and peak memory, printed and drawn.
        output: File for the sweep's picture: .png, or .svg, which adapts to dark screens. Default: cost_experts.svg.
    """
    from intbmoe.analysis import cost_report

    if markdown and as_json:
        sys.exit("--markdown and --json exclude each other")
    if output is not None and sweep is None:
        sys.exit("--output is the file for a sweep's picture: add --sweep experts")
    form = "json" if as_json else "markdown" if markdown else "text"
    with explained(KeyError, ValueError, ModuleNotFoundError):
        if sweep is None:
            cost_report.print_cost(setting, form=form, attention=attention, everything=everything)
        else:
            cost_report.print_sweep(setting, output or Path("cost_experts.svg"), form=form, attention=attention)


def doctor() -> None:
    """Show what this machine has, how a layer runs on it, and whether it computes correctly."""
    from intbmoe.commands.doctor import examine

    findings = examine()
    show((), [(finding.name, finding.value) for finding in findings], [finding.good is False for finding in findings])
    if any(finding.good is False for finding in findings):
        sys.exit("intbmoe: something above does not work as it should")
