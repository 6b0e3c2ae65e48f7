"""What the commands share: printing, and how errors end the program."""

import inspect
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

HELP = ("-h", "--help")
DEFAULT_IS_TOLD = tyro.conf.arg(help_behavior_hint="")
"""In the annotation of an option whose text says the default: the help does not add the value in Python."""


def show(headings: Sequence[str], rows: Sequence[Sequence[str]], alarming: Sequence[bool] = ()) -> None:
    """Print a table without frames that fits into 80 columns; ``alarming`` rows are highlighted."""
    lean = {"box": SIMPLE_HEAD, "show_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(*headings, show_header=bool(headings), **lean)
    for row, red in zip_longest(rows, alarming):
        table.add_row(*map(escape, row), style="bold red" if red else None)
    # Users type the names in the first column, so wrap everything else first.
    table.columns[0].no_wrap = all(" " not in row[0] for row in rows)
    # Away from a terminal there is no width to fit into, and a wrapped cell cannot be searched.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()  # another program may be waiting for a server's line


def parse(kind: Any, args: Sequence[str], prog: str, text: str, **options: Any) -> Any:
    """Call ``tyro.cli`` with ``text`` above its help: tyro does not wrap a description at the terminal's width."""
    if set(HELP) & set(args):
        say(f"{text}\n")
    return tyro.cli(kind, args=args, prog=prog, description="", **options)


def about(command: Callable[..., None]) -> str:
    """Return what the docstring of ``command`` says before its arguments."""
    text = (inspect.getdoc(command) or "").partition("\n\nArgs:")[0]
    return "\n\n".join(map(fitted, text.split("\n\n")))


def fitted(text: str, start: str = "") -> str:
    """Wrap one paragraph at the terminal's width after ``start``, indenting its further lines below the first."""
    width, below = shutil.get_terminal_size().columns, " " * len(start)
    return textwrap.fill(
        " ".join(text.split()), width, initial_indent=start, subsequent_indent=below, break_on_hyphens=False
    )


@contextmanager
def explained(*kinds: type[Exception]) -> Iterator[None]:
    """End the program with only the message for errors whose messages are meant for the user.

    These are this package's own errors, the operating system's, and ``kinds``.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # an OSError, but from the reader of the output: see ``cli.main``
    except Exception as error:
        own = any(kind.__module__.startswith("intbmoe.") for kind in type(error).__mro__)
        if not own and not isinstance(error, (OSError, *kinds)):
            raise
        # A KeyError shows its message in quotes; if a module of ours is missing, its message says what to install.
        message = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
        if isinstance(error, ModuleNotFoundError) and "pip install" not in message:
            message = f"{message}: training needs more packages, pip install 'intbmoe[train]'"
        sys.exit(f"intbmoe: {message}")


@contextmanager
def cleaned_up_on_sigterm() -> Iterator[None]:
    """Make SIGTERM end the program as an error does, so that half-written files are removed."""
    before = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
