"""A trained mixture made smaller, or made an IntBMoE: functions on a model, each with a report of its error.

share_base    D²-MoE: experts become one base that all share and a low-rank difference each. Gu et al., "Delta
              Decompression for MoE-based LLMs Compression", 2025 (arXiv 2502.17298), official code lliai/D2MoE:

                  W̄ = Σ_e F_e W_e / Σ_e F_e          F_e: √(mean squared gradient) of each input, times e's load
                  W_e ≈ W̄ + A_e B_e                  of rank ⌊ratio · i·o/(i + o)⌋, the best for e's own inputs X_e:
                  L^T (W_e − W̄) = U Σ V^T            L L^T = X_e^T X_e;  A = L^{−T} U √Σ, B = √Σ V^T, largest ones

              Biases stay. Their pruning of the base's columns, which depends on the batch, is left out.
fit_intbmoe   each mixture is replaced by an IntBMoE that is fitted to its outputs by gradient descent: E experts become
              bases and K blocks. IntBMoE's blocks are another function than an FFN, so nothing closed-form would do.

Both take ``batches`` and a function that runs the model on one, and return a copy; the model stays as it is. Everything
is measured on the last batch, which nothing is fitted to.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from intbmoe.checks import require
from intbmoe.layer import MoELayer, moe_layers, require_whole, unwrap
from intbmoe.methods.intbmoe import IntBMoE
from intbmoe.ops.permute import Permutation
from intbmoe.parts.experts import StackedExperts, StackedLinear

Batches = Sequence[Any]
Loss = Callable[[nn.Module, Any], Tensor]
"""The model and a batch → a number to differentiate; running it runs the model."""

GRAM_EPS = 1e-6
"""What is added to a Gram matrix's diagonal, relative to its mean: experts see few tokens, or none."""


@dataclass(frozen=True)
class Converted:
    """One mixture, before and after: parameters, and ‖y' − y‖/‖y‖ of its outputs on the last batch."""

    layer: str
    parameters: int
    parameters_after: int
    error: float


def share_base(model: nn.Module, batches: Batches, loss: Loss, *, ratio: float) -> tuple[nn.Module, list[Converted]]:
    """D²-MoE: ``ratio`` is the share of an expert's matrix that its low-rank difference keeps, in parameters."""
    require(0 < ratio <= 1, "ratio", ratio, "a number in (0, 1]")
    changed, layers = _copy(model, batches)
    maps = [part for _, layer in layers for part in layer.experts.modules() if isinstance(part, StackedLinear)]
    seen = {part: _Seen(part) for part in maps}
    with ExitStack() as stack:
        for part in maps:
            stack.callback(part.register_forward_pre_hook(seen[part].look).remove)
        for batch in batches[:-1]:
            changed.zero_grad()
            loss(changed, batch).backward()
            for part in maps:
                seen[part].add_gradient()
    changed.zero_grad()
    for part in maps:
        parts = seen[part].factors(max(1, int(ratio * _low_rank(part))))
        parametrize.register_parametrization(part, "weight", _SharedBase(parts), unsafe=True)
    return changed, _report(model, changed, [name for name, _ in layers], batches[-1], loss)


def fit_intbmoe(
    model: nn.Module, batches: Batches, loss: Loss, *, steps: int = 1000, lr: float = 3e-3, **options: Any
) -> tuple[nn.Module, list[Converted]]:
    """``options`` are IntBMoE's, ``experts`` and ``blocks`` above all; ``hidden`` is the experts' own if left out."""
    changed, layers = _copy(model, batches)
    tokens = _inputs(changed, [name for name, _ in layers], batches[:-1], loss)
    for name, layer in layers:
        wanted = {"hidden": layer.config.hidden, **options}
        weight = next(layer.parameters())
        fitted = IntBMoE(layer.config.dim, **wanted).to(weight.device, weight.dtype)
        x = torch.cat(tokens[name])
        with torch.no_grad():
            y = torch.cat([layer(rows.unsqueeze(0)).squeeze(0) for rows in x.split(4096)])
        _fit(fitted, x, y, steps, lr)
        changed.set_submodule(name, fitted.train(layer.training))
    return changed, _report(model, changed, [name for name, _ in layers], batches[-1], loss)


def _fit(layer: IntBMoE, x: Tensor, y: Tensor, steps: int, lr: float, batch: int = 512) -> None:
    optimizer = torch.optim.Adam(layer.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)
    scale = y.square().mean()
    for _ in range(steps):
        rows = torch.randint(len(x), (min(batch, len(x)),), generator=generator).to(x.device)
        optimizer.zero_grad()
        ((layer(x[rows].unsqueeze(0)).squeeze(0) - y[rows]).square().mean() / scale).backward()
        optimizer.step()
        schedule.step()


def _copy(model: nn.Module, batches: Batches) -> tuple[nn.Module, list[tuple[str, MoELayer]]]:
    """A copy in evaluation, and its mixtures of experts that a router chooses from."""
    require(len(batches) >= 2, "batches", f"{len(batches)} of them", "at least two: the last one measures the error")
    require_whole(model, "cannot convert")
    changed = copy.deepcopy(unwrap(model)).eval()
    layers = [
        (name, layer)
        for name, layer in moe_layers(changed)
        if layer.choices is not None and isinstance(getattr(layer, "experts", None), StackedExperts)
    ]
    if not layers:
        raise ValueError("the model has no mixture whose router chooses among experts (switch, mixtral, deepseek, …)")
    return changed, layers


def _inputs(model: nn.Module, names: list[str], batches: Batches, loss: Loss) -> dict[str, list[Tensor]]:
    """The valid tokens (N, d) that each layer sees in each batch."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    layers = dict(moe_layers(model))

    def keep(name: str, x: Tensor, mask: Tensor | None = None, *_: Any) -> None:
        found[name].append(x.detach().flatten(0, -2) if mask is None else x.detach()[mask])

    with ExitStack() as stack, torch.no_grad():
        for name in names:
            hook = layers[name].register_forward_pre_hook(lambda _, args, name=name: keep(name, *args))
            stack.callback(hook.remove)
        for batch in batches:
            loss(model, batch)
    return found


def _report(before: nn.Module, after: nn.Module, names: list[str], batch: Any, loss: Loss) -> list[Converted]:
    mode = before.training
    tokens = _inputs(before.eval(), names, [batch], loss)
    rows = []
    for name in names:
        old, new = (dict(moe_layers(model))[name] for model in (before, after))
        x = tokens[name][0].unsqueeze(0)
        with torch.no_grad():
            y = old(x)
            error = float((new(x) - y).norm() / y.norm())
        sizes = (sum(p.numel() for p in layer.parameters()) for layer in (old, new))
        rows.append(Converted(name, *sizes, error))
    before.train(mode)
    return rows


def _low_rank(part: StackedLinear) -> float:
    """The rank at which two factors have as many numbers as the matrix."""
    _, inputs, outputs = part.weight.shape
    return inputs * outputs / (inputs + outputs)


class _Seen:
    """What a stacked map has seen: each expert's inputs as a Gram matrix, its load, its squared gradients."""

    def __init__(self, part: StackedLinear) -> None:
        experts, inputs, _ = part.weight.shape
        self.part = part
        self.grams = torch.zeros(experts, inputs, inputs, dtype=torch.float64)
        self.load = torch.zeros(experts, dtype=torch.float64)
        self.squares = torch.zeros(experts, inputs, dtype=torch.float64)

    def look(self, part: nn.Module, args: tuple[Any, ...]) -> None:
        z, way, plan = args
        require(way == "rows" and isinstance(plan, Permutation), "way", way, "'rows': experts that tokens are sent to")
        for e in range(len(self.load)):
            rows = z.detach()[plan.group[: len(z)] == e].cpu().double()
            self.grams[e] += rows.t() @ rows
            self.load[e] += len(rows)

    def add_gradient(self) -> None:
        self.squares += self.part.weight.grad.cpu().double().square().mean(-1)

    def factors(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Base (i, o), left (E, i, rank) and right (E, rank, o)."""
        weight = self.part.weight.detach()
        exact = weight.cpu().double()
        importance = self.squares.sqrt() * self.load.unsqueeze(-1)
        total = importance.sum(0)
        shares = torch.where(total > 0, importance / total.clamp(min=1e-300), 1 / len(importance))
        base = torch.einsum("ei,eio->io", shares, exact)
        diagonal = self.grams.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-12) * GRAM_EPS
        identity = torch.eye(base.shape[0], dtype=torch.float64)
        whitening = torch.linalg.cholesky(self.grams + diagonal[:, None, None] * identity)
        left, values, right = torch.linalg.svd(whitening.mT @ (exact - base), full_matrices=False)
        root = values[:, :rank].sqrt()
        left = torch.linalg.solve_triangular(whitening.mT, left[:, :, :rank], upper=True) * root.unsqueeze(1)
        return tuple(part.to(weight) for part in (base, left, root.unsqueeze(-1) * right[:, :rank]))


class _SharedBase(nn.Module):
    """A parametrisation: the owner's weights (E, i, o) are computed from a base and low-rank differences."""

    def __init__(self, parts: tuple[Tensor, Tensor, Tensor]) -> None:
        super().__init__()
        self._parts: tuple[Tensor, ...] | None = parts

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Called once, when the parametrisation is put on: what was fitted to the weight, not the weight."""
        parts, self._parts = self._parts, None
        return parts

    def forward(self, base: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return base + left @ right
