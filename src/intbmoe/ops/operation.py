"""Operations of our own: known to torch as custom ops, called directly where nobody looks.

Compilers, counters, profilers, tensor subclasses and modes must see one opaque operation with a shape function and a
derivative, so each is registered with torch. But torch's way to a Python kernel and its derivative takes longer than
launching the kernel does, and an eager layer starts dozens: with plain tensors and nothing in between, the kernel is
called straight away, inside one autograd node where gradients are wanted.

Defined by schema rather than by ``torch.library.custom_op``, whose wrapper imports the compiler at the first call (over
a second).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter, type(None), int, float, bool, str, torch.dtype)


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    save: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register ``intbmoe::name`` and return what calls it.

    ``run`` computes, ``fake`` allocates results of the same shapes. ``save(ctx, inputs, output)`` keeps what
    ``differentiate(ctx, *grads)`` needs; gradients of outputs that nobody used are None. Without them the operation is
    a backward pass, which cannot be differentiated itself, or has no derivative.
    """
    torch.library.define(f"intbmoe::{name}", schema)
    torch.library.impl(f"intbmoe::{name}", "default", run)
    torch.library.register_fake(f"intbmoe::{name}", fake)
    registered = getattr(torch.ops.intbmoe, name)

    def keep(ctx: Any, inputs: tuple, output: Any) -> None:
        if save is not None:
            ctx.set_materialize_grads(False)
            save(ctx, inputs, output)

    def refuse(ctx: Any, *grads: Tensor | None) -> None:
        raise RuntimeError(
            f"intbmoe::{name} has no derivative of its own: for second derivatives use plain torch, "
            f"layer.backend = 'grouped' or the environment variable INTBMOE_TRITON=0"
        )

    torch.library.register_autograd(f"intbmoe::{name}", differentiate or refuse, setup_context=keep)

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = run(*inputs)
            keep(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx, *grads):
            return (differentiate or refuse)(ctx, *grads)

    Node.__name__ = name
    apply = super(torch.autograd.Function, Node).apply  # without a search for torch.func's wrappers: ``observed`` has

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or observed(inputs):
            return registered(*inputs)
        if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
            return apply(*inputs)
        return run(*inputs)

    return call


def observed(inputs: tuple) -> bool:
    """Whether something traces, maps, counts or profiles operations, or stands in for a tensor."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
        or torch.autograd._profiler_enabled()
        or torch.jit.is_tracing()
        or any(type(value) not in PLAIN for value in inputs)
    )
