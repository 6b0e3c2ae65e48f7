"""The command line. A new command is one function in ``commands/`` and one entry in ``COMMANDS``.

``train``, ``compare`` and ``plan`` take a recipe and any of its settings as options. Their parser depends on the
recipe, so they get their arguments unparsed (``overrides.py``). ``--plugin FILE``, anywhere on the line, names a Python
file with tasks or methods of your own (docs/adding-a-task.md).
"""

import os
import select
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper

import tyro

from intbmoe.checks import did_you_mean
from intbmoe.commands.greeting import greet
from intbmoe.commands.looking import analyse, cost, doctor, methods, recipes
from intbmoe.commands.serving import export, generate, serve
from intbmoe.commands.terminal import HELP, about, explained, fitted, parse, say
from intbmoe.commands.training import compare, demo, evaluate, plan, prepare, train
from intbmoe.registry import add_plugin
from intbmoe.version import program_version

COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "eval": evaluate,
    "compare": compare,
    "demo": demo,
    "plan": plan,
    "analyse": analyse,
    "export": export,
    "generate": generate,
    "serve": serve,
    "prepare": prepare,
    "recipes": recipes,
    "methods": methods,
    "cost": cost,
    "doctor": doctor,
}
TAKE_A_RECIPE = ("train", "compare", "plan")


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line on ``args``, by default the process's own arguments."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as on stderr: an unprintable character must not stop us
    try:
        try:
            _run(list(sys.argv[1:] if args is None else args))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads(sys.stdout.fileno()):
            raise
        # The reader (``head``, say) has closed the pipe. Discard the rest, or Python complains when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _nobody_reads(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(args: Sequence[str]) -> None:
    args, plugins = _take_plugins(args)
    with explained(ValueError):
        for file in plugins:
            add_plugin(file)
    if not args:
        greet()
        return
    command, *rest = args
    if command == "--version":
        say(f"intbmoe {program_version()}")
    elif command in HELP:
        say(_help())
    elif command not in COMMANDS:
        sys.exit(f"intbmoe has no command {command!r}: {did_you_mean(command, COMMANDS)} (see intbmoe --help)")
    elif command in TAKE_A_RECIPE:
        COMMANDS[command](rest)
    else:
        run = COMMANDS[command]
        parse(run, rest, f"intbmoe {command}", about(run), config=(tyro.conf.FlagCreatePairsOff,))


def _help() -> str:
    commands = [fitted(about(run).partition("\n\n")[0], f"  {name:10}") for name, run in COMMANDS.items()]
    more = (
        "Run intbmoe COMMAND --help for details and intbmoe --version for the version. Every command takes --plugin "
        "FILE, a Python file with tasks or methods of your own (docs/adding-a-task.md)."
    )
    return "\n".join(["usage: intbmoe COMMAND …", "", *commands, "", fitted(more)])


def _take_plugins(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into those without ``--plugin FILE`` and the plugin files."""
    rest, files, values = [], [], iter(args)
    for argument in values:
        option, given, value = argument.partition("=")
        if option != "--plugin":
            rest.append(argument)
            continue
        file = value if given else next(values, "")
        if not file:
            sys.exit("intbmoe: --plugin needs the path of a Python file: --plugin my_task.py")
        files.append(file)
    return rest, files


if __name__ == "__main__":
    main()
