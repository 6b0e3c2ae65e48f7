"""Independent parts of a layer as parallel branches of a CUDA graph.

Kernels of one stream run one after the other, and most kernels of a narrow layer are too small to fill a large GPU.
While a graph is captured, parts that do not need each other (composing the blocks, routing, the shared expert) are
therefore launched on streams of their own, which become branches of the graph. Autograd runs each backward on the
stream of its forward, so the gradients branch in the same way. The kernels and their results do not change.

Outside a capture everything stays on one stream: there Python launches one kernel at a time anyway.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

enabled = os.environ.get("INTBMOE_BRANCHES") != "0"

_of_thread = threading.local()


class Branches:
    """The branches of one forward. Without a capture on ``x``'s device there are none, and all methods do nothing."""

    def __init__(self, x: Tensor) -> None:
        self._main: torch.cuda.Stream | None = None
        self._sides: list[torch.cuda.Stream] = []
        if enabled and not torch.compiler.is_compiling() and x.is_cuda and torch.cuda.is_current_stream_capturing():
            self._main = torch.cuda.current_stream(x.device)

    def branch(self, *read: Tensor) -> AbstractContextManager[None]:
        """Launch what is inside beside all that follows, up to ``join``; ``read`` are tensors made before it."""
        return nullcontext() if self._main is None else self._start(read)

    @contextmanager
    def _start(self, read: tuple[Tensor, ...]) -> Iterator[None]:
        side = _side_stream(self._main.device, len(self._sides))
        self._sides.append(side)
        side.wait_stream(self._main)
        _keep(read, side)
        with torch.cuda.stream(side):
            yield

    def join(self, *made: Any) -> None:
        """Wait for all branches; ``made`` are the tensors that they made (what is not a tensor is skipped)."""
        for side in self._sides:
            self._main.wait_stream(side)
        if self._sides:
            _keep(made, self._main)
        self._sides = []


def _keep(tensors: tuple[Any, ...], stream: torch.cuda.Stream) -> None:
    """Tell the allocator that ``stream`` uses the tensors too.

    Without gradients this is not needed: the next branch starts after all that reads them, and holding memory until the
    end of a capture would cost a deep model the composed weights of every layer. A backward gives no such order.
    """
    if torch.is_grad_enabled():
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not tensor.is_leaf:
                tensor.record_stream(stream)


def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """Each thread has its own: two threads may capture at the same time."""
    streams = _of_thread.__dict__.setdefault(device, [])
    while len(streams) <= number:
        streams.append(torch.cuda.Stream(device))
    return streams[number]
