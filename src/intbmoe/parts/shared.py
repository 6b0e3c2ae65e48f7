"""Shared experts, which every token uses besides its routed ones: one of three kinds, or the user's own module."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.checks import require
from intbmoe.ops.backend import Backend, choose_backend
from intbmoe.ops.branches import SHARED, Branches
from intbmoe.parts.experts import ExpertsConfig, RoutedLayer, SwiGLU
from intbmoe.parts.linear import Linear, called
from intbmoe.precision import cast
from intbmoe.settings import AtMost, MustBe, NonNegativeInt, PositiveInt

SharedKind = Literal["swiglu", "mlp", "linear"]


class SiLUNetwork(nn.Module):
    """``down(SiLU(up x))``, with biases."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, backend: Backend | None = None) -> Tensor:
        return called(x, lambda x: self.down(F.silu(self.up(x))), self)


class LinearMap(Linear):
    """A linear map with a bias."""

    def forward(self, x: Tensor, backend: Backend | None = None) -> Tensor:
        return super().forward(x)


class SummedExperts(nn.ModuleList):
    """Several experts, whose outputs are added."""

    def forward(self, x: Tensor, backend: Backend | None = None) -> Tensor:
        first, *others = (expert(x, backend) for expert in self)
        return sum(others, first)


OURS = (SwiGLU, SiLUNetwork, LinearMap, SummedExperts)


def make_shared(kind: SharedKind, dim: int, hidden: int, count: int) -> nn.Module:
    """Make ``count`` shared experts as one module; a single one is not wrapped, so its parameters keep short names."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "swiglu": lambda: SwiGLU(dim, hidden),
        "mlp": lambda: SiLUNetwork(dim, hidden),
        "linear": lambda: LinearMap(dim, dim),
    }
    return makers[kind]() if count == 1 else SummedExperts(makers[kind]() for _ in range(count))


def run_shared(expert: nn.Module, x: Tensor, backend: Backend, branches: Branches) -> Tensor:
    """(N, d) tokens → (N, d), both in the compute type; to be read only after ``branches`` are joined.

    ``expert`` is one of ours or the user's own module, which may do anything and therefore does not run in a branch.
    """
    if isinstance(expert, OURS):
        with branches.branch(SHARED, x):
            return expert(x, backend)
    y = called(x, expert, expert)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        found = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise ValueError(
            f"layer.shared ({type(expert).__name__}) returned {found} for tokens {tuple(x.shape)}: your own shared "
            f"expert must return a tensor of the tokens' shape"
        )
    return cast(y, x.dtype)


@dataclass(frozen=True, kw_only=True)
class SharedConfig(ExpertsConfig):
    """Top-k of SwiGLU experts, plus shared ones. Several shared experts are computed as one of their joint width."""

    expert: Annotated[Literal["swiglu"], MustBe("'swiglu' in this method")] = "swiglu"
    """The expert network: always SwiGLU without biases."""
    top_k: Annotated[PositiveInt, AtMost("experts")] = 2
    """k, routed experts per token."""
    shared_experts: NonNegativeInt = 1
    """The number of experts that every token uses; 0 for none."""

    @property
    def shared_width(self) -> int:
        """The inner width of all shared experts together."""
        return self.shared_experts * self.hidden


class SharedLayer(RoutedLayer):
    """Routed experts, plus a shared one that is always on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.shared = SwiGLU(self.config.dim, self.config.shared_width) if self.config.shared_experts else None

    def run_experts(self, tokens: Tensor, ids: Tensor, weights: Tensor, complete: bool) -> tuple[Tensor, Tensor]:
        """Like ``StackedExperts.route``, with the shared expert's output added."""
        if self.shared is None:
            return self.experts.route(tokens, ids, weights, complete)
        branches = Branches(tokens)
        shared = run_shared(self.shared, tokens, choose_backend(tokens), branches)
        y, load = self.experts.route(tokens, ids, weights, complete)
        branches.join(SHARED, shared)
        return y + shared, load

    @torch.no_grad()
    def start_as(self, module: nn.Module) -> None:
        experts = self.config.shared_experts
        require(experts > 0, "shared_experts", experts, "at least 1 if a module is to become the shared expert")
        self.shared = module
        self.experts.down.weight.zero_()
