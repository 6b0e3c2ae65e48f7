"""A linear map of our own, which no host takes for one of its own."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from intbmoe.precision import linear


class Linear(nn.Module):
    """A linear map in the type of its input, whatever the type of its parameters; it starts as ``nn.Linear`` does.

    Not an ``nn.Linear``, because a layer reads these weights itself, in kernels. What others do to every ``nn.Linear``
    they find would change its start (Hugging Face, timm), its precision (quantisers) or its memory (vLLM), or have no
    effect (PEFT's adapters), in silence.
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


def untouched(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling ``module`` runs the forward of ``kind`` and nothing else, so that it need not be called.

    A subclass, a wrapper, a hook or a forward of its own (accelerate's) says that somebody wants to be in between.
    """
    return (
        type(module) is kind
        and "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
    )


def called(x: Tensor, network: Callable[[Tensor], Tensor], owner: nn.Module) -> Tensor:
    """``network(x)`` in the type of ``x``, where the modules of ``owner`` do not cast by themselves.

    Autocast, which a layer has switched off, does it if types differ.
    """
    mixed = any(weight.is_floating_point() and weight.dtype != x.dtype for weight in owner.parameters())
    with torch.autocast(x.device.type, x.dtype) if mixed else nullcontext():
        return network(x)
