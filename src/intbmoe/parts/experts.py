"""Expert networks: one that is always on, and E stacked ones that run in four ways.

The equation of a stacked network is written once; each way supplies its own linear map:

    rows      rows sorted by expert, each through its expert           sparse methods
    batch     (E, S, d), each expert on its own S inputs               Soft MoE, Expert Choice, dense mixtures
    merged    (G, S, d), group g through the expert Σ_e a_{g,e} θ_e    merged parameters
    composed  the same, with experts built earlier by ``compose``      one composition for a whole text
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from intbmoe.layer import LayerConfig, MoELayer, Quantities
from intbmoe.ops.backend import Backend, choose_backend
from intbmoe.ops.eager import untouched
from intbmoe.ops.experts import native
from intbmoe.ops.grouped_mm import grouped_mm
from intbmoe.ops.merged_mm import merged_mm
from intbmoe.ops.permute import Permutation
from intbmoe.ops.swiglu import swiglu
from intbmoe.parts.dispatch import combine, dispatch, spread, to_rows
from intbmoe.parts.linear import Linear, called
from intbmoe.parts.quantized import stored_in_int8
from intbmoe.settings import PositiveInt


class SwiGLU(nn.Module):
    """``down(SiLU(gate x) ⊙ up x)``, three matrices without biases."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, backend: Backend | None = None) -> Tensor:
        """(…, d) → (…, d), in the type of ``x``; with ``backend=None`` the input decides."""
        maps = self.gate, self.up, self.down
        # A map with another kind of weight, such as a quantised one, can only be called.
        if not all(untouched(each, nn.Linear) and type(each.weight) is nn.Parameter for each in maps):
            return called(x, lambda x: self.down(F.silu(self.gate(x)) * self.up(x)), self)
        return swiglu(x, *(each.weight for each in maps), backend or choose_backend(x))


class StackedLinear(nn.Module):
    """E linear maps (E, inputs, outputs), applied as z W; each is initialised like ``nn.Linear``, with zero biases."""

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, inputs, outputs))
        self.bias = nn.Parameter(torch.empty(experts, outputs)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # The bound is that of one slice: a fan computed from the whole stack would be wrong.
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        experts, inputs, outputs = self.weight.shape
        return f"{experts} × ({inputs}, {outputs}), bias={self.bias is not None}"

    def held(self) -> tuple[Tensor, Tensor | None]:
        """Weights and biases of the experts that this rank holds: all of them, unless under expert parallelism."""
        return self.weight, self.bias

    def forward(self, z: Tensor, way: Literal["rows", "batch", "merged"], *given: Any) -> Tensor:
        """Run in one of three ways, all through the module's call, as hooks, adapters and parametrisations expect."""
        return {"rows": self._rows, "batch": self._batch, "merged": self._merged}[way](z, *given)

    def _rows(self, z: Tensor, plan: Permutation) -> Tensor:
        """(M, i) rows sorted by expert → (M, o)."""
        weight, bias = self.held()
        out = grouped_mm(z, weight.to(z.dtype), plan.ends, plan.backend, complete=plan.complete)
        return out if bias is None else out + spread(bias.to(z.dtype), plan)

    def open_rows(self, z: Tensor, plan: Permutation) -> Tensor:
        """Like ``_rows``, but without the bias and leaving rows without an expert unwritten."""
        return grouped_mm(z, self.weight.to(z.dtype), plan.ends, plan.backend, complete=True)

    def _batch(self, z: Tensor) -> Tensor:
        """(E, S, i) → (E, S, o), expert e on its own inputs."""
        out = torch.bmm(z, self.weight.to(z.dtype))
        return out if self.bias is None else out + self.bias.to(z.dtype).unsqueeze(1)

    def _merged(self, z: Tensor, a: Tensor) -> Tensor:
        """(G, S, i) inputs and (G, E) coefficients → (G, S, o)."""
        out = merged_mm(z, a, self.weight)
        return out if self.bias is None else out + (a @ self.bias.to(a.dtype)).to(z.dtype).unsqueeze(1)

    def compose(self, a: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """(G, E) coefficients → (G, i, o) weights and (G, 1, o) biases, merged in the type of ``a``."""
        weight = torch.einsum("ge,eio->gio", a, self.weight.to(a.dtype)).to(dtype)
        return weight, None if self.bias is None else (a @ self.bias.to(a.dtype)).to(dtype).unsqueeze(1)


Apply = Callable[[StackedLinear, Tensor], Tensor]
Composed = dict[str, tuple[Tensor, Tensor | None]]  # weight and bias of each linear map, by its name


class Exchange(Protocol):
    """Sends rows to the ranks that hold their experts (``intbmoe.parallel.experts``)."""

    own: slice
    """Which experts this rank holds."""

    def __call__(self, experts: "StackedExperts", rows: Tensor, counts: Tensor, backend: Backend) -> Tensor:
        """(M, d) rows sorted by expert, (E,) rows per expert → outputs (M, d); zero for rows without an expert."""


class StackedExperts(nn.Module):
    """E experts of one shape; subclasses define ``network`` in terms of a given linear map."""

    NETWORK: ClassVar[Literal["gelu", "swiglu"] | None] = None
    """Its name in ``ops/experts/``; None if it has no kernels. A subclass with another ``network`` must set it."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.count = experts
        self.exchange: Exchange | None = None  # set under expert parallelism

    def network(self, z: Tensor, apply: Apply) -> Tensor:
        """The expert's equation, with ``apply(linear, z)`` for each of its linear maps."""
        raise TypeError(f"{type(self).__name__} does not define network()")

    def rows(self, z: Tensor, plan: Permutation) -> Tensor:
        if self.exchange is not None:
            return self.exchange(self, z, plan.counts, plan.backend)
        return self.rows_here(z, plan)

    def rows_here(self, z: Tensor, plan: Permutation) -> Tensor:
        """Like ``rows``, for the experts that this rank holds."""
        return self.network(z, lambda layer, z: layer(z, "rows", plan))

    def batch(self, z: Tensor) -> Tensor:
        if self.exchange is not None:
            counts = torch.full((self.count,), z.shape[1], device=z.device)
            return self.exchange(self, z.flatten(0, 1), counts, choose_backend(z)).view_as(z)
        return self.network(z, lambda layer, z: layer(z, "batch"))

    def merged(self, z: Tensor, a: Tensor) -> Tensor:
        return self.network(z, lambda layer, z: layer(z, "merged", a))

    def compose(self, a: Tensor, dtype: torch.dtype) -> Composed:
        """Merge experts with (G, E) coefficients, one per group, for any number of calls of ``composed``."""
        return {name: layer.compose(a, dtype) for name, layer in self.named_children()}

    def composed(self, z: Tensor, built: Composed) -> Tensor:
        """(G, S, d) → (G, S, d), each group through its own merged expert."""
        names = {layer: name for name, layer in self.named_children()}

        def apply(layer: StackedLinear, z: Tensor) -> Tensor:
            weight, bias = built[names[layer]]
            return torch.bmm(z, weight) if bias is None else torch.baddbmm(bias, z, weight)

        return self.network(z, apply)

    def route(self, x: Tensor, ids: Tensor, weights: Tensor, complete: bool = False) -> tuple[Tensor, Tensor]:
        """(N, d) tokens, (N, k) chosen experts (−1: none) and weights → weighted sums (N, d), load (E,).

        The sum is in the type of ``weights``. Pass ``complete`` if no choice is −1.
        """
        # Checked first, because a compiler must not see the rest.
        if choose_backend(x, has_native=True) == "native" and weights.dtype == x.dtype:
            found = self._stored()
            if found is not None:
                return native.run_experts(self.NETWORK, x, ids, weights, *found)
        plan = dispatch(ids, self.count, choose_backend(x), complete)
        # If every row has an expert there is nothing to skip, and plain operations launch faster.
        if plan.backend == "fused" and not complete and self._readable():
            return self._route_open(x, weights, plan), plan.counts
        return combine(self.rows(to_rows(x, plan), plan), weights, plan), plan.counts

    def open_rows(self, z: Tensor, plan: Permutation) -> Tensor:
        """Like ``rows``, with kernels that skip rows without an expert: see ``ops.expert_rows``."""
        raise TypeError(f"{type(self).__name__} does not define open_rows()")

    def _stored(self) -> tuple[list[Tensor], list[Tensor]] | None:
        """Parameters and scales of int8 weights in the form the compiled library takes; None if it cannot."""
        layers = list(self.children())
        stored = [stored_in_int8(layer, "weight") for layer in layers]
        in_int8 = None not in stored
        if not self._readable(type_before_parametrizations if in_int8 else type):
            return None
        weights = [numbers for numbers, _ in stored] if in_int8 else [layer.weight for layer in layers]
        pairs = zip(weights, (layer.bias for layer in layers), strict=True)
        return [each for pair in pairs for each in pair if each is not None], [s for _, s in stored] if in_int8 else []

    def _readable(self, type_of: Callable[[nn.Module], type] = type) -> bool:
        """Whether the network is known and reading its maps' weights is equivalent to calling the maps."""
        if self.NETWORK is None or self.exchange is not None:
            return False
        if not torch.compiler.is_compiling() and torch.is_anomaly_enabled():
            return False  # anomaly detection looks for NaN in the gradients of all rows, even unwritten ones
        return all(type_of(layer) is StackedLinear and untouched(layer, type(layer)) for layer in self.children())

    def _route_open(self, x: Tensor, weights: Tensor, plan: Permutation) -> Tensor:
        from intbmoe.ops.combine import fused
        from intbmoe.ops.expert_rows.fused import gather

        rows = self.open_rows(gather(x, plan.token, plan.inverse, plan.ends), plan)
        return fused.combine(rows, weights, plan.token, plan.choice, plan.inverse, plan.ends)

    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        """(N, d) tokens, each through all experts, and (N, E) weights → weighted sums (N, d), in the weights' type."""
        outputs = self.batch(x.expand(self.count, *x.shape))
        return torch.einsum("ne,end->nd", weights, outputs.to(weights.dtype))

    def expert_parameters(self) -> int:
        # Not by indexing, which would gather sharded parameters.
        return sum(parameter.numel() // parameter.shape[0] for parameter in self.parameters())


class FFNExperts(StackedExperts):
    """``down(GELU(up z))``, with biases."""

    NETWORK = "gelu"

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__(experts)
        self.up = StackedLinear(experts, dim, hidden, bias=True)
        self.down = StackedLinear(experts, hidden, dim, bias=True)

    def network(self, z: Tensor, apply: Apply) -> Tensor:
        return apply(self.down, F.gelu(apply(self.up, z)))

    def open_rows(self, z: Tensor, plan: Permutation) -> Tensor:
        from intbmoe.ops.expert_rows.fused import activate

        inner = activate(self.up.open_rows(z, plan), self.up.bias, plan.ends, True)
        return activate(self.down.open_rows(inner, plan), self.down.bias, plan.ends, False)


class SwiGLUExperts(StackedExperts):
    """``down(SiLU(gate z) ⊙ up z)``, without biases."""

    NETWORK = "swiglu"

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__(experts)
        self.gate = StackedLinear(experts, dim, hidden, bias=False)
        self.up = StackedLinear(experts, dim, hidden, bias=False)
        self.down = StackedLinear(experts, hidden, dim, bias=False)

    def network(self, z: Tensor, apply: Apply) -> Tensor:
        return apply(self.down, F.silu(apply(self.gate, z)) * apply(self.up, z))

    def open_rows(self, z: Tensor, plan: Permutation) -> Tensor:
        from intbmoe.ops.expert_rows.fused import gate, twice

        first, second = twice(z, plan.ends)
        inner = gate(self.gate.open_rows(first, plan), self.up.open_rows(second, plan), plan.ends)
        return self.down.open_rows(inner, plan)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(LayerConfig):
    """Options of every method with stacked experts. ``experts`` is literal: exactly that many are made."""

    experts: PositiveInt = 8
    """E, the number of experts."""
    expert: Literal["gelu", "swiglu"] = "gelu"
    """The expert network: a GELU FFN with biases, or SwiGLU without."""

    def make_experts(self) -> StackedExperts:
        network = FFNExperts if self.expert == "gelu" else SwiGLUExperts
        return network(self.experts, self.dim, self.hidden)


class ChoosingLayer(MoELayer):
    """A layer that sends each token to ``executed`` of its E stacked ``experts``."""

    REFUSES: ClassVar = {}

    @property
    def executed(self) -> float:
        """Experts per token, on average; if the router decides, the number that it is trained for."""
        return self.config.top_k

    @property
    def choices(self) -> int:
        return self.config.experts

    def quantities(self) -> Quantities:
        used = max(1, round(self.executed))
        return Quantities(participation=used, execution=used, materialization=0)

    def active_parameters(self) -> int:
        one = self.experts.expert_parameters()
        return super().active_parameters() - self.config.experts * one + round(self.executed * one)


class RoutedLayer(ChoosingLayer):
    """A linear router without a bias that chooses among E stacked experts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.router = Linear(self.config.dim, self.config.experts, bias=False)
        self.experts = self.config.make_experts()
