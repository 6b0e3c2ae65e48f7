"""Replays a layer's training forward and backward on a GPU from two CUDA graphs once an input shape has repeated.

In an eager training loop, Python takes longer to launch the hundred kernels of a narrow layer than the GPU takes to run
them. ``replay.py`` does the same for inference, and says when a graph may be used at all.

A forward leaves at fixed addresses what its backward reads. So while one awaits its backward, further forwards of the
same layer take the ordinary way: in a model that uses a layer twice, or with several micro-batches before a backward.
Gradients are copied from where the graph writes them, so they belong to the caller.

The forward's graph holds on to the tensors that it saves for backward; an ordinary forward holds them too, but only
until backward. All backward graphs of a device share their memory. A layer keeps the graphs of two shapes, and records
none unless a quarter of the device's memory is free. Large inputs run without a graph, because the GPU is their
bottleneck.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from intbmoe.graphs.recording import Recorder
from intbmoe.ops.backend import triton_runs
from intbmoe.ops.eager import transformed
from intbmoe.precision import autocast_off
from intbmoe.statistics import LayerStatistics, recomputing

MOST_PRODUCTS = 1 << 35
"""Most products of the tokens with a matrix of an expert. An H200 takes about as long for a step of a layer that makes
half as many as Python takes to launch it."""
IN_A_ROW = 3
"""A shape is recorded when it comes for this time in a row: texts of many lengths hardly ever do."""
MOST_GRAPHS = 2  # per layer
FREE_SHARE = 0.25
LAUNCH = "set INTBMOE_GRAPHS=0 in the environment to launch it from Python"

one_at_a_time = threading.Lock()
"""Held while a graph runs: graphs share memory, and their inputs and outputs have fixed addresses."""

Forward = Callable[[Tensor, Tensor | None], Tensor]
Tables = Sequence[dict[str, Tensor | None]]


def suits(layer: Any, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether a training forward may use a graph; ``dtype`` is the type of the large products."""
    hidden = layer.config.hidden
    widest = max(hidden, default=layer.config.dim) if isinstance(hidden, tuple) else hidden
    return (
        x.numel() * widest <= MOST_PRODUCTS
        and triton_runs(x.device, dtype)  # torch's own have second derivatives, replays do not
        and not recomputing()
        and not torch.is_anomaly_enabled()
        # Activation checkpointing and offloading want to see what is saved for backward.
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        and not (torch.distributed.is_available() and torch.distributed.is_initialized())
    )


class TrainingGraphs:
    """The training graphs of a layer, by what they depend on."""

    def __init__(self) -> None:
        self._graphs: dict[tuple, TrainingGraph | None] = {}
        self._last: tuple = ()
        self._times = 0

    def find(self, key: tuple, record: Callable[[], "TrainingGraph | None"]) -> "TrainingGraph | None":
        """Return the graph for ``key`` if it is free, made by ``record`` if the key has come often enough."""
        if key not in self._graphs:
            self._times = self._times + 1 if key == self._last else 1
            self._last = key
            if self._times < IN_A_ROW:
                return None
            if len(self._graphs) >= MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[key] = record()
        graph = self._graphs[key]
        return None if graph is None or graph.busy else graph

    def clear(self) -> None:
        self._graphs.clear()


def has_room(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused >= FREE_SHARE * total


class _Awaiting:
    """Exists while a forward of a graph awaits its backward."""


class TrainingGraph:
    """One forward and backward of a layer, recorded for an input's shape."""

    def __init__(
        self,
        forward: Forward,
        x: Tensor,
        mask: Tensor | None,
        parameters: Sequence[Tensor],
        tables: Tables,
        statistics: LayerStatistics,
        recorders: Sequence[Recorder],
    ) -> None:
        """Record with ``recorders``, one for each pass; ``parameters``, which need gradients, are in ``tables``."""
        self._x = own_x = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_(x.requires_grad)
        self._mask = own_mask = None if mask is None else mask.clone()
        self._made = made = _Made()
        self._grads = own_grads = []
        self._awaiting: Callable[[], _Awaiting | None] = lambda: None

        def run_forward() -> None:
            with _aliased(parameters, tables) as aliases, torch.enable_grad():
                y = forward(own_x, own_mask)
            record = statistics.record
            record.taken = True  # those of each replay are watched instead
            made.outputs, made.sums = {"y": y, **record.losses}, record.sums
            made.inputs = [own_x] * own_x.requires_grad + aliases

        def run_backward() -> None:
            moving = [each for each in made.outputs.values() if each.requires_grad]
            # On this thread, because the device's own may wait in another backward for the lock that is held here.
            with autocast_off(own_x), torch.autograd.set_multithreading_enabled(False):
                gradients = torch.autograd.grad(moving, made.inputs, own_grads, retain_graph=True, allow_unused=True)
            made.gradients = [None if each is None else each.contiguous() for each in gradients]

        # In some methods recording draws random numbers, which must not change those that training draws.
        with torch.random.fork_rng([x.device] if x.is_cuda else []):
            self._run_forward = recorders[0].record(run_forward)
            self._run_forward()
            self.moving = [each.requires_grad for each in made.outputs.values()]
            moving = compress(made.outputs.values(), self.moving)
            own_grads += [torch.zeros_like(each, requires_grad=False) for each in moving]
            self._run_backward = recorders[1].record(run_backward)
        if x.is_cuda:
            made.let_go()

    @property
    def busy(self) -> bool:
        return self._awaiting() is not None

    @property
    def sums(self) -> dict[str, Tensor]:
        """The statistics of the last forward, overwritten by the next."""
        return self._made.sums

    @property
    def losses(self) -> list[str]:
        """The names of the outputs after the first."""
        return list(self._made.outputs)[1:]

    def forward(self, x: Tensor, mask: Tensor | None) -> tuple[list[Tensor], _Awaiting]:
        self._x.copy_(x)
        if mask is not None:
            self._mask.copy_(mask)
        self._run_forward()
        awaiting = _Awaiting()
        self._awaiting = weakref.ref(awaiting)
        return [each.detach().clone() for each in self._made.outputs.values()], awaiting

    def backward(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of the input, if it needs one, and of the parameters."""
        for own, grad in zip(self._grads, compress(grads, self.moving), strict=True):
            own.copy_(grad)
        self._run_backward()
        copies = iter(torch._foreach_mul([each for each in self._made.gradients if each is not None], 1))
        return [None if each is None else next(copies) for each in self._made.gradients]


class _Made:
    """What the last run of a graph made; recorded on a GPU, every run writes to the same tensors."""

    outputs: dict[str, Tensor]
    sums: dict[str, Tensor]
    inputs: list[Tensor]
    gradients: list[Tensor | None]

    def let_go(self) -> None:
        """Keep nothing alive but results: the graphs find the rest where it was, in memory that is theirs.

        Parameters could otherwise not leave the device. Gradients' memory is shared by graphs that run one at a time.
        """
        self.outputs = {name: each.detach() for name, each in self.outputs.items()}
        self.sums = {name: each.detach() for name, each in self.sums.items()}
        self.inputs = []
        self.gradients = [None if each is None else _unowned(each) for each in self.gradients]


def replay_training(
    graph: TrainingGraph, x: Tensor, mask: Tensor | None, parameters: Sequence[Tensor], tensors: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output and the auxiliary losses. ``parameters`` are those of the layer's ``tensors`` that train."""
    y, *losses = _Replay.apply(graph, x, mask, tensors, *parameters)
    return y, dict(zip(graph.losses, losses, strict=True))


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, x, mask, tensors, *parameters):
        ctx.graph, ctx.tensors, ctx.state = graph, tensors, _state_of(tensors)
        outputs, ctx.awaiting = graph.forward(x, mask)
        ctx.mark_non_differentiable(*(each for each, moves in zip(outputs, graph.moving, strict=True) if not moves))
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        if torch._C._functorch.is_legacy_batchedtensor(grads[0]) or transformed():
            raise RuntimeError(f"a layer that is replayed from CUDA graphs has no batched gradients: {LAUNCH}")
        if ctx.awaiting is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: what the first backward read is gone. Specify "
                "retain_graph=True if you need to backward through the graph a second time"
            )
        if ctx.state != _state_of(ctx.tensors):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                "parameter of the layer was changed or moved between forward and backward"
            )
        with one_at_a_time, torch.no_grad():
            gradients = ctx.graph.backward(grads)
        if torch.is_grad_enabled():  # by create_graph=True
            gradients = _differentiable_once(gradients)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.awaiting = None
        x_grad = gradients.pop(0) if ctx.needs_input_grad[1] else None
        return None, x_grad, None, None, *gradients


def _differentiable_once(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The same, but who differentiates them gets an error; they would otherwise count as constants."""
    error = f"a layer that is replayed from CUDA graphs has no second derivatives: {LAUNCH}"
    needing = [None if each is None else each.requires_grad_() for each in gradients]
    return list(torch._C._functions.DelayedError(error.encode(), len(needing))(*needing))


def _state_of(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Addresses, and of parameters also versions; buffers may change, as counts do in another forward."""
    return [(each._version if isinstance(each, nn.Parameter) else 0, each.data_ptr()) for each in tensors]


@contextmanager
def _aliased(parameters: Sequence[Tensor], tables: Tables) -> Iterator[list[nn.Parameter]]:
    """Put other parameters in the same memory into the modules' ``tables``, and return them in the same order.

    The recorded backward ends at these. It must neither run the hooks of the real ones nor wait for the stream on which
    their gradients are usually added.
    """
    aliases = {id(each): nn.Parameter(each.detach()) for each in parameters}
    replaced = [(table, name, each) for table in tables for name, each in table.items() if id(each) in aliases]
    for table, name, each in replaced:
        table[name] = aliases[id(each)]
    try:
        yield list(aliases.values())
    finally:
        for table, name, each in replaced:
            table[name] = each


class _Memory:
    def __init__(self, tensor: Tensor) -> None:
        pointer, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def _unowned(tensor: Tensor) -> Tensor:
    """The same numbers, without owning their memory."""
    flat: Any = torch.as_tensor(_Memory(tensor), device=tensor.device)
    return flat.view(tensor.dtype).view(tensor.shape)
