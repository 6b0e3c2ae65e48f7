"""How each block is composed of expert bases."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from intbmoe.report.canvas import Data, Picture, colour_bar, heat_map, layer_title


def draw_coefficients(data: Data) -> list[Picture]:
    layers = list(dict.fromkeys(found["layer"] for found in data["layers"]))
    paths = list(dict.fromkeys(found["path"] for found in data["layers"]))
    by_place = {(found["path"], found["layer"]): found for found in data["layers"]}
    blocks, bases = (max(sizes) for sizes in zip(*(np.shape(f["normalised"]) for f in data["layers"]), strict=True))
    size = (len(layers) * (0.8 + 0.16 * bases) + 1, len(paths) * (1.0 + 0.16 * blocks) + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(paths), len(layers), squeeze=False)
    limit = max(float(np.abs(found["normalised"]).max()) for found in data["layers"]) or 1.0
    for row, path in enumerate(paths):
        for column, layer in enumerate(layers):
            found, axes = by_place[path, layer], panels[row][column]
            cosine = "" if found["mean_cosine"] is None else f"\ncosine {found['mean_cosine']:.3f}"
            image = heat_map(axes, np.array(found["normalised"]), limit, f"{layer_title(layer)}, {path}{cosine}")
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
            if row == len(paths) - 1:
                axes.set_xlabel("expert base", fontsize=9)
        panels[row][0].set_ylabel("block", fontsize=9)
    colour_bar(figure, image, panels, "coefficient,\nrows of length 1")
    means = [
        f"{path}: " + ", ".join(f"{by_place[path, layer]['mean_cosine']:.3f}" for layer in layers)
        for path in paths
        if by_place[path, layers[0]]["mean_cosine"] is not None
    ]
    see = (
        "Rows that look alike are blocks composed alike (cosine 1: the same coefficients, 0: nothing in common). "
        "Red: the base is added, blue: subtracted. Mean cosine by layer, first to last: "
        f"{'; '.join(means) or 'one block only'}."
    )
    how = (
        "The coefficients that the hypernetwork gives each block, each block's row divided by its length. "
        "The cosine is the mean over all pairs of blocks."
    )
    return [Picture("coefficients", "How each block is composed", see, how, figure)]
