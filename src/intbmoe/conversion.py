"""Shrink a trained mixture, turn it into an IntBMoE, or turn a dense model into a mixture, and report the error.

share_base    D²-MoE: experts become one base that all share, plus a low-rank difference each. Gu et al., "Delta
              Decompression for MoE-based LLMs Compression", 2025 (arXiv 2502.17298), official code lliai/D2MoE:

                  W̄ = Σ_e F_e W_e / Σ_e F_e          F_e: √(mean squared gradient) of each input, times e's load
                  W_e ≈ W̄ + A_e B_e                  of rank ⌊ratio · i·o/(i + o)⌋, the best for e's own inputs X_e:
                  L^T (W_e − W̄) = U Σ V^T            L L^T = X_e^T X_e;  A = L^{−T} U √Σ, B = √Σ V^T, largest ones

              Biases stay. The authors' batch-dependent pruning of the base's columns is left out.
split_dense   Dense2MoE: a dense FFN's inner units are split among experts. Zheng et al., "Dense2MoE: Restructuring
              Diffusion Transformer to MoE for Efficient Text-to-Image Generation", ICCV 2025 (arXiv 2510.09094):

                  importance of unit i   |Σ_t z_{t,i} ∂loss/∂z_{t,i}|          Taylor's first term; z: inner units
                  y = f_s(x) + Σ_{e ∈ top-k} E·p_e f_e(x),  p = softmax(W_r x)   s: the most important, always on

              There is no public code, and the abstract mentions only Taylor initialisation and distillation. Our own
              choices: the other units are dealt to the experts in turn, by importance; the weight is E·p_e, so that
              k = E and W_r = 0 give the FFN itself; W_r starts as the regression of the experts' output norms and is
              then fitted, with the experts, to the FFN's outputs. The mixture of whole blocks and the balancing loss
              are left out.
fit_intbmoe   each mixture is replaced by an IntBMoE that is fitted to its outputs by gradient descent: E experts become
              bases and K blocks. IntBMoE's blocks are not FFNs, so there is no closed form.

All three take ``batches`` and a function that runs the model on one, and return a copy; the model is not changed.
Errors are measured on the last batch, to which nothing is fitted.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from intbmoe.checks import require
from intbmoe.layer import MoELayer, Result, Routing, moe_layers, require_whole, unwrap
from intbmoe.methods.dense import Dense
from intbmoe.methods.intbmoe import IntBMoE
from intbmoe.parts.experts import ExpertsConfig, RoutedLayer, StackedExperts, StackedLinear
from intbmoe.parts.router import mask_choices
from intbmoe.parts.router import top_k as best_of
from intbmoe.precision import wide
from intbmoe.settings import AtMost, PositiveInt

Batches = Sequence[Any]
Layers = dict[str, MoELayer]
Loss = Callable[[nn.Module, Any], Tensor]
"""Runs the model on a batch and returns a number to differentiate."""

FIT_BATCH = 512  # tokens
GRAM_EPS = 1e-6
"""Added to a Gram matrix's diagonal, relative to its mean, because some experts see few tokens or none."""


@dataclass(frozen=True)
class Converted:
    """One layer before and after: its parameter counts, and ‖y' − y‖/‖y‖ of its outputs on the last batch."""

    layer: str
    parameters: int
    parameters_after: int
    error: float


def share_base(model: nn.Module, batches: Batches, loss: Loss, *, ratio: float) -> tuple[nn.Module, list[Converted]]:
    """D²-MoE: a low-rank difference has ``ratio`` times the parameters of an expert's full matrix."""
    require(0 < ratio <= 1, "ratio", ratio, "a number in (0, 1]")
    changed, layers = _copy(model, batches)
    maps = [part for layer in layers.values() for part in layer.experts.modules() if isinstance(part, StackedLinear)]
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
        _, inputs, outputs = part.weight.shape
        as_many = inputs * outputs / (inputs + outputs)  # the rank at which two factors have as many entries
        parts = seen[part].factors(max(1, int(ratio * as_many)))
        parametrize.register_parametrization(part, "weight", _SharedBase(parts), unsafe=True)
    return changed, _report(model, changed, layers, batches[-1], loss)


def fit_intbmoe(
    model: nn.Module, batches: Batches, loss: Loss, *, steps: int = 1000, lr: float = 3e-3, **options: Any
) -> tuple[nn.Module, list[Converted]]:
    """Replace each mixture by an IntBMoE fitted to its outputs.

    ``options`` are IntBMoE's, most importantly ``experts`` and ``blocks``; ``hidden`` defaults to the experts' width.
    """
    changed, layers = _copy(model, batches)
    tokens = _inputs(changed, layers, batches[:-1], loss)
    for name, layer in layers.items():
        wanted = {"hidden": layer.config.hidden, **options}
        weight = next(layer.parameters())
        fitted = IntBMoE(layer.config.dim, **wanted).to(weight.device, weight.dtype)
        x = torch.cat(tokens[name])
        with torch.no_grad():
            y = torch.cat([layer(rows.unsqueeze(0)).squeeze(0) for rows in x.split(4096)])
        _fit(fitted, x, y, steps, lr)
        changed.set_submodule(name, fitted.train(layer.training))
    return changed, _report(model, changed, layers, batches[-1], loss)


def split_dense(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    *,
    experts: int,
    top_k: int,
    shared: float = 0.25,
    steps: int = 1000,
    lr: float = 1e-3,
) -> tuple[nn.Module, list[Converted]]:
    """Dense2MoE: replace each dense layer by experts and units that every token uses.

    ``shared`` is the fraction of inner units that are always on, plus those that do not divide among the experts.
    """
    require(0 <= shared < 1, "shared", shared, "a number in [0, 1)")
    changed, layers = _copy(model, batches, dense=True)
    units = {name: torch.zeros(layer.config.hidden, dtype=torch.float64) for name, layer in layers.items()}

    def watch(name: str, z: Tensor) -> None:
        def add(grad: Tensor) -> None:
            units[name] += (grad * z.detach()).flatten(0, -2).sum(0).abs().cpu().double()

        z.register_hook(add)

    with ExitStack() as stack:
        for name, layer in layers.items():
            hook = layer.experts.down.register_forward_pre_hook(lambda _, args, name=name: watch(name, args[0]))
            stack.callback(hook.remove)
        for batch in batches[:-1]:
            loss(changed, batch).backward()
    changed.zero_grad()
    tokens = _inputs(changed, layers, batches[:-1], loss)
    for name, layer in layers.items():
        x = torch.cat(tokens[name])
        split = SplitFFN.of(layer, units[name], experts, top_k, shared, x)
        with torch.no_grad():
            y = layer(x.unsqueeze(0)).squeeze(0)
        _fit(split, x, y, steps, lr)
        changed.set_submodule(name, split.train(layer.training))
    return changed, _report(model, changed, layers, batches[-1], loss)


@dataclass(frozen=True, kw_only=True)
class SplitConfig(ExpertsConfig):
    """``hidden`` is the width of one of the routed experts."""

    top_k: Annotated[PositiveInt, AtMost("experts")] = 2
    """k, the number of routed experts per token."""
    shared_hidden: PositiveInt = 1
    """The number of inner units that every token uses."""


class SplitFFN(RoutedLayer):
    """An FFN split into inner units that are always on and experts that hold the rest. ``split_dense`` makes it."""

    Config = SplitConfig

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        c = self.config
        self.shared = ExpertsConfig(c.dim, c.shared_hidden, experts=1, expert=c.expert).make_experts()

    @classmethod
    @torch.no_grad()
    def of(cls, dense: Dense, importance: Tensor, experts: int, top_k: int, share: float, x: Tensor) -> "SplitFFN":
        c = dense.config
        width = int((c.hidden - max(1, round(share * c.hidden))) // experts)
        require(width > 0, "experts", experts, f"small enough for {c.hidden} inner units, some of which are shared")
        order = importance.argsort(descending=True).to(x.device)
        always, rest = order.split([c.hidden - width * experts, width * experts])
        config = SplitConfig(c.dim, width, experts=experts, expert=c.expert, top_k=top_k, shared_hidden=len(always))
        split = cls(config).to(x.device, x.dtype).eval()
        groups = rest.view(width, experts).t()  # (E, width): dealt in turn
        for stacked, units in ((split.shared, always.unsqueeze(0)), (split.experts, groups)):
            for name, part in stacked.named_children():
                source = getattr(dense.experts, name)
                last = name == "down"
                part.weight.copy_(source.weight[0][units] if last else source.weight[0][:, units].transpose(0, 1))
                if part.bias is not None and not last:
                    part.bias.copy_(source.bias[0][units])
        if split.shared.down.bias is not None:
            split.shared.down.bias.copy_(dense.experts.down.bias)
        norms = wide(split.experts.batch(x.expand(experts, *x.shape))).norm(dim=-1).t()
        wanted = (norms - norms.mean(0)) / norms.std(0).clamp(min=1e-12)
        x = wide(x)
        gram = x.t() @ x
        gram = gram + torch.eye(c.dim).to(gram) * gram.diagonal().mean() * GRAM_EPS
        split.router.weight.copy_(torch.linalg.solve(gram, x.t() @ wanted).t())
        return split

    def compute(self, x: Tensor, mask: Tensor | None, state: Any, dtype: torch.dtype) -> Result:
        c = self.config
        probabilities = self.router(wide(x)).softmax(-1).flatten(0, 1)
        ids = mask_choices(best_of(probabilities, c.top_k), mask)
        weights = torch.where(ids < 0, 0, c.experts * probabilities.gather(1, ids.clamp(min=0)))
        tokens = x.flatten(0, 1).to(dtype)
        y, load = self.experts.route(tokens, ids, weights, complete=mask is None)
        y = y + self.shared.batch(tokens.unsqueeze(0)).squeeze(0)
        return Result(y.view(x.shape), Routing(ids, weights), sums={"load": load})


def _fit(layer: MoELayer, x: Tensor, y: Tensor, steps: int, lr: float) -> None:
    optimizer = torch.optim.Adam(layer.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    generator = torch.Generator().manual_seed(0)
    scale = y.square().mean()
    for _ in range(steps):
        rows = torch.randint(len(x), (min(FIT_BATCH, len(x)),), generator=generator).to(x.device)
        optimizer.zero_grad()
        ((layer(x[rows].unsqueeze(0)).squeeze(0) - y[rows]).square().mean() / scale).backward()
        optimizer.step()
        schedule.step()


def _copy(model: nn.Module, batches: Batches, dense: bool = False) -> tuple[nn.Module, Layers]:
    """Copy the model in eval mode; return the copy and its layers with routed experts, or its dense layers."""
    require(len(batches) >= 2, "batches", f"{len(batches)} of them", "at least two: the last one measures the error")
    require_whole(model, "cannot convert")
    changed = copy.deepcopy(unwrap(model)).eval()
    layers = {
        name: layer
        for name, layer in moe_layers(changed)
        if (type(layer) is Dense if dense else layer.choices is not None)
        and isinstance(getattr(layer, "experts", None), StackedExperts)
    }
    if not layers and dense:
        raise ValueError("the model has no dense layer of intbmoe (create('dense', …), create('swiglu', …))")
    if not layers:
        raise ValueError("the model has no mixture whose router chooses among experts (switch, mixtral, deepseek, …)")
    return changed, layers


def _inputs(model: nn.Module, layers: Layers, batches: Batches, loss: Loss) -> dict[str, list[Tensor]]:
    """The valid tokens (N, d) that each of the model's layers sees in each batch."""
    found: dict[str, list[Tensor]] = {name: [] for name in layers}

    def keep(name: str, x: Tensor, mask: Tensor | None = None, *_: Any, **__: Any) -> None:
        found[name].append(x.detach().flatten(0, -2) if mask is None else x.detach()[mask])

    with ExitStack() as stack, torch.no_grad():
        for name, layer in layers.items():
            hook = layer.register_forward_pre_hook(
                lambda _, args, options, name=name: keep(name, *args, **options), with_kwargs=True
            )
            stack.callback(hook.remove)
        for batch in batches:
            loss(model, batch)
    return found


def _report(before: nn.Module, after: nn.Module, names: Iterable[str], batch: Any, loss: Loss) -> list[Converted]:
    modes = {module: module.training for module in before.modules()}
    layers, changed = dict(moe_layers(before)), dict(moe_layers(after))
    tokens = _inputs(before.eval(), {name: layers[name] for name in names}, [batch], loss)
    rows = []
    for name in tokens:
        old, new, x = layers[name], changed[name], tokens[name][0].unsqueeze(0)
        with torch.no_grad():
            y = old(x)
            error = float((new(x) - y).norm() / y.norm())
        sizes = (sum(p.numel() for p in layer.parameters()) for layer in (old, new))
        rows.append(Converted(name, *sizes, error))
    for module, training in modes.items():
        module.training = training
    return rows


class _Seen:
    """Collects each expert's inputs as a Gram matrix, its load and its squared gradients for one stacked map."""

    def __init__(self, part: StackedLinear) -> None:
        experts, inputs, _ = part.weight.shape
        self.part = part
        self.grams = torch.zeros(experts, inputs, inputs, dtype=torch.float64)
        self.load = torch.zeros(experts, dtype=torch.float64)
        self.squares = torch.zeros(experts, inputs, dtype=torch.float64)

    def look(self, part: nn.Module, args: tuple[Any, ...]) -> None:
        z, way, *more = args
        require(way in ("rows", "batch"), "way", way, "'rows' or 'batch': tokens sent to their experts")
        for e in range(len(self.load)):
            rows = (z[e] if way == "batch" else z[more[0].group[: len(z)] == e]).detach().cpu().double()
            self.grams[e] += rows.t() @ rows
            self.load[e] += len(rows)

    def add_gradient(self) -> None:
        self.squares += self.part.weight.grad.cpu().double().square().mean(-1)

    def factors(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the base (i, o) and the factors left (E, i, rank) and right (E, rank, o)."""
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
    """A parametrisation that computes the owner's weights (E, i, o) from a base and low-rank differences."""

    def __init__(self, parts: tuple[Tensor, Tensor, Tensor]) -> None:
        super().__init__()
        self._parts: tuple[Tensor, ...] | None = parts

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Called once, when the parametrisation is registered: returns the factors fitted to the weight."""
        parts, self._parts = self._parts, None
        return parts

    def forward(self, base: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return base + left @ right
