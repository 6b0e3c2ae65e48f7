"""Experts that every token passes, beside those it is sent to: three kinds, or a module of the user's own."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.ops.backend import Backend
from intbmoe.parts.experts import SwiGLU
from intbmoe.precision import cast, linear

SharedKind = Literal["swiglu", "mlp", "linear"]


class SiLUNetwork(nn.Module):
    """``down(SiLU(up x))``, with biases."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, backend: Backend | None = None) -> Tensor:
        return linear(F.silu(linear(x, self.up.weight, self.up.bias)), self.down.weight, self.down.bias)


class LinearMap(nn.Linear):
    """A linear map with a bias that computes in the type of its input."""

    def forward(self, x: Tensor, backend: Backend | None = None) -> Tensor:
        return linear(x, self.weight, self.bias)


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
    # The user's module does not cast by itself: autocast, which the layer has switched off, does it where types differ.
    mixed = any(parameter.dtype != x.dtype for parameter in expert.parameters())
    with torch.autocast(x.device.type, x.dtype) if mixed else nullcontext():
        y = expert(x)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        found = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise ValueError(
            f"layer.shared ({type(expert).__name__}) gave {found} for tokens {tuple(x.shape)}: a shared expert of your "
            f"own must return a tensor of the tokens' shape"
        )
    return cast(y, x.dtype)
