"""Which type a number is computed in.

Router logits, softmax, composition, losses and the combine are computed in the *wide* type: the wider of the
input's type and float32. The large matrix products run in the *compute* type: autocast's where it is on, else
the input's. A layer switches autocast off inside itself and casts explicitly, so that both are what they say.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """``x`` in the wider of its own type and float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type of the large matrix products for input ``x``."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map in the type of ``x``, whatever the type of the parameters."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
