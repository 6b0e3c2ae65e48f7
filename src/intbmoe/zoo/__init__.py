"""Small trained models that the package includes: ``intbmoe.load("zoo:digits")``, ``intbmoe serve zoo:journeys``.

Each folder is a finished run without its checkpoints and logs, and a card (README.md): the layout of a model on a hub.
If the data may not be redistributed, the folder has a stand-in: inputs that we made up in the form of the data. An
export is compared with the trained model on them, but nothing is evaluated on them; ``intbmoe eval`` needs the data.
"""

from os import PathLike, fspath
from pathlib import Path

from intbmoe.checks import UnknownNameError, did_you_mean

PREFIX = "zoo:"
FOLDER = Path(__file__).parent
STAND_IN = "stand_in.tar.xz"


def list_zoo() -> list[str]:
    return sorted(path.parent.name for path in FOLDER.glob("*/config.yaml"))


def in_zoo(path: str | PathLike[str]) -> bool:
    return fspath(path).startswith(PREFIX)


def find_in_zoo(path: str | PathLike[str]) -> Path:
    """The folder of ``zoo:NAME``."""
    name = fspath(path).removeprefix(PREFIX)
    if name not in list_zoo():
        raise UnknownNameError(f"{PREFIX}{name}: the zoo has no such model: {did_you_mean(name, list_zoo())}")
    return FOLDER / name
