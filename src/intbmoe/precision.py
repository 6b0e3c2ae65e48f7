"""Choose the type in which each quantity is computed.

Router logits, softmax, composition, losses and the combine are computed in the *wide* type: the wider of the
input's type and float32. The large matrix products run in the *compute* type: autocast's if it is on, otherwise
the input's. A layer switches autocast off inside itself and casts explicitly, so that both types are certain.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, skipped if nothing changes: the call alone costs as much as a small operation."""
    return x if x.dtype == dtype else x.to(dtype)


def wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Autocast's type on the device of ``x``; None if it is off or absent (meta), and for float64, as in torch."""
    device = x.device.type
    if device != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def autocast_off(x: Tensor) -> AbstractContextManager:
    """A context in which operations on the device of ``x`` run in the types they are given."""
    return nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)


def bfloat16_is_slow(device: torch.device | str) -> bool:
    """Whether the device is a CPU without bfloat16 instructions; False if torch was built without oneDNN."""
    on_cpu = torch.device(device).type == "cpu" and torch.backends.mkldnn.is_available()
    return on_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map in the type of ``x``, whatever the type of the parameters."""
    return F.linear(x, cast(weight, x.dtype), None if bias is None else cast(bias, x.dtype))
