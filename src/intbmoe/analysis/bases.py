"""Expert bases: how much of each goes into each block, and what a trained model loses without one of them.

A base is taken out of all block compositions of one MoE layer at a time, without retraining, and the task's deciding
metric is taken again:

    linear coefficients     α_e = 0, and 1/√E becomes 1/√(E−1), as in the paper: fewer terms, same magnitude
    softmax coefficients    α_e = 0, and the others are divided by their sum: the softmax over the bases that are left

Both are what a layer with the E−1 other bases would compute. The change of the factor has an effect of its own, which a
base with zero coefficients shows alone; ``factor_alone`` says how large it is, so that it is not taken for a base's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.analysis.sample import Sample
from intbmoe.checks import require
from intbmoe.layer import moe_layers
from intbmoe.methods.intbmoe import ComposedMoE, IntBMoE
from intbmoe.ops.compose import Coefficients
from intbmoe.parts.hypernetwork import Hypernetwork
from intbmoe.precomposition import precompose

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
class ModelCoefficients:
    layers: list[LayerCoefficients]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"layer": found.layer, "path": found.path, "block": block, "base": base, "coefficient": value}
            | {"normalised": found.normalised[block][base]}
            for found in self.layers
            for block, row in enumerate(found.coefficients)
            for base, value in enumerate(row)
        ]


def collect_coefficients(model: nn.Module) -> ModelCoefficients:
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
    return ModelCoefficients(found)


def mean_cosine(rows: Tensor) -> float | None:
    """(K, E) → the mean cosine over all pairs of different rows; None for a single row. Zero rows are like no other."""
    blocks = len(rows)
    if blocks < 2:
        return None
    unit = F.normalize(rows.double(), dim=1)
    first, second = torch.triu_indices(blocks, blocks, offset=1)
    return float((unit[first] * unit[second]).sum(1).mean())


@dataclass(frozen=True)
class LayerParticipation:
    layer: str
    drops: list[float]  # how much worse the metric is without each base; below 0 it is better
    mean: float
    smallest: float
    factor_alone: float
    """How much worse it is with 1/√(E−1) and all bases; 0 with softmax coefficients, which take no factor."""


@dataclass(frozen=True)
class Participation:
    metric: str
    higher_is_better: bool
    split: str
    examples: int
    full: float  # the metric of the whole model on these examples
    coefficients: str
    layers: list[LayerParticipation]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"layer": layer.layer, "base": base, "metric": self.metric, "drop": drop}
            for layer in self.layers
            for base, drop in enumerate(layer.drops)
        ]


class _ChangedCoefficients(nn.Module):
    """A hypernetwork whose coefficients leave out one base (None: none) and follow the factor of one base fewer."""

    def __init__(self, hypernetwork: Hypernetwork, base: int | None) -> None:
        super().__init__()
        self.hypernetwork = hypernetwork
        self.base = base

    def forward(self, codebook: Tensor) -> Coefficients:
        whole = self.hypernetwork(codebook)
        value, gate = self._without_base(whole.value), whole.gate
        gate = None if gate is None else self._without_base(gate)
        if self.hypernetwork.coefficients == "softmax":
            return Coefficients(_share_out(value), None if gate is None else _share_out(gate), 1.0)
        return Coefficients(value, gate, (self.hypernetwork.experts - 1) ** -0.5)

    def _without_base(self, coefficients: Tensor) -> Tensor:
        if self.base is None:
            return coefficients
        bases = torch.arange(coefficients.shape[1], device=coefficients.device)
        return torch.where(bases == self.base, 0, coefficients)


def _share_out(coefficients: Tensor) -> Tensor:
    """Rows that sum to 1; where the base that is gone had everything, nothing is left to share."""
    return coefficients / coefficients.sum(1, keepdim=True).clamp(min=torch.finfo(coefficients.dtype).tiny)


def without_base(layer: IntBMoE, base: int | None) -> ComposedMoE:
    """The layer composed without ``base``, or, for None, with all bases and the factor of one fewer."""
    experts = layer.config.experts
    require(experts > 1, "experts", experts, "at least 2: without its only base a layer has none")
    require(base is None or 0 <= base < experts, "base", base, f"None or one of 0…{experts - 1}")
    own = layer.hypernetwork
    layer.hypernetwork = _ChangedCoefficients(own, base)
    try:
        return layer.precompose()
    finally:
        layer.hypernetwork = own


def measure_participation(
    model: nn.Module, sample: Sample, tell: Callable[[str], None] = lambda line: None
) -> Participation:
    """Take out each base of each IntBMoE layer in turn; ``model`` is left as it was.

    All runs are of one precomposed copy in which a single layer is exchanged: a removal is composed once, not once a
    batch, and differs from the whole model in nothing else.
    """
    task = sample.task
    layers = {name: layer for name, layer in moe_layers(model) if isinstance(layer, IntBMoE)}
    require(len(layers) > 0, "model", type(model).__name__, "a model with IntBMoE layers: only those have bases")
    served = precompose(model)
    full = sample.metrics(served)[task.metric]
    sign = 1 if task.higher_is_better else -1

    def drop(name: str, composed: ComposedMoE) -> float:
        whole = served.get_submodule(name)
        served.set_submodule(name, composed)
        try:
            return sign * (full - sample.metrics(served)[task.metric])
        finally:
            served.set_submodule(name, whole)

    found = []
    for name, layer in layers.items():
        tell(f"participation: {name}, {layer.config.experts} bases")
        drops = [drop(name, without_base(layer, base)) for base in range(layer.config.experts)]
        linear = layer.config.coefficients == "linear"
        alone = drop(name, without_base(layer, None)) if linear else 0.0
        found.append(LayerParticipation(name, drops, fmean(drops), min(drops), alone))
    coefficients = next(iter(layers.values())).config.coefficients
    return Participation(task.metric, task.higher_is_better, sample.split, sample.examples, full, coefficients, found)
