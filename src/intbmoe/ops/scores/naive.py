"""The specification, in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from intbmoe.precision import cast, linear, wide


def router_scores(
    x: Tensor, hidden: tuple[Tensor, Tensor], scores: tuple[Tensor, Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(N, d) tokens, weight and bias of both maps → (N, K) scores in the wide type, and the tokens in ``dtype``."""
    return linear(F.relu(linear(wide(x), *hidden)), *scores), cast(x, dtype)
