"""Draws the analysis of the study's best IntBMoE on images, from its stored numbers.

    python -m benchmarks.study.inside                       # docs/images/study/*.svg
    python -m benchmarks.study.inside --images ARCHIVE      # also examples.svg; ARCHIVE is Tiny-ImageNet's

``intbmoe analyse`` draws coefficients and routing in the same way. When this run was analysed, removals of bases were
measured only by accuracy, without standard errors, so they are drawn that way. The routing of single images was not
stored: examples.svg shows it for the zoo's smaller model.
"""

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from intbmoe.analysis.analyse import AnalyseOptions, analyse
from intbmoe.analysis.drawing.bases import draw_coefficients, draw_rises
from intbmoe.analysis.drawing.routing import draw_routing
from intbmoe.report.canvas import Picture, bars_width, make_panels, save_picture
from intbmoe.train.files import read_json
from intbmoe.zoo import find_in_zoo

ANALYSIS = Path(__file__).parents[1] / "results" / "analysis-tiny-imagenet" / "seed-2"
OUTPUT = Path(__file__).parents[2] / "docs" / "images" / "study"
POINTS = 100  # percentage points in an accuracy of 1
SHOWN = ("goldfish", "cougar", "barn", "dumbbell", "police van", "trolleybus")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the analysis of the study's IntBMoE on images.")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--images", type=Path, help="Tiny-ImageNet's archive, for examples.svg")
    options = parser.parse_args()
    folder = options.output
    drawers = {"coefficients": draw_coefficients, "routing": draw_routing, "participation": draw_drops}
    for part, draw in drawers.items():
        for picture in draw(read_json(ANALYSIS / f"{part}.json")):
            save_picture(picture, folder / f"{picture.name}.svg")
    if options.images:
        draw_examples(options.images.resolve(), folder / "examples.svg")


def draw_examples(archive: Path, output: Path) -> None:
    with TemporaryDirectory() as place:
        run = Path(shutil.copytree(find_in_zoo("zoo:tiny-imagenet"), Path(place) / "run"))
        config = run / "config.yaml"
        config.write_text(config.read_text().replace("path: null", f"path: {archive}", 1))
        pictures = analyse(run, AnalyseOptions(examples=400, classes=SHOWN)) / "pictures"
        shutil.copyfile(pictures / output.name, output)


def draw_drops(data: Mapping[str, Any]) -> list[Picture]:
    """Draws the loss of accuracy without each base, in percentage points."""
    layers = [_in_points(layer) for layer in data["layers"]]
    width = bars_width(max(len(layer["rises"]) for layer in layers))
    figure, panels = make_panels(len(layers), width, 3.0, "loss of accuracy (points)")
    for axes, layer in zip(panels, layers, strict=True):
        draw_rises(axes, layer)
    see = "Orange, hatched: better without the base. Dashed: the mean. Dotted: the change of the factor alone."
    how = f"Accuracy on {data['examples']:,} validation images, which is {POINTS * data['full']:.2f} % with all bases."
    return [Picture("participation", "What accuracy loses without each expert base", see, how, figure)]


def _in_points(layer: Mapping[str, Any]) -> dict[str, Any]:
    scaled = {name: POINTS * layer[name] for name in ("mean", "smallest", "factor_alone")}
    drops = [POINTS * drop for drop in layer["drops"]]
    return {"layer": layer["layer"], "rises": drops, "errors": [None] * len(drops), **scaled}


if __name__ == "__main__":
    main()
