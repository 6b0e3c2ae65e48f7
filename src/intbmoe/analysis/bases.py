"""Expert bases: how much of each goes into each block, and what a trained model loses without one of them.

A base is removed from all block compositions of one MoE layer at a time, without retraining, and the loss of every
example is measured again:

    linear coefficients     α_e = 0, and 1/√E becomes 1/√(E−1), as in the paper: fewer terms, same magnitude
    softmax coefficients    α_e = 0, and the others are divided by their sum: the softmax over the remaining bases

Both are what a layer with the other E−1 bases would compute. The changed factor has its own effect, which is all that
happens for a base with zero coefficients; ``factor_alone`` measures it, so that it is not attributed to a base.

The rise of the loss is that of the mean, Δ = Σ(s′ᵢ − sᵢ) / Σnᵢ over examples with losses sᵢ of nᵢ units (an image is
one unit, a text has one per token). Its standard error is paired, as both models see the same examples: it comes from
the residuals of the differences, √(N/(N−1) Σ(s′ᵢ − sᵢ − Δnᵢ)²) / Σnᵢ. Whole examples count as independent, not the
tokens of a text. The deciding metric is measured too, but with few examples it cannot show small effects: an accuracy
changes by whole images.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from scipy.special import stdtr
from torch import Tensor, nn

from intbmoe.analysis.sample import Sample
from intbmoe.checks import require
from intbmoe.layer import moe_layers
from intbmoe.methods.intbmoe import ComposedMoE, IntBMoE
from intbmoe.ops.backend import Backend
from intbmoe.ops.compose import Coefficients
from intbmoe.parts.hypernetwork import Hypernetwork
from intbmoe.precomposition import precompose
from intbmoe.report.numbers import axis_scale
from intbmoe.tasks import Task

PATHS = ("value", "gate")
ROUNDING = 1e-6  # the smallest standard error assumed, relative to the loss
LEVEL = 0.05  # the probability that any of the sure claims is wrong


@dataclass(frozen=True)
class LayerCoefficients:
    """One path of one layer: K blocks of E bases."""

    layer: str
    path: str
    coefficients: list[list[float]]  # (K, E), as they multiply the bases
    normalised: list[list[float]]  # the same, each block's row scaled to length 1; a row of zeros stays
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
    """Collect the coefficients of every IntBMoE layer: the value path and, if there is one, the gate path."""
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
    """(K, E) → the mean cosine over all pairs of rows; None for a single row. A zero row has cosine 0 with others."""
    blocks = len(rows)
    if blocks < 2:
        return None
    unit = F.normalize(rows.double(), dim=1)
    first, second = torch.triu_indices(blocks, blocks, offset=1)
    return float((unit[first] * unit[second]).sum(1).mean())


@dataclass(frozen=True)
class LayerParticipation:
    layer: str
    rises: list[float]  # how much higher the mean loss is without each base; negative if lower
    errors: list[float | None]  # paired standard errors; None for a single example
    drops: list[float]  # how much worse the deciding metric is
    mean: float  # of the rises
    smallest: float
    factor_alone: float
    """The rise with 1/√(E−1) and all bases; 0 with softmax coefficients, which have no factor."""


@dataclass(frozen=True)
class Participation:
    metric: str
    higher_is_better: bool
    split: str
    examples: int
    full: float  # the metric of the whole model on these examples
    full_loss: float
    coefficients: str
    hurting: int  # removals that raise the loss by more than two standard errors
    helping: int  # removals that lower it by more than two
    sure: int
    """Removals that certainly raise it: by Holm's procedure, the chance that any of these claims is wrong is 5 %."""
    layers: list[LayerParticipation]

    def rows(self) -> list[dict[str, Any]]:
        factor, unit = axis_scale(self.metric)
        drop = f"{self.metric}_drop{'_points' if unit else ''}"  # in the same unit as on the page
        return [
            {"layer": of.layer, "base": base, "loss_rise": of.rises[base], "standard_error": of.errors[base]}
            | {drop: factor * of.drops[base]}
            for of in self.layers
            for base in range(len(of.rises))
        ]


def paired_rise(whole: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> tuple[float, float | None]:
    """The rise of the mean loss from one model to another on the same examples, and its standard error."""
    units, difference = whole["count"], other["loss"] - whole["loss"]
    examples, total = len(units), float(units.sum())
    rise = float(difference.sum()) / total
    if examples < 2:
        return rise, None
    residuals = difference - rise * units
    return rise, math.sqrt(examples / (examples - 1) * float(residuals.square().sum())) / total


def count_sure(rises: Sequence[float], errors: Sequence[float | None], examples: int) -> int:
    """How many rises are above 0 at 5 %, by a one-sided Student's t-test with Holm's correction for all of them."""
    if examples < 2:
        return 0
    chances = sorted(
        float(stdtr(examples - 1, -rise / error)) if error else float(rise <= 0)
        for rise, error in zip(rises, errors, strict=True)
    )
    passed = (chance <= LEVEL / (len(chances) - place) for place, chance in enumerate(chances))
    return sum(1 for _ in takewhile(bool, passed))


class _ChangedCoefficients(nn.Module):
    """A hypernetwork whose coefficients leave out one base (None: none) and have the factor of one base fewer."""

    def __init__(self, hypernetwork: Hypernetwork, base: int | None) -> None:
        super().__init__()
        self.hypernetwork = hypernetwork
        self.base = base

    def forward(self, codebook: Tensor, backend: Backend = "tiled") -> Coefficients:
        whole, softmax = self.hypernetwork(codebook, backend), self.hypernetwork.coefficients == "softmax"
        value, gate = (None if path is None else self._change(path, softmax) for path in (whole.value, whole.gate))
        return Coefficients(value, gate, 1.0 if softmax else (self.hypernetwork.experts - 1) ** -0.5)

    def _change(self, coefficients: Tensor, softmax: bool) -> Tensor:
        if self.base is not None:
            bases = torch.arange(coefficients.shape[1], device=coefficients.device)
            coefficients = torch.where(bases == self.base, 0, coefficients)
        if softmax:  # rows sum to 1 again; if the removed base had all the weight, they stay zero
            coefficients = coefficients / coefficients.sum(1, keepdim=True).clamp(
                min=torch.finfo(coefficients.dtype).tiny
            )
        return coefficients


def without_base(layer: IntBMoE, base: int | None) -> ComposedMoE:
    """The layer composed without ``base`` or, for None, with all bases and the factor of one fewer."""
    experts = layer.config.experts
    require(experts > 1, "experts", experts, "at least 2: a layer cannot lose its only base")
    require(base is None or 0 <= base < experts, "base", base, f"None or a number from 0 to {experts - 1}")
    own = layer.hypernetwork
    layer.hypernetwork = _ChangedCoefficients(own, base)
    try:
        return layer.precompose()
    finally:
        layer.hypernetwork = own


def measure_participation(
    model: nn.Module, sample: Sample, tell: Callable[[str], None] = lambda line: None
) -> Participation:
    """Remove each base of each IntBMoE layer in turn and measure the loss; ``model`` is not changed.

    All runs use one precomposed copy in which a single layer is replaced: a removal is composed once, not once per
    batch, and differs from the whole model in nothing else.
    """
    task = sample.task
    layers = {name: layer for name, layer in moe_layers(model) if isinstance(layer, IntBMoE)}
    require(len(layers) > 0, "model", type(model).__name__, "a model with IntBMoE layers: only those have bases")
    served = precompose(model)
    whole = sample.evaluate_examples(served)
    full = _metric(task, whole)
    sign = 1 if task.higher_is_better else -1

    def rise(name: str, composed: ComposedMoE) -> tuple[float, float | None, float]:
        """The rise of the loss, its error, and the drop of the metric."""
        own = served.get_submodule(name)
        served.set_submodule(name, composed)
        try:
            found = sample.evaluate_examples(served)
        finally:
            served.set_submodule(name, own)
        return *paired_rise(whole, found), sign * (full - _metric(task, found))

    found = []
    for name, layer in layers.items():
        tell(f"participation: {name}, {layer.config.experts} bases")
        each = [rise(name, without_base(layer, base)) for base in range(layer.config.experts)]
        losses, errors, drops = (list(column) for column in zip(*each, strict=True))
        linear = layer.config.coefficients == "linear"
        alone = rise(name, without_base(layer, None))[0] if linear else 0.0
        found.append(LayerParticipation(name, losses, errors, drops, fmean(losses), min(losses), alone))
    full_loss = float(whole["loss"].sum() / whole["count"].sum())
    # A base that does nothing changes the last bits of every loss in the same way: consistent, but not an effect.
    pairs = [
        (rise, max(error, ROUNDING * abs(full_loss)))
        for of in found
        for rise, error in zip(of.rises, of.errors, strict=True)
        if error is not None
    ]
    return Participation(
        metric=task.metric,
        higher_is_better=task.higher_is_better,
        split=sample.split,
        examples=sample.examples,
        full=full,
        full_loss=full_loss,
        coefficients=next(iter(layers.values())).config.coefficients,
        hurting=sum(rise > 2 * error for rise, error in pairs),
        helping=sum(rise < -2 * error for rise, error in pairs),
        sure=count_sure(*zip(*pairs, strict=True), sample.examples) if pairs else 0,
        layers=found,
    )


def _metric(task: Task, each: Mapping[str, Tensor]) -> float:
    return float(task.metrics({name: float(values.sum()) for name, values in each.items()})[task.metric])
