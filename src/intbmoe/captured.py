"""Inference replayed from CUDA graphs: recorded once for each shape, started by one call.

A small model's forward is hundreds of short kernels, which Python starts far more slowly than a large GPU runs them. A
graph starts them at once. It reads and writes at fixed places, so inputs are copied there, and shapes are rounded up to
a few. On the CPU a recorded function is the function itself, so that everything around the graphs can be tested there.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from intbmoe.layer import moe_layers

Recorded = Callable[[], None]


class CaptureError(RuntimeError):
    """A function cannot be recorded; the message says why."""


def ladder(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, …, ``most``: at most half of what is computed is padding, of many a third."""
    steps = {most}
    power = 1
    while power < most:
        steps.add(power)
        if power >= 16 and power * 3 // 2 < most:
            steps.add(power * 3 // 2)
        power *= 2
    return tuple(sorted(steps))


def halves(most: int, least: int = 1) -> tuple[int, ...]:
    """A quarter of ``most``, half of it and all, none below ``least``."""
    return tuple(sorted({max(least, -(-most // part)) for part in (4, 2, 1)}))


def addresses(model: nn.Module) -> list[int]:
    """Where its weights and buffers are: a graph goes on reading there, whatever the module says."""
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]


class Mirror:
    """The same flat buffer on the host, where Python fills or reads it, and on the device, where graphs do."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(size, dtype=dtype, pin_memory=on_gpu)
        self.device = torch.zeros(size, dtype=dtype, device=device) if on_gpu else self.host
        self.array = self.host.numpy()  # the host's, as numpy sees it

    def to_device(self, count: int) -> None:
        if self.device is not self.host:
            self.device[:count].copy_(self.host[:count], non_blocking=True)

    def to_host(self, count: int) -> None:
        """Copy the first ``count`` entries here, and wait for that and for all that was started before."""
        if self.device is not self.host:
            self.host[:count].copy_(self.device[:count], non_blocking=True)
            torch.cuda.current_stream(self.device.device).synchronize()


class Recorder:
    """Records functions that take nothing and return nothing: they read and write tensors that stay where they are."""

    def __init__(self, device: torch.device, model: nn.Module, beside: "Recorder | None" = None) -> None:
        """``model`` is what the functions run; what its layers tell ``record_routing`` they go on telling it.

        With a Recorder ``beside``, their graphs share memory: one may run when nobody needs what another has left.
        """
        self._device, self._statistics = device, [layer.statistics for _, layer in moe_layers(model)]
        self._constants = _Constants()
        if device.type == "cuda":
            self._memory = _Memory(device) if beside is None else beside._memory

    def record(self, function: Recorded) -> Recorded:
        """What does the same as ``function``, which on a GPU runs three times meanwhile; raises ``CaptureError``."""
        if self._device.type != "cuda":
            return function
        with torch.cuda.device(self._device):
            self._memory.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._memory.stream), self._constants:
                try:
                    function()  # compiles kernels, chooses algorithms, makes the constants
                    replay = self._capture(function)
                except RuntimeError as error:
                    # A broken recording leaves the device's generator waiting for its end: random numbers would fail.
                    generator = torch.cuda.default_generators[torch.cuda.current_device()]
                    generator.graphsafe_set_state(generator.clone_state())
                    # Ending a broken recording raises an error of its own.
                    raise CaptureError(str(error.__context__ or error)) from error
            torch.cuda.current_stream().wait_stream(self._memory.stream)
            replay()  # the first time takes longer: the device gets the graph
        return replay

    def _capture(self, function: Recorded) -> Recorded:
        graph = torch.cuda.CUDAGraph()
        # The tensors in which a graph leaves its routing are kept with it: a sample of the routing costs nothing.
        with ExitStack() as stack:
            routed = [(statistics, stack.enter_context(statistics.recording())) for statistics in self._statistics]
            # Not torch.cuda.graph, which empties the allocator's cache each time. Other threads may use the GPU.
            with _garbage_waits():
                graph.capture_begin(self._memory.pool, capture_error_mode="thread_local")
                try:
                    function()
                finally:
                    graph.capture_end()

        def replay() -> None:
            graph.replay()
            for statistics, calls in routed:
                statistics.repeat(calls)

        return replay


@contextmanager
def _garbage_waits() -> Iterator[None]:
    """Python collects no cycles meanwhile: a graph among them, of a model that is gone, would break the recording."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _Memory:
    """A pool that graphs share, and its stream: the allocator hands memory on within a stream only.

    It refuses a pool whose last graph has been deleted, so the pool has a graph of its own, which never runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self._keeper = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.stream(self.stream):
            self._keeper.capture_begin(self.pool, capture_error_mode="thread_local")
            torch.zeros(1, device=device)
            self._keeper.capture_end()


class _Constants(TorchFunctionMode):
    """Keeps what ``torch.tensor`` makes of Python's numbers: a graph cannot copy them from the host, nor need it to."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[str, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.tensor or not isinstance(args[0], int | float | list | tuple):
            return func(*args, **kwargs)
        key = repr((args, sorted(kwargs.items())))
        if key not in self._kept:
            self._kept[key] = func(*args, **kwargs)
        return self._kept[key]
