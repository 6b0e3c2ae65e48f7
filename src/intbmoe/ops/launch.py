"""Launching a Triton kernel without what Triton repeats at every launch.

``kernel[grid](…)`` binds names, describes every argument and builds a text to look the compiled kernel up by: longer
than a small kernel runs. The same compiled kernel is found here by what Triton specialises on: types, whether addresses
and integers are multiples of 16, integers that are one, and the constants.

A launch that is recorded (``recording.py``) spares even that: ``Launch.bound`` is the compiled kernel's own function,
to be called with addresses.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from intbmoe.ops.backend import INTERPRETING

STREAM = object()
"""Stands in ``Launch.bound`` for the stream."""

_compiled: dict[tuple, tuple[Any, tuple]] = {}


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    operands: list[Any]
    constants: dict[str, Any]
    compiled: Any  # by Triton, for just these operands; None in its interpreter

    def bound(self) -> tuple[Callable[..., None], list[Any]]:
        """What launches the kernel, and its arguments, operands among them: of the same types, aligned as recorded."""
        if self.compiled is None:
            return partial(self.kernel[self.grid], **self.constants), self.operands
        compiled, rest = self.compiled
        hooks = None, None, None  # ``hooked`` says whether there are any
        call = (*self.grid, 1, 1)[:3], STREAM, compiled.function, compiled.packed_metadata
        return compiled.run, [*call[0], *call[1:], *hooks, *self.operands, *rest]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """``kernel[grid](*arguments, **constants)`` on the arguments' device; constants are all that have names."""
    if torch._C._len_torch_dispatch_stack() > 0:
        launched = getattr(_get_current_dispatch_mode(), "launched", None)
        if launched is not None:  # a ``Recorder``
            with _disable_current_modes():  # it need not see what the interpreter does with tensors
                found = _launch(kernel, grid, arguments, constants)
            launched(Launch(kernel, grid, list(arguments), constants, found))
            return
    _launch(kernel, grid, arguments, constants)


def _launch(
    kernel: Any, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]
) -> tuple[Any, tuple] | None:
    """Returns the compiled kernel and what follows its arguments."""
    if INTERPRETING:
        kernel[grid](*arguments, **constants)
        return None
    first = arguments[0]
    device = (first if isinstance(first, Tensor) else first.base).get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(kernel, grid, arguments, constants)
    key = (id(kernel), device, *[_kind(argument) for argument in arguments], *constants.items())
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*arguments, **constants)
        names = kernel.arg_names[len(arguments) :]
        found = _compiled[key] = compiled, tuple(constants[name] for name in names)
    else:
        compiled, rest = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *rest)
    return found


def hooked() -> bool:
    """Whether somebody wants to hear of every launch, as Triton's profiler does."""
    runtime = _triton_runtime()
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)  # a chain of them may be empty


@cache
def _triton_runtime() -> Any:
    from triton import knobs

    return knobs.runtime


def _kind(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument >> 31
    if argument is None or isinstance(argument, float):
        return type(argument)
    return argument.base.dtype, tuple(argument.block_shape)  # a tensor descriptor


# What stands for a tensor where a recorded launch is repeated.


class _Address:
    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def typed(tensor: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
    """A tensor of ``dtype`` that starts ``offset`` bytes after ``tensor`` does: the interpreter's address."""
    start = tensor.storage_offset() * tensor.element_size() + offset
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(
        tensor.untyped_storage(), start // dtype.itemsize, (1,)
    )


def descriptor_maker(descriptor: Any, offset: int, dtype: torch.dtype) -> Callable[[Tensor], Any]:
    """What makes the same descriptor of the numbers that start ``offset`` bytes after a given tensor does."""
    kind, rest = type(descriptor), {name: value for name, value in vars(descriptor).items() if name != "base"}

    def make(tensor: Tensor) -> Any:
        made = object.__new__(kind)  # checked when it was recorded
        base = typed(tensor, offset, dtype) if INTERPRETING else _Address(tensor.data_ptr() + offset)
        made.__dict__.update(rest, base=base)
        return made

    return make
