"""Whether operations run eagerly on real numbers, or something traces, exports, maps or differentiates them."""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad


def exporting() -> bool:
    """Whether torch.export is tracing; False under torch.compile, where torch 2.11's own function returns True."""
    return torch.compiler.is_exporting()


# This does what ``torch.compiler.assume_constant_result`` does: Dynamo then calls the function instead of tracing it.
# The decorator itself imports all of Dynamo, which takes a second at every start.
exporting._dynamo_marked_constant = True


def compiled_for_gpu(x: Tensor) -> bool:
    """Whether operations on ``x`` are being compiled for a GPU, where some must be hidden from the compiler."""
    return x.device.type == "cuda" and torch.compiler.is_compiling() and not exporting()


def transformed() -> bool:
    """Whether torch.func or forward-mode derivatives are active, which support only some of our operations."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.maybe_current_level() is not None or has_dual_numbers()


def has_dual_numbers() -> bool:
    """Whether forward-mode derivatives are active, by torch.func or torch.autograd.forward_ad."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def readable(x: Tensor) -> bool:
    """Whether a number can be read from ``x`` without waiting for a device or breaking a graph."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    # Only a plain tensor: one that has only a shape and a type (FakeTensorMode) has no number to read.
    return type(x) in (Tensor, nn.Parameter) and x.is_cpu


def plain_numbers(x: Tensor) -> bool:
    """Whether ``x`` is numbers in the CPU's memory, and nothing traces or maps operations on it.

    Not so if it stands for many tensors (gradients with is_grads_batched), for zeros, or for numbers to be negated.
    """
    if not readable(x) or transformed() or torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0:
        return False
    return not (torch._C._functorch.is_legacy_batchedtensor(x) or x._is_zerotensor() or x.is_neg())


def recorded() -> bool:
    """Whether a mode such as FlopCounterMode sees every operation."""
    return torch._C._len_torch_dispatch_stack() > 0


def unobserved(x: Tensor) -> bool:
    """Whether nothing differentiates, traces, maps or counts operations on ``x``."""
    return plain_numbers(x) and not recorded() and not torch.is_grad_enabled()


def untouched(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling ``module`` runs only the forward of ``kind``, so that its weights can be read directly instead.

    A subclass, a wrapper, a hook or a replaced forward (accelerate's) means that other code expects the call.
    """
    return (
        type(module) is kind
        and "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
    )
