"""What the commands share: what is printed, and how errors end a program."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table


def show(table: Table) -> None:
    first = table.columns[0]
    first.no_wrap = all(" " not in str(cell) for cell in first.cells)  # names, to be typed: all else is shortened first
    # Away from a terminal there is no width to fit into, and a cell broken over lines cannot be searched.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()  # a server's line is waited for


@contextmanager
def explained(*kinds: type[Exception]) -> Iterator[None]:
    """Errors whose messages are for the person at the keyboard end the program with the message alone.

    Those are this package's own, the operating system's, and ``kinds``.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # an OSError, but of whoever reads the output: see ``cli.main``
    except Exception as error:
        own = any(kind.__module__.startswith("intbmoe.") for kind in type(error).__mro__)
        if not own and not isinstance(error, (OSError, *kinds)):
            raise
        # A KeyError shows its message in quotes; a missing module's says what to install where it is one of ours.
        message = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
        if isinstance(error, ModuleNotFoundError) and "pip install" not in message:
            message = f"{message}: training needs more packages, pip install 'intbmoe[train]'"
        sys.exit(f"intbmoe: {message}")


@contextmanager
def cleaned_up_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the program as an error does, which removes what is half written."""
    before = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
