"""Our own operations: registered with torch as custom ops, but called directly when nothing observes them.

Compilers, counters, profilers, tensor subclasses and modes must see one opaque operation with a shape function and a
derivative, so each is registered with torch. But torch takes longer to reach a Python kernel and its derivative than
the kernel takes to launch, and an eager layer runs dozens. So with plain tensors and no observer, the kernel is called
directly, inside a single autograd node if gradients are needed.

They are defined by schema instead of ``torch.library.custom_op``, whose wrapper imports the compiler at the first call
(over a second).
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from intbmoe.ops.branches import beside

PLAIN = (Tensor, nn.Parameter, type(None), int, float, bool, str, torch.dtype)
SCHEMA_TYPES = {int: "int", float: "float", bool: "bool", str: "str", torch.dtype: "ScalarType"}


def schema_of(function: Callable[..., Any], outputs: int = 1) -> str:
    """Return the schema of an operation with the parameters of ``function``; those unannotated are tensors or None."""
    parameters = signature(function).parameters.values()
    inputs = ", ".join(f"{SCHEMA_TYPES.get(each.annotation, 'Tensor?')} {each.name}" for each in parameters)
    return f"({inputs}) -> " + ("Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})")


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    save: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
) -> Callable[..., Any]:
    """Register ``intbmoe::name`` and return a function that calls it.

    ``run`` computes, ``fake`` allocates results of the same shapes. ``save(ctx, inputs, output)`` keeps what
    ``differentiate(ctx, *grads)`` needs, by default the inputs; the gradients of unused outputs are None. Without
    ``differentiate`` the operation has no derivative, for example because it is itself a backward pass.
    ``flops(*shapes)`` gives the number for torch's FLOP counter.
    """
    torch.library.define(f"intbmoe::{name}", schema)
    torch.library.impl(f"intbmoe::{name}", "default", run)
    torch.library.register_fake(f"intbmoe::{name}", fake)
    registered = getattr(torch.ops.intbmoe, name)
    if flops is not None:
        register_flop_formula(registered)(flops)

    def keep(ctx: Any, inputs: tuple, output: Any) -> None:
        if differentiate is not None:
            ctx.set_materialize_grads(False)
            (save or _save_inputs)(ctx, inputs, output)

    def refuse(ctx: Any, *grads: Tensor | None) -> None:
        raise RuntimeError(
            f"intbmoe::{name} has no derivative of its own: for second derivatives use plain torch, "
            f"layer.backend = 'grouped' with layer.recompute = False, or the environment variable INTBMOE_TRITON=0"
        )

    torch.library.register_autograd(f"intbmoe::{name}", differentiate or refuse, setup_context=keep)

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = run(*inputs)
            ctx.beside = beside()
            keep(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx, *grads):
            return (differentiate or refuse)(ctx, *grads)

    Node.__name__ = name
    apply = super(torch.autograd.Function, Node).apply  # skips the check for torch.func, which ``observed`` has done

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or observed(inputs):
            return registered(*inputs)
        if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
            return apply(*inputs)
        return run(*inputs)

    return call


def _save_inputs(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def observed(inputs: tuple) -> bool:
    """Whether something traces, maps, counts or profiles operations, or an input is not a plain tensor or number."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
        or torch.autograd._profiler_enabled()
        or torch.jit.is_tracing()
        or any(type(value) not in PLAIN for value in inputs)
    )
