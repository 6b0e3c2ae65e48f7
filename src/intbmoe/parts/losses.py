"""Auxiliary losses over the valid tokens of *all* ranks.

Data parallelism averages gradients over ranks. A loss that every rank computes from globally summed statistics, and
whose backward sums again, then has the gradient of a single process on the whole batch: each rank gets the sum of the
ranks' equal upstream gradients, and averaging divides by the number of ranks.
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.autograd import Function


class _GlobalSum(Function):
    @staticmethod
    def forward(ctx, x):
        return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", dist.group.WORLD))

    @staticmethod
    def backward(ctx, grad):
        return _GlobalSum.apply(grad)


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of ``x`` over all ranks, differentiable; ``x`` itself in a single process."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return _GlobalSum.apply(x)
    return x


def global_sum(x: Tensor) -> Tensor:
    """Sum a loss's statistic over all ranks; without gradients, return this rank's own.

    Without gradients the loss is not trained on, and a rank that runs its model alone must not wait for the others in a
    collective.
    """
    return sum_over_ranks(x) if torch.is_grad_enabled() else x


def count_valid(x: Tensor, mask: Tensor | None) -> Tensor:
    """How many of this rank's tokens x (B, T, d) are valid."""
    if mask is None:
        return x.new_full((), x.shape[0] * x.shape[1], dtype=torch.int64)
    return mask.sum()


def masked_sum(values: Tensor, mask: Tensor | None) -> Tensor:
    """(N, c) values of tokens, validity (…) with N entries → (c,) sum over the valid ones."""
    return values.sum(0) if mask is None else torch.where(mask.reshape(-1, 1), values, 0).sum(0)


def balance_loss(probabilities: Tensor, load: Tensor, mask: Tensor | None, mass: float = 1.0) -> Tensor:
    """E·Σ_e f_e P_e: 1 if both are uniform, E if everything goes to one expert with certainty.

    ``probabilities`` (N, E) of this rank's tokens sum to ``mass`` for each token, ``load`` (E,) counts the assignments
    before any dropping, and ``mask`` says which tokens are valid. f_e is e's share of the assignments, P_e the mean
    probability; the gradient flows only through P.
    """
    load = global_sum(load.to(probabilities.dtype))
    share = load / load.sum().clamp(min=1)
    tokens = count_valid(probabilities.unsqueeze(0), mask).to(probabilities.dtype)
    mean = global_sum(masked_sum(probabilities, mask) / mass) / global_sum(tokens).clamp(min=1)
    return probabilities.shape[1] * (share * mean).sum()


def squared_variation(x: Tensor) -> Tensor:
    """(standard deviation / mean)², population form, over the last dimension; 0 if the mean is 0."""
    mean = x.mean(-1)
    variance = (x - mean.unsqueeze(-1)).square().mean(-1)
    return variance / torch.where(mean == 0, 1, mean.square())
