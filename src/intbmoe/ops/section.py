"""Recorded steps, ready to run on other tensors.

All that the steps take stands in one list of values, each in a slot of its own: constants, addresses, views. A run
fills in what follows from the tensors at hand, then every step picks its values. Memory that only kernels use is one
allocation, in which roots that are not needed at the same time may lie in the same place; what a later section needs
lies in another, so that it alone is kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from intbmoe.ops.backend import INTERPRETING
from intbmoe.ops.launch import STREAM, Launch, descriptor_maker, typed
from intbmoe.ops.recording import Call, Described, Pointer, Root, Step, View

ALIGNMENT = 256  # bytes: no kernel has been compiled for more
Span = tuple[int, int]  # the first and the last step that use a root


class _Carrier:
    """A tensor that a section is given, allocates or computes, and the values that follow from it."""

    def __init__(self) -> None:
        self.addresses: list[tuple[int, int]] = []  # a value's slot, and how many bytes from the start
        self.makers: list[tuple[int, Callable[[Tensor], Any]]] = []

    def put(self, values: list[Any], tensor: Tensor) -> None:
        if self.addresses:
            address = tensor.data_ptr()
            for slot, offset in self.addresses:
                values[slot] = address + offset
        for slot, make in self.makers:
            values[slot] = make(tensor)


class Section:
    def __init__(
        self,
        steps: Sequence[Step],
        given: Sequence[Mapping[Root, int]],
        kept: Set[Root],
        results: Sequence[View | None],
    ) -> None:
        """``given`` says for each tensor that ``run`` gets which roots lie in it, how many bytes from its start.

        ``kept`` roots come into being here, and a later section needs them. Its ``given`` for them is ``self.kept``.
        """
        self._values: list[Any] = [None]  # the stream
        self._slots: dict[Any, int] = {}
        self._places: dict[Root, tuple[_Carrier, int]] = {}
        carriers = [self._carry(roots) for roots in given]
        self._returned = {view.root: view for view in results if view is not None}
        computed = {root for step in steps if isinstance(step, Call) for root in step.results}
        roots = dict.fromkeys((*roots_of(steps), *self._returned))
        allocated = [root for root in roots if root not in self._places and root not in computed]
        self._allocated = set(allocated)
        calls = [step for step in steps if isinstance(step, Call)]
        tensors = {*roots_of(calls), *self._returned}
        self._tensors = [(self._carry({root: 0}), *self._geometry(root)) for root in allocated if root in tensors]
        spans = {root: span for root, span in _spans(steps).items() if root in self._allocated and root not in tensors}
        lasting = _pack({root: (0, len(steps)) for root in spans if root in kept})
        passing = _pack({root: span for root, span in spans.items() if root not in kept})
        self._memory = [(self._carry(offsets), size) for offsets, size in (lasting, passing) if size]
        self._steps = [self._launch(step) if isinstance(step, Launch) else self._call(step) for step in steps]
        self._results = [None if view is None else self._slot(view) for view in results]
        whole = [root for root in roots if root in kept and root not in lasting[0]]
        self._kept = [self._slot(View(root, *self._geometry(root)[:2], 0)) for root in whole]
        self.kept: list[Mapping[Root, int]] = [{root: 0} for root in whole]
        if lasting[1]:
            self._kept.append(self._made(self._memory[0][0], _itself))
            self.kept.append(lasting[0])
        # Flat, as these are most of all values.
        self._addresses = [(index, *each) for index, carrier in enumerate(carriers) for each in carrier.addresses]
        self._makers = [(index, *each) for index, carrier in enumerate(carriers) for each in carrier.makers]

    def run(self, given: Sequence[Tensor]) -> tuple[tuple[Any, ...], list[Tensor]]:
        """The results, None where there is none, and the tensors that hold what is kept."""
        values, first = self._values.copy(), given[0]
        if not INTERPRETING:
            index = first.get_device()
            if index != torch.cuda.current_device():
                with torch.cuda.device(index):
                    return self.run(given)
            values[0] = torch._C._cuda_getCurrentRawStream(index)
        for number, slot, offset in self._addresses:
            values[slot] = given[number].data_ptr() + offset
        for number, slot, make in self._makers:
            values[slot] = make(given[number])
        device, held = first.device, []  # what is used by its address alone
        for carrier, shape, stride, dtype in self._tensors:
            held.append(tensor := torch.empty_strided(shape, stride, dtype=dtype, device=device))
            carrier.put(values, tensor)
        for carrier, size in self._memory:
            held.append(tensor := torch.empty(size, dtype=torch.uint8, device=device))
            carrier.put(values, tensor)
        for step in self._steps:
            step(values, held)
        results = tuple([None if slot is None else values[slot] for slot in self._results])
        return results, [values[slot] for slot in self._kept]

    def _carry(self, roots: Mapping[Root, int]) -> _Carrier:
        carrier = _Carrier()
        self._places.update((root, (carrier, offset)) for root, offset in roots.items())
        return carrier

    def _geometry(self, root: Root) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """Of the tensor for a root. One that is returned whole is allocated as the result, which is then no view."""
        view = self._returned.get(root) if root in self._allocated else None
        if view is not None and _dense(view.shape, view.stride) == _dense(root.shape, root.stride) is not None:
            return view.shape, view.stride, root.dtype
        return root.shape, root.stride, root.dtype

    # Slots of values.

    def _constant(self, value: Any) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def _made(self, carrier: _Carrier, make: Callable[[Tensor], Any]) -> int:
        carrier.makers.append((self._constant(None), make))
        return len(self._values) - 1

    def _slot(self, operand: Any) -> int:
        if operand is STREAM:
            return 0
        if not isinstance(operand, Pointer | Described | View):
            return self._constant(operand)
        key = id(operand) if isinstance(operand, Described) else operand
        if key not in self._slots:
            self._slots[key] = self._new_slot(operand)
        return self._slots[key]

    def _new_slot(self, operand: Pointer | Described | View) -> int:
        carrier, start = self._places[operand.pointer.root if isinstance(operand, Described) else operand.root]
        if isinstance(operand, View):
            shape, stride, _ = self._geometry(operand.root)
            if (operand.shape, operand.stride, operand.offset) == (shape, stride, 0):
                return self._made(carrier, _itself)
            return self._made(carrier, partial(_part, operand.shape, operand.stride, operand.offset))
        if isinstance(operand, Described):
            pointer = operand.pointer
            return self._made(carrier, descriptor_maker(operand.descriptor, start + pointer.offset, pointer.dtype))
        if INTERPRETING:
            return self._made(carrier, partial(typed, offset=start + operand.offset, dtype=operand.dtype))
        carrier.addresses.append((self._constant(None), start + operand.offset))
        return len(self._values) - 1

    # Steps.

    def _launch(self, step: Launch) -> Callable[[list[Any], list[Any]], None]:
        start, arguments = step.bound()
        pick = itemgetter(*[self._slot(argument) for argument in arguments])
        return lambda values, _: start(*pick(values))

    def _call(self, step: Call) -> Callable[[list[Any], list[Any]], None]:
        operation, keywords = step.operation, step.keywords
        slots = [
            [self._slot(each) for each in operand] if isinstance(operand, list) else self._slot(operand)
            for operand in step.operands
        ]
        carriers = [None if root is None else self._carry({root: 0}) for root in step.results]

        def pick(values: list[Any]) -> list[Any]:
            return [[values[each] for each in slot] if type(slot) is list else values[slot] for slot in slots]

        if len(slots) > 1 and not any(isinstance(slot, list) for slot in slots):
            pick = itemgetter(*slots)

        def call(values: list[Any], held: list[Any]) -> None:
            made = operation(*pick(values), **keywords)
            for carrier, tensor in zip(carriers, (made,) if type(made) is Tensor else made, strict=True):
                if carrier is not None:
                    held.append(tensor)
                    carrier.put(values, tensor)

        return call


def roots_of(steps: Sequence[Step]) -> Iterator[Root]:
    for step in steps:
        for operand in _leaves(step.operands):
            yield operand.root
        if isinstance(step, Call):
            yield from (root for root in step.results if root is not None)


def _leaves(operands: Sequence[Any]) -> Iterator[Pointer | View]:
    for operand in operands:
        if isinstance(operand, Pointer | View):
            yield operand
        elif isinstance(operand, Described):
            yield operand.pointer
        elif isinstance(operand, list):
            yield from _leaves(operand)


def _spans(steps: Sequence[Step]) -> dict[Root, Span]:
    spans: dict[Root, Span] = {}
    for number, step in enumerate(steps):
        for root in roots_of([step]):
            spans[root] = spans.get(root, (number, number))[0], number
    return spans


def _pack(spans: Mapping[Root, Span]) -> tuple[dict[Root, int], int]:
    """Where each root lies in one allocation, and its size: the largest first, each at the lowest place free for it."""
    offsets: dict[Root, int] = {}
    size = 0
    for root, (first, last) in sorted(spans.items(), key=lambda item: -item[0].bytes):
        taken = [
            (offsets[other], other.bytes) for other in offsets if spans[other][0] <= last and first <= spans[other][1]
        ]
        place = 0
        for start, length in sorted(taken):
            if place + root.bytes <= start:
                break
            place = max(place, -(-(start + length) // ALIGNMENT) * ALIGNMENT)
        offsets[root] = place
        size = max(size, place + max(root.bytes, 1))
    return offsets, size


def _dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> int | None:
    """How many entries a tensor without gaps has, in order; None for any other."""
    entries = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != entries:
            return None
        entries *= size
    return entries


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _part(shape: tuple[int, ...], stride: tuple[int, ...], offset: int, tensor: Tensor) -> Tensor:
    return tensor.as_strided(shape, stride, tensor.storage_offset() + offset)
