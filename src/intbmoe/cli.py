"""The command line. A new command is one function here and one entry in ``COMMANDS``."""

import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from intbmoe.checks import did_you_mean
from intbmoe.registry import Method, find_method, list_methods


def methods(as_json: Annotated[bool, tyro.conf.arg(name="json")] = False) -> None:
    """List the methods that intbmoe.create() knows, with their traits.

    Args:
        as_json: Print a JSON list instead of a table.
    """
    rows = [_traits(find_method(name)) for name in list_methods()]
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
        return
    table = Table("name", "title", "participation", "causal", "paper")
    for row in rows:
        causal = "yes" if row["causal"] else f"no: {row['noncausal_reason']}"
        table.add_row(row["name"], row["title"], row["participation"], causal, row["paper"])
    # Away from a terminal there is no width to fit into, and a cell broken over lines cannot be searched.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


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
    try:
        if sweep is None:
            cost_report.print_cost(setting, form=form, attention=attention)
        else:
            cost_report.print_sweep(setting, output or Path("cost_experts.png"), form=form, attention=attention)
    except (KeyError, ModuleNotFoundError) as error:
        sys.exit(error.args[0])


COMMANDS: dict[str, Callable[..., None]] = {"methods": methods, "cost": cost}


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
    tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="intbmoe",
        description="Mixture-of-experts layers on one contract. Also: intbmoe --version; intbmoe COMMAND --help.",
        args=args,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


if __name__ == "__main__":
    main()
