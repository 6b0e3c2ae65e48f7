"""Experts that every token passes, beside those it is sent to: three kinds, or a module of the user's own."""

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.ops.backend import Backend
from intbmoe.parts.experts import SwiGLU
from intbmoe.parts.linear import Linear, called
from intbmoe.precision import cast

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
    """``count`` shared experts as one module; one alone is not wrapped, so its parameters keep short names."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "swiglu": lambda: SwiGLU(dim, hidden),
        "mlp": lambda: SiLUNetwork(dim, hidden),
        "linear": lambda: LinearMap(dim, dim),
    }
    return makers[kind]() if count == 1 else SummedExperts(makers[kind]() for _ in range(count))


def run_shared(expert: nn.Module, x: Tensor, backend: Backend) -> Tensor:
    """(N, d) tokens in the compute type → (N, d) in it; ``expert`` is one of ours or the user's own module."""
    if isinstance(expert, OURS):
        return expert(x, backend)
    y = called(x, expert, expert)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        found = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise ValueError(
            f"layer.shared ({type(expert).__name__}) gave {found} for tokens {tuple(x.shape)}: a shared expert of your "
            f"own must return a tensor of the tokens' shape"
        )
    return cast(y, x.dtype)
