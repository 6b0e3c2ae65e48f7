"""The cross-entropy of a language model: scores over a large vocabulary, and one correct id per token."""

from torch import Tensor

from intbmoe.ops.backend import choose_backend
from intbmoe.ops.cross_entropy import naive


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """(…, V) scores and (…) ids from 0 to V − 1, none of them to be ignored → (…) losses."""
    rows, ids = logits.flatten(0, -2), targets.flatten()
    if choose_backend(rows) == "fused":
        from intbmoe.ops.cross_entropy import fused

        losses, _ = fused.cross_entropy(rows, ids)
    else:
        losses = naive.cross_entropy(rows, ids)
    return losses.view_as(targets)
