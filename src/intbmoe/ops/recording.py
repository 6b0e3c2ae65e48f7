"""What a function does on its device, written down step by step while it runs once.

A recording is a list of steps: launches of Triton kernels, and calls of torch's operations. Their operands name the
tensor that they lie in (``Root``): an input of the function, memory that the function allocated, or the result of a
call. Views and allocations are no steps; what Python computes from shapes is a constant. So a recording holds for all
inputs of the same shapes, strides, types and settings, and ``program.py`` runs it again without the function.

What a recording could not repeat is refused (``CannotRecordError``): numbers read from a tensor, shapes that depend on
them, and tensors that are neither inputs nor made here.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from intbmoe.ops import operation
from intbmoe.ops.launch import Launch

aten = torch.ops.aten
ALLOCATIONS = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip
READING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class CannotRecordError(Exception):
    """A function does something that cannot be run again from a recording; the message says what."""


@dataclass(eq=False)
class Root:
    """A tensor that operands lie in: an input, memory allocated by the function, or a call's result."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    input: int | None = None  # its number among the inputs
    result: bool = False


class Pointer(NamedTuple):
    """Where a kernel reads or writes."""

    root: Root
    offset: int  # bytes from the root's start
    dtype: torch.dtype


class Described(NamedTuple):
    """A tensor descriptor of Triton's, which a kernel reads through."""

    pointer: Pointer
    descriptor: Any  # the recorded one, for its shape, strides and block


class View(NamedTuple):
    """A tensor that a call takes."""

    root: Root
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # entries from the root's start

    @property
    def whole(self) -> bool:
        return self.offset == 0 and self.shape == self.root.shape and self.stride == self.root.stride


class Call(NamedTuple):
    operation: Callable[..., Any]
    operands: list[Any]
    keywords: dict[str, Any]
    results: tuple[Root | None, ...]  # None for what is an operand, changed in place


Step = Launch | Call


class _Place(NamedTuple):
    first: int  # byte of the storage
    last: int
    root: Root


@dataclass(eq=False)
class _Storage:
    held: Any  # as long as it lives, no other storage has its address
    places: list[_Place] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """While it is active, launches and calls become ``steps``."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.inputs: list[Root] = []
        self._storages: dict[int, _Storage] = {}

    def add_input(self, tensor: Tensor) -> None:
        first = tensor.storage_offset() * tensor.element_size()
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        root = _root(tensor, input=len(self.inputs))
        self.inputs.append(root)
        self._put(tensor, _Place(first, first + (extent if tensor.numel() else 0) * tensor.element_size(), root))

    def view(self, tensor: Tensor) -> View:
        root, offset = self._find(tensor)
        if tensor.dtype != root.dtype:
            raise CannotRecordError(f"{root.dtype} read as {tensor.dtype}")
        return View(root, tuple(tensor.shape), tensor.stride(), offset // tensor.element_size())

    def launched(self, launch: Launch) -> None:
        """``launch.operands`` are still the kernel's arguments."""
        self.steps.append(launch._replace(operands=[self._argument(value) for value in launch.operands]))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "intbmoe":
            with self:  # not the operation is a step, but what it does
                return operation.RUNS[func._schema.name](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            self._put(result, _Place(0, result.untyped_storage().nbytes(), _root(result)))
        else:
            self._called(func, args, kwargs or {}, result)
        return result

    def _called(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        results = result if isinstance(result, tuple | list) else (result,)
        if any(tag in func.tags for tag in READING) or not all(isinstance(each, Tensor) for each in results):
            raise CannotRecordError(f"{func.name()} depends on a tensor's numbers")
        known = [each.untyped_storage()._cdata in self._storages for each in results]
        if all(known) and not func._schema.is_mutable:
            return  # views
        operands = [self._operand(value) for value in args]
        if any(isinstance(value, Tensor) for value in kwargs.values()):
            raise CannotRecordError(f"{func.name()} takes a tensor by name")
        roots = tuple(None if old else _root(each, result=True) for each, old in zip(results, known, strict=True))
        for each, root in zip(results, roots, strict=True):
            if root is not None:
                self._put(each, _Place(0, each.untyped_storage().nbytes(), root))
        self.steps.append(Call(func._op, operands, kwargs, roots))

    def _operand(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.view(value)
        return [self._operand(each) for each in value] if isinstance(value, tuple | list) else value

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Pointer(*self._find(value), value.dtype)
        if hasattr(value, "block_shape"):
            return Described(Pointer(*self._find(value.base), value.base.dtype), value)
        return value

    def _put(self, tensor: Tensor, place: _Place) -> None:
        storage = tensor.untyped_storage()
        places = self._storages.setdefault(storage._cdata, _Storage(storage)).places
        if any(place.first < other.last and other.first < place.last for other in places):
            raise CannotRecordError("two inputs share memory")
        places.append(place)

    def _find(self, tensor: Tensor) -> tuple[Root, int]:
        """The root that ``tensor`` lies in, and how many bytes from its start."""
        first = tensor.storage_offset() * tensor.element_size()
        with suppress(KeyError):
            for place in self._storages[tensor.untyped_storage()._cdata].places:
                if place.first <= first < max(place.last, place.first + 1):
                    return place.root, first - place.first
        raise CannotRecordError(f"a tensor of shape {tuple(tensor.shape)} comes from elsewhere")


def _root(tensor: Tensor, **kind: Any) -> Root:
    size = tensor.untyped_storage().nbytes()
    return Root(tuple(tensor.shape), tensor.stride(), tensor.dtype, size, **kind)
