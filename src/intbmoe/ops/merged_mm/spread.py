"""No matrix is merged: Σ_e a_e (z W_e) is one product of all a_e z, side by side, with the E stacked matrices.

That costs E products instead of one, but no group's matrix is written to memory or read from it, which is cheaper for
small groups. The a_e z are built for some groups at a time, and again in the backward pass.
"""

import torch
from torch import Tensor
from torch.autograd import Function


def plain(z: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    """The same as ``naive.merged_mm``, all at once, with coefficients rounded to the type of ``z``."""
    return (_spread(z, a.to(z.dtype)) @ weight.to(z.dtype).flatten(0, 1)).unflatten(0, z.shape[:2])


def merged_mm(z: Tensor, a: Tensor, weight: Tensor, limit: int) -> Tensor:
    """The same as ``plain``, ``limit`` groups at a time."""
    return _SpreadMM.apply(z, a, weight, limit)


def _spread(z: Tensor, a: Tensor) -> Tensor:
    """(G, S, i) and (G, E) → (G·S, E·i)."""
    return (a[:, None, :, None] * z.unsqueeze(2)).flatten(2).flatten(0, 1)


class _SpreadMM(Function):
    @staticmethod
    def forward(ctx, z, a, weight, limit):
        ctx.save_for_backward(z, a, weight)
        ctx.limit = limit
        weight = weight.to(z.dtype)
        return torch.cat([plain(*parts, weight) for parts in zip(z.split(limit), a.split(limit), strict=True)])

    @staticmethod
    def backward(ctx, grad):
        z, a, weight = ctx.saved_tensors
        stacked = weight.to(z.dtype).flatten(0, 1)
        weight_grad = torch.zeros_like(stacked, dtype=a.dtype) if ctx.needs_input_grad[2] else None
        z_grads, a_grads = [], []
        for z_part, a_part, grad_part in zip(
            z.split(ctx.limit), a.to(z.dtype).split(ctx.limit), grad.split(ctx.limit), strict=True
        ):
            rows = grad_part.reshape(-1, weight.shape[2])
            if weight_grad is not None:
                weight_grad = weight_grad + _spread(z_part, a_part).t() @ rows
            spread_grad = (rows @ stacked.t()).reshape(-1, *weight.shape[:2])  # (rows, E, i)
            row_weights = a_part.unsqueeze(1).expand(-1, z.shape[1], -1).flatten(0, 1)
            z_grads.append(torch.bmm(row_weights.unsqueeze(1), spread_grad).squeeze(1))
            row_grads = torch.bmm(spread_grad, z_part.flatten(0, 1).unsqueeze(2)).squeeze(2)
            a_grads.append(row_grads.reshape(*z_part.shape[:2], weight.shape[0]).sum(1, dtype=a.dtype))
        if weight_grad is not None:
            weight_grad = weight_grad.view_as(weight).to(weight.dtype)
        return torch.cat(z_grads).reshape(z.shape), torch.cat(a_grads), weight_grad, None
