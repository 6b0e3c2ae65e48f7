"""Merged matrices in chunks: in forward and backward, at most ``limit`` of them exist at any time.

Autograd would keep all G merged matrices for the backward pass, and build all G gradients at once. Here the backward
pass merges each chunk again, which costs G·E·|W| multiplications: with S inputs per group, E/S of the product.
"""

import torch
from torch import Tensor
from torch.autograd import Function


def merged_mm(z: Tensor, a: Tensor, weight: Tensor, limit: int) -> Tensor:
    """The same as ``naive.merged_mm``, ``limit`` groups at a time."""
    return _MergedMM.apply(z, a, weight, limit)


def _merge(a: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    experts, inputs, outputs = weight.shape
    return (a @ weight.reshape(experts, -1)).view(-1, inputs, outputs).to(dtype)


class _MergedMM(Function):
    @staticmethod
    def forward(ctx, z, a, weight, limit):
        ctx.save_for_backward(z, a, weight)
        ctx.limit = limit
        weight = weight.to(a.dtype)
        chunks = zip(z.split(limit), a.split(limit), strict=True)
        return torch.cat([torch.bmm(z_part, _merge(a_part, weight, z.dtype)) for z_part, a_part in chunks])

    @staticmethod
    def backward(ctx, grad):
        z, a, weight = ctx.saved_tensors
        wide_weight = weight.to(a.dtype)
        flat_weight = wide_weight.reshape(weight.shape[0], -1)
        flat_grad = torch.zeros_like(flat_weight) if ctx.needs_input_grad[2] else None
        z_grads, a_grads = [], []
        for z_part, a_part, grad_part in zip(
            z.split(ctx.limit), a.split(ctx.limit), grad.split(ctx.limit), strict=True
        ):
            z_grads.append(torch.bmm(grad_part, _merge(a_part, wide_weight, z.dtype).transpose(1, 2)))
            merged_grad = torch.bmm(z_part.transpose(1, 2), grad_part).reshape(-1, flat_weight.shape[1]).to(a.dtype)
            a_grads.append(merged_grad @ flat_weight.t())
            if flat_grad is not None:
                flat_grad = torch.addmm(flat_grad, a_part.t(), merged_grad)
        weight_grad = None if flat_grad is None else flat_grad.view(weight.shape).to(weight.dtype)
        return torch.cat(z_grads), torch.cat(a_grads), weight_grad, None
