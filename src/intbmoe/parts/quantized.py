"""Weights that are stored in 8 bits and dequantised where they are used.

    int8   w ≈ s q   with q ∈ {−127 … 127} and s = max|w| / 127
    fp8    w ≈ s q   with q in float8_e4m3fn (4 bits exponent, 3 bits mantissa) and s = max|w| / 448

Each output has its own s, the maximum over its inputs, which are dimension 1 of every linear map's weight.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from intbmoe.precision import wide

Storage = Literal["int8", "fp8"]
LARGEST = {"int8": 127.0, "fp8": torch.finfo(torch.float8_e4m3fn).max}


class Quantized(nn.Module):
    """A parametrisation that computes the owner's weight from two stored tensors: 8-bit numbers and their scales.

    The scales have the type that the weight is computed in. fp8 is stored as bytes, because ``model.to(dtype)``, which
    casts everything floating-point, would silently undo the quantisation.
    """

    def __init__(self, storage: Storage) -> None:
        super().__init__()
        self.storage = storage

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (outputs, inputs) or (E, inputs, outputs) → 8-bit numbers and scales."""
        exact = wide(weight.detach())
        scales = exact.abs().amax(1, keepdim=True) / LARGEST[self.storage]
        scales = torch.where(scales == 0, 1.0, scales).to(weight.dtype)
        # With the scale already rounded to its type, so that the numbers fit the scale that will be used.
        numbers = (exact / wide(scales)).clamp(-LARGEST[self.storage], LARGEST[self.storage])
        if self.storage == "int8":
            return numbers.round().to(torch.int8), scales
        return numbers.float().to(torch.float8_e4m3fn).view(torch.uint8), scales

    def forward(self, numbers: Tensor, scales: Tensor) -> Tensor:
        if self.storage == "fp8":
            numbers = numbers.view(torch.float8_e4m3fn)
        return numbers.to(scales.dtype).mul_(scales)  # in place, which halves the time: memory is the bottleneck

    def extra_repr(self) -> str:
        return self.storage


def store(owner: nn.Module, name: str, storage: Storage) -> None:
    """Keep ``owner``'s parameter ``name`` in 8 bits from now on."""
    parametrize.register_parametrization(owner, name, Quantized(storage), unsafe=True)


def stored_in_int8(owner: nn.Module, name: str) -> tuple[Tensor, Tensor] | None:
    """Numbers and scales of ``owner``'s parameter ``name``; None if it is not in int8 or has other parametrisations."""
    stored = owner._modules.get("parametrizations")
    if stored is None or name not in stored or len(stored[name]) != 1:
        return None
    (way,) = stored[name]
    if type(way) is not Quantized or way.storage != "int8":
        return None
    return stored[name].original0, stored[name].original1


def all_in_int8(weights: nn.ParameterList) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
    """Numbers and scales of all weights; None if one of them is not in int8."""
    stored = [stored_in_int8(weights, str(place)) for place in range(len(weights))]
    return tuple(zip(*stored, strict=True)) if all(stored) else None


def weight_dtype(weights: nn.ParameterList) -> torch.dtype:
    """The type the weights are computed in, found without dequantising any."""
    stored = weights._modules.get("parametrizations")
    return weights[0].dtype if stored is None or "0" not in stored else stored["0"].original1.dtype
