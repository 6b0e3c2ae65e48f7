"""entmax-1.5: a mapping between softmax and argmax that gives exact zeros.

Peters, Niculae and Martins, "Sparse Sequence-to-Sequence Models", ACL 2019.

    p = max(0, z/2 − τ)²,  τ such that Σ p = 1

One class gets all the weight once its score leads by 2.
"""

import torch
from torch import Tensor
from torch.autograd import Function

from intbmoe.ops.eager import transformed


def entmax15(scores: Tensor) -> Tensor:
    """(…, E) scores → (…, E) weights that sum to 1, in the type of ``scores``; a score of −inf gives weight 0."""
    return _weights(scores) if transformed() else _Entmax15.apply(scores)


def _root(x: Tensor) -> Tensor:
    """√x, or 0 if x is not positive; never the root of 0, whose derivative is infinite."""
    inside = x > 0
    return torch.where(inside, torch.where(inside, x, 1).sqrt(), 0)


def _weights(scores: Tensor) -> Tensor:
    half = scores / 2
    half = half - half.amax(-1, keepdim=True)
    # Scores 1 or more below the largest have weight 0 and do not affect τ. Moved away from that border, they stay
    # out despite rounding, and the sums of squares stay small, hence accurate, for any scores.
    half = torch.where(half <= -1, -2, half)
    ordered = half.sort(dim=-1, descending=True).values
    count = torch.arange(1, half.shape[-1] + 1, dtype=half.dtype, device=half.device)
    mean = ordered.cumsum(-1) / count
    spread = ordered.square().cumsum(-1) - count * mean.square()
    # τ_j solves Σ (z/2 − τ)² = 1 over the j largest scores; the right j is the largest that keeps all j of them.
    thresholds = mean - _root((1 - spread) / count)
    support = (thresholds <= ordered).sum(-1, keepdim=True)
    threshold = thresholds.gather(-1, (support - 1).clamp(min=0))  # the support is empty only if a score is NaN
    return (half - threshold).clamp(min=0).square()


class _Entmax15(Function):
    """entmax with its own derivative, which needs only the result: autograd through the sort would be slow."""

    @staticmethod
    def forward(ctx, scores):
        weights = _weights(scores)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, grad):
        (weights,) = ctx.saved_tensors
        root = _root(weights)
        centre = (grad * root).sum(-1, keepdim=True) / root.sum(-1, keepdim=True)
        return root * (grad - centre)
