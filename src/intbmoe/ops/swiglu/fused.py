"""A SwiGLU network as one operation: its backward begins with the last product and SwiGLU's derivatives together."""

import torch
import torch.nn.functional as F
from torch import Tensor

from intbmoe.ops.operation import define, schema_of
from intbmoe.ops.swiglu.fused_hidden import hidden_gradient
from intbmoe.ops.swiglu.fused_join import allocate_joined, join
from intbmoe.ops.swiglu.fused_product import product
from intbmoe.ops.swiglu.fused_tokens import token_gradient
from intbmoe.ops.swiglu.fused_weights import products, weight_gradients
from intbmoe.ops.triton_support import aligned


def _fit(x, gate, up, down) -> bool:
    """Whether the products can take the matrices as they are, gate and up only joined."""
    types = {x.dtype, gate.dtype, up.dtype, down.dtype}
    return len(types) == 1 and gate.shape == (aligned(gate.shape[0], x.dtype), x.shape[1])


def _run(x, gate, up, down, keep):
    if _fit(x, gate, up, down):
        joined, filled = torch.cat([gate, up]), down.new_empty(0)
    else:
        joined, filled = join(gate, up, down, x.shape[1], x.dtype)
        down = filled
    inner, kept = product(x, joined, keep)
    return F.linear(inner, down), inner if keep else inner.new_empty(0), kept, joined, filled


def _allocate(x, gate, up, down, keep: bool):
    joined, filled = allocate_joined(gate, x.shape[1], x.dtype)
    if _fit(x, gate, up, down):
        filled = down.new_empty(0)
    rows, width = x.shape[0] if keep else 0, joined.shape[0]
    inner = x.new_empty(rows, width // 2) if keep else x.new_empty(0)
    return torch.empty_like(x, memory_format=torch.contiguous_format), inner, x.new_empty(rows, width), joined, filled


def _save(ctx, inputs, output):
    x, gate, up, down, _ = inputs
    _, inner, kept, joined, filled = output
    ctx.fit, ctx.shape, ctx.dtypes = _fit(x, gate, up, down), gate.shape, [each.dtype for each in (gate, up, down)]
    factors = (x, inner) if any(ctx.needs_input_grad[1:4]) else (None, None)  # only the matrices' gradients need them
    ctx.save_for_backward(*factors, kept, joined, down if ctx.fit else filled)


def _differentiate(ctx, grad, *_):
    if grad is None:
        return (None,) * 5
    x, inner, kept, joined, down = ctx.saved_tensors
    needs_x, *needed = ctx.needs_input_grad[:4]
    if needs_x:
        hidden_grad, x_grad = token_gradient(grad, down, kept, joined)
    else:
        hidden_grad, x_grad = hidden_gradient(grad, down, kept), None
    gradients = [None] * 3
    if any(needed) and ctx.fit:
        joined_grad, down_grad = products(hidden_grad, x, inner, grad)
        gradients = *joined_grad.chunk(2), down_grad
    elif any(needed):
        gradients = weight_gradients(hidden_grad, x, inner, grad, *ctx.shape, ctx.dtypes[0])
        gradients = (each.to(dtype) for each, dtype in zip(gradients, ctx.dtypes, strict=True))
    return x_grad, *(each if need else None for each, need in zip(gradients, needed, strict=True)), None


def _flops(x_shape, gate_shape, *_, **__):
    return 6 * x_shape[0] * x_shape[1] * gate_shape[0]


_network = define("swiglu", schema_of(_allocate, 5), _run, _allocate, _save, _differentiate, _flops)


def swiglu_network(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """(N, d) tokens, (h, c), (h, c) and (c, h) weights with c ≤ d → (N, d), zero after column c."""
    keep = torch.is_grad_enabled() and any(each.requires_grad for each in (x, gate, up, down))
    return _network(x, gate, up, down, keep)[0]
