"""Independent parts of a layer as parallel branches of a CUDA graph.

Kernels of one stream run one after the other, and most kernels of a narrow layer are too small to fill a large GPU.
While a graph is captured, parts that do not need each other (composing the blocks, routing, the shared expert) are
therefore launched on streams of their own, which become branches of the graph. Autograd runs each backward on the
stream of its forward, so the gradients branch in the same way. The kernels and their results do not change.

Outside a capture everything stays on one stream, because Python launches one kernel at a time anyway.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

MOST_ENTRIES = 1 << 24
"""Inputs with fewer entries get branches: 8,192 tokens of width 2048 fill an H200 by themselves."""

enabled = os.environ.get("INTBMOE_BRANCHES") != "0"

_of_thread = threading.local()


def _may_branch(x: Tensor | None) -> bool:
    if x is None or torch.compiler.is_compiling() or not (enabled and x.is_cuda and x.numel() < MOST_ENTRIES):
        return False
    # Sharded training frees gathered weights when the main stream is done, even if other streams still read them.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    return torch.cuda.is_current_stream_capturing()


class Branches:
    """The branches of one forward of ``x``. Outside a capture there are none, and all methods do nothing."""

    def __init__(self, x: Tensor | None) -> None:
        self._main: torch.cuda.Stream | None = None
        self._fork: torch.cuda.Event | None = None
        self._sides: list[torch.cuda.Stream] = []
        if _may_branch(x):
            self._main = torch.cuda.current_stream(x.device)
            self._fork = self._main.record_event()

    def __repr__(self) -> str:
        return "NONE" if self._main is None else f"Branches(started={len(self._sides)})"

    def branch(self, *read: Tensor) -> AbstractContextManager[None]:
        """Launch the body of the ``with`` statement as a branch that ends at ``join``.

        ``read`` are the tensors it reads that were made since the fork, the creation of this object. With any, the
        branch starts after everything launched so far; with none, it starts at the fork.
        """
        return nullcontext() if self._main is None else self._start(read)

    @contextmanager
    def _start(self, read: tuple[Tensor, ...]) -> Iterator[None]:
        side = _side_stream(self._main.device, len(self._sides))
        self._sides.append(side)
        if read:
            side.wait_stream(self._main)
        else:
            side.wait_event(self._fork)
        _keep(read, side)
        with torch.cuda.stream(side):
            yield

    def common(self, parameter: Tensor) -> Tensor:
        """Return a view of a parameter that two branches read, so that its gradients are added on the main branch.

        Autograd adds gradients to a parameter on the stream that first used it, and warns if they come from another.
        """
        return parameter if self._main is None else parameter.view_as(parameter)

    def join(self, *made: Any) -> None:
        """Wait for all branches; ``made`` are the tensors that they made (other values are skipped)."""
        for side in self._sides:
            self._main.wait_stream(side)
        if self._sides:
            _keep(made, self._main)
        self._sides = []


NONE = Branches(None)


def _keep(tensors: tuple[Any, ...], stream: torch.cuda.Stream) -> None:
    """Tell the allocator that ``stream`` uses the tensors too.

    Without gradients this is not needed, because the next branch starts after everything that reads them; and memory
    that is held until the end of a capture would add up to the composed weights of every layer of a deep model. A
    backward gives no such order.
    """
    if torch.is_grad_enabled():
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter):
                tensor.record_stream(stream)


def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """Each thread has its own streams, because two threads may capture at the same time."""
    streams = vars(_of_thread).setdefault(device, [])
    while len(streams) <= number:
        streams.append(torch.cuda.Stream(device))
    return streams[number]
