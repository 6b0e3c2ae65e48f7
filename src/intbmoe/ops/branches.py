"""Independent parts of a layer as parallel branches of a CUDA graph.

Kernels of one stream run one after the other, and most kernels of a narrow layer are too small to fill a large GPU.
While a graph is captured, parts that do not need each other (routing, the shared expert, composing each pool, the
filter's terms) are therefore launched on streams of their own, which become branches of the graph. Autograd runs each
backward on the stream of its forward, so the gradients branch in the same way. Within the backward of an operation,
gradients of weights and sums over rows, which nothing else waits for, go to the branch that needs them (``aside``). The
kernels and their results do not change.

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

MOST_STREAMS = 16
"""Streams of one thread; a layer with four internal layers has 15 branches."""

ROUTER, SHARED, CODES, COEFFICIENTS = "router", "shared expert", "codes", "coefficients"
FILTER, TOKEN_TERM, SCALE = "filter's terms", "token term", "scale"

_of_thread = threading.local()


def pool(number: int) -> str:
    """Return the name of the branch that composes a pool."""
    return f"pool {number}"


def sums(number: int) -> str:
    """Return the name of the branch that sums the gradients of an internal layer's row parameters."""
    return f"sums {number}"


def _may_branch(x: Tensor | None) -> bool:
    if x is None or torch.compiler.is_compiling() or not (enabled and x.is_cuda and x.numel() < MOST_ENTRIES):
        return False
    # Sharded training frees gathered weights when the main stream is done, even if other streams still read them.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    # Under checkpointing, a backward may read what a forward repeated in another thread made, on other streams.
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return False
    return torch.cuda.is_current_stream_capturing()


class Branches:
    """The named branches of one forward of ``x``. Outside a capture there are none, and all methods do nothing.

    A branch starts at the last mark on the main branch; the first mark is the creation of this object.
    """

    def __init__(self, x: Tensor | None) -> None:
        self._main: torch.cuda.Stream | None = None
        self._mark: torch.cuda.Event | None = None
        self._sides: dict[str, torch.cuda.Stream] = {}
        self._read: list[tuple[Tensor | None, ...]] = []
        self._unsettled: list[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = []
        if _may_branch(x):
            self._main = torch.cuda.current_stream(x.device)
            self.mark()

    def __repr__(self) -> str:
        return "NONE" if self._main is None else f"Branches({', '.join(self._sides)})"

    def enter(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return ``x`` for the router and, in ``dtype``, for everything else, which need not wait for the router then.

        Outside a capture the second is None: the router, which reads ``x`` anyway, can cast it too. In backward, a
        layer's work ends where these gradients are added.
        """
        if self._main is None:
            return x, None
        pair = _Enter.apply(x, dtype, self)
        self.mark()
        return pair

    def mark(self) -> None:
        """Let branches that start from here on read everything made so far on the main branch."""
        if self._main is not None:
            self._mark = self._main.record_event()

    def branch(self, name: str, *read: Tensor | None, after: str = "") -> AbstractContextManager[None]:
        """Launch the body of the ``with`` statement on a branch, which must be joined later.

        ``read`` are the tensors it reads that were made in this forward, on the main branch before the last mark or on
        the branch ``after``. A name can be used again, to continue that branch.
        """
        return nullcontext() if self._main is None else self._start(name, read, after)

    @contextmanager
    def _start(self, name: str, read: tuple[Tensor | None, ...], after: str) -> Iterator[None]:
        side = self._sides[name] = _side_stream(self._main.device, name)
        side.wait_event(self._mark)
        if after in self._sides:
            side.wait_stream(self._sides[after])
        if torch.is_grad_enabled():
            _keep(read, side)
        else:  # until the forward ends, when all branches have been joined
            self._read.append(read)
        with torch.cuda.stream(side):
            yield

    def join(self, name: str, *made: Any) -> None:
        """Wait for a branch, if it was started; ``made`` are the tensors that it made (other values are skipped)."""
        if name in self._sides:
            self._main.wait_stream(self._sides[name])
            _keep(made, self._main)

    def join_all(self, *made: Any) -> None:
        """Wait for all branches; ``made`` are the tensors that they made."""
        for name in self._sides:
            self.join(name, *made)

    def take(self, name: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return views whose gradients arrive on a branch, which is started if need be.

        Gradients of a tensor with several views are added on the branch of that tensor. So if branches share a
        parameter, take it for a branch of its own first, or one of the branches, or the main one, will wait for others.
        """
        if self._main is None or not torch.is_grad_enabled():
            return tensors
        with self.branch(name):
            views = tuple(None if tensor is None else tensor.view_as(tensor) for tensor in tensors)
        self.join(name)
        return views

    def gradients(self, name: str) -> AbstractContextManager[None]:
        """Operations in this context make the gradients of their weights on a branch, if it was started (``aside``).

        The weights must come from that branch: they were made on it, or ``take`` returned them.
        """
        return _beside(self, self._sides[name]) if name in self._sides else nullcontext()

    def settle(self) -> None:
        """Wait for what backward has launched aside, and let go of what it reads."""
        unsettled, self._unsettled = self._unsettled, []
        for event, _ in unsettled:
            torch.cuda.current_stream(self._main.device).wait_event(event)


NONE = Branches(None)


@contextmanager
def _beside(branches: Branches, side: torch.cuda.Stream) -> Iterator[None]:
    _of_thread.beside = branches, side
    try:
        yield
    finally:
        _of_thread.beside = None


def beside() -> tuple[Branches, torch.cuda.Stream] | None:
    """Return where an operation called now should make the gradients of its weights; None for the same stream."""
    return getattr(_of_thread, "beside", None)


@contextmanager
def aside(ctx: Any, *read: Tensor) -> Iterator[None]:
    """In the backward of an operation, launch the body on the branch of ``ctx.beside``, if there is one.

    Only nodes of that branch may read what the body makes, so it must have the type and shape that autograd expects: a
    correction would run on this stream. ``read`` are the tensors that the body reads; they are kept until the main
    branch has waited for it.
    """
    if getattr(ctx, "beside", None) is None:
        yield
        return
    branches, side = ctx.beside
    side.wait_stream(torch.cuda.current_stream(side.device))
    with torch.cuda.stream(side):
        yield
    if not branches._unsettled:  # for a backward that does not reach the layer's input
        torch.autograd.Variable._execution_engine.queue_callback(branches.settle)
    branches._unsettled.append((side.record_event(), read))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dtype, branches):
        ctx.branches = branches
        ctx.set_materialize_grads(False)
        return x.view_as(x), x.view_as(x) if x.dtype == dtype else x.to(dtype)

    @staticmethod
    def backward(ctx, grad, token_grad):
        ctx.branches.settle()
        if grad is not None and token_grad is not None:
            grad = grad + token_grad  # autograd casts it to the type of x
        return token_grad if grad is None else grad, None, None


def _keep(tensors: tuple[Any, ...], stream: torch.cuda.Stream) -> None:
    """Tell the allocator that ``stream`` uses the tensors too.

    Without gradients this is not needed for what a branch makes, because the next branch starts after everything that
    reads it; and memory that is held until the end of a capture would add up to the composed weights of every layer of
    a deep model. A backward gives no such order.
    """
    if torch.is_grad_enabled():
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter):
                tensor.record_stream(stream)


def _side_stream(device: torch.device, name: str) -> torch.cuda.Stream:
    """Each thread has its own streams, because two threads may capture at the same time.

    Torch has 32 streams per device and then hands out the first again, so a thread takes a few and uses them in turn.
    Branches on the same stream run one after the other.
    """
    named, streams = vars(_of_thread).setdefault(device, ({}, []))
    if name not in named:
        if len(streams) < MOST_STREAMS:
            streams.append(torch.cuda.Stream(device))
        named[name] = streams[len(named) % MOST_STREAMS]
    return named[name]
