"""Small trained models that come with the package: ``intbmoe.load("zoo:digits")``, ``intbmoe serve zoo:journeys``.

Each folder is a finished run without its checkpoints and logs, and a card (README.md): the layout of a model on a hub.
Where the data may not be passed on, there is a stand-in: inputs of our own making in the form of the data, on which an
export is compared with the trained model. Nothing is ever evaluated on them; ``intbmoe eval`` asks for the data.
"""

from os import PathLike, fspath
from pathlib import Path

from intbmoe.checks import did_you_mean

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
        raise KeyError(f"{PREFIX}{name}: no model of the zoo is called so: {did_you_mean(name, list_zoo())}")
    return FOLDER / name
