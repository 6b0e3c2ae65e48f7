"""Our own linear map, which host libraries do not treat like an ``nn.Linear``."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from intbmoe.precision import linear


class Linear(nn.Module):
    """A linear map in the type of its input, whatever the type of its parameters; initialised like ``nn.Linear``.

    It is not an ``nn.Linear``, because layers read these weights directly, in kernels. Libraries that modify every
    ``nn.Linear`` they find would silently change its initialisation (Hugging Face, timm), its precision (quantisers) or
    its memory (vLLM), or have no effect (PEFT's adapters).
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.Linear.reset_parameters(self)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def called(x: Tensor, network: Callable[[Tensor], Tensor], owner: nn.Module) -> Tensor:
    """``network(x)`` in the type of ``x``, for modules of ``owner`` that do not cast their weights themselves.

    If types differ, autocast, which a layer has switched off, is switched on again for the call.
    """
    mixed = any(weight.is_floating_point() and weight.dtype != x.dtype for weight in owner.parameters())
    with torch.autocast(x.device.type, x.dtype) if mixed else nullcontext():
        return network(x)
