"""Draws docs/images/analysis/*.svg, the pictures of docs/analysis.md: python docs/drawings/analysis.py

It trains the recipes that the page names, unchanged, and copies the pictures that ``intbmoe analyse`` draws of them.
This takes two minutes on one core.
"""

import shutil
import tempfile
from pathlib import Path

from intbmoe.analysis.analyse import analyse
from intbmoe.recipes import load_recipe
from intbmoe.train import train

OUTPUT = Path(__file__).parents[1] / "images" / "analysis"
DIGITS = (
    "coefficients",
    "cost",
    "examples",
    "load",
    "load-experts",
    "load-layers",
    "participation",
    "routing-class",
    "training",
)
WANTED = {
    "digits": {name: name for name in DIGITS},
    "stdlib": {"example-1": "example-text", "participation": "participation-text"},
    "journeys": {"example-1": "example-journeys"},
}
"""Recipe → name of a picture → its name on the page."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for recipe, names in WANTED.items():
            pictures = analyse(train(load_recipe(recipe), root=folder, quiet=True).path) / "pictures"
            for name, shown in names.items():
                shutil.copyfile(pictures / f"{name}.svg", OUTPUT / f"{shown}.svg")


if __name__ == "__main__":
    main()
