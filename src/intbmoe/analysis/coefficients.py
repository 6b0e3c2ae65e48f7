"""Coefficients: how much of each expert base goes into each block, and how alike the blocks are."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.layer import moe_layers
from intbmoe.methods.intbmoe import IntBMoE

PATHS = ("value", "gate")


@dataclass(frozen=True)
class LayerCoefficients:
    """One path of one layer: K blocks of E bases."""

    layer: str
    path: str
    coefficients: list[list[float]]  # (K, E), as they multiply the bases
    normalised: list[list[float]]  # the same, each block's row of length 1; a row of zeros stays
    mean_cosine: float | None  # over all pairs of blocks; None with a single block


@dataclass(frozen=True)
class Coefficients:
    layers: list[LayerCoefficients]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"layer": found.layer, "path": found.path, "block": block, "base": base, "coefficient": value}
            | {"normalised": found.normalised[block][base]}
            for found in self.layers
            for block, row in enumerate(found.coefficients)
            for base, value in enumerate(row)
        ]


def collect_coefficients(model: nn.Module) -> Coefficients:
    """Of every IntBMoE layer: value path and, where there is one, gate path."""
    found = []
    for name, layer in moe_layers(model):
        if not isinstance(layer, IntBMoE):
            continue
        with torch.no_grad():
            paths = layer.coefficients()
        for path, coefficients in zip(PATHS, paths, strict=False):  # without a gate there is one path
            wide = coefficients.double()
            normalised = F.normalize(wide, dim=1)
            found.append(LayerCoefficients(name, path, wide.tolist(), normalised.tolist(), mean_cosine(wide)))
    return Coefficients(found)


def mean_cosine(rows: Tensor) -> float | None:
    """(K, E) → the mean cosine over all pairs of different rows; None for a single row. Zero rows are like no other."""
    blocks = len(rows)
    if blocks < 2:
        return None
    unit = F.normalize(rows.double(), dim=1)
    first, second = torch.triu_indices(blocks, blocks, offset=1)
    return float((unit[first] * unit[second]).sum(1).mean())
