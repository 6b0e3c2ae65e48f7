"""Records functions as CUDA graphs: one recording per shape, replayed by one call.

A small model's forward is hundreds of short kernels, which Python launches far more slowly than a large GPU runs them.
A graph launches them all at once. It reads and writes at fixed addresses, so inputs are copied there, and shapes are
rounded up to one of a few. On the CPU, "recording" a function returns it unchanged, so that the code around the graphs
can be tested there.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from intbmoe.statistics import LayerStatistics

Recorded = Callable[[], None]


class CaptureError(RuntimeError):
    """A function cannot be recorded; the message says why."""


def ladder(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, …, ``most``: at most half of a batch is padding, and a third of a large one."""
    steps = {most}
    power = 1
    while power < most:
        steps.add(power)
        if power >= 16 and power * 3 // 2 < most:
            steps.add(power * 3 // 2)
        power *= 2
    return tuple(sorted(steps))


def halves(most: int, least: int = 1) -> tuple[int, ...]:
    """A quarter of ``most``, half of it and all of it, each at least ``least``."""
    return tuple(sorted({max(least, -(-most // part)) for part in (4, 2, 1)}))


def addresses(model: nn.Module) -> list[int]:
    """The addresses of the weights and buffers: a graph keeps reading there even if the module gets new tensors."""
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]


class Mirror:
    """The same flat buffer on the host, for Python to fill or read, and on the device, for graphs to fill or read."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(size, dtype=dtype, pin_memory=on_gpu)
        self.device = torch.zeros(size, dtype=dtype, device=device) if on_gpu else self.host
        self.array = self.host.numpy()  # the host's buffer in numpy

    def to_device(self, count: int) -> None:
        if self.device is not self.host:
            self.device[:count].copy_(self.host[:count], non_blocking=True)

    def to_host(self, count: int) -> None:
        """Copy the first ``count`` entries to the host; wait for the copy and for everything launched before it."""
        if self.device is not self.host:
            self.host[:count].copy_(self.device[:count], non_blocking=True)
            torch.cuda.current_stream(self.device.device).synchronize()


class Recorder:
    """Records functions without arguments or results, which read and write tensors at fixed addresses."""

    def __init__(
        self,
        device: torch.device,
        statistics: Sequence[LayerStatistics] = (),
        beside: "Recorder | None" = None,
        *,
        apart: bool = False,
        constants: bool = True,
    ) -> None:
        """``statistics`` are those of the layers that the functions run, so that ``record_routing`` sees replays too.

        Graphs share memory with those of the Recorder ``beside``, unless ``apart``: before one runs, the results of the
        others must no longer be needed. ``constants`` says whether the functions make tensors from Python numbers.
        """
        self._device, self._statistics = device, statistics
        self._constants = _Constants() if constants else nullcontext()
        if device.type == "cuda":
            shared = None if beside is None else beside._memory
            self._memory = shared if shared and not apart else _Memory(device, shared and shared.stream)

    def record(self, function: Recorded) -> Recorded:
        """Return a function that does the same, or raise ``CaptureError``; on a GPU ``function`` runs three times."""
        if self._device.type != "cuda":
            return function
        with torch.cuda.device(self._device):
            self._memory.stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(self._memory.stream), self._constants:
                    function()  # compiles kernels, chooses algorithms, makes the constants
                    replay = self._capture(function)
            except RuntimeError as error:
                # A failed capture leaves the device's generator waiting for its end: random numbers would fail.
                generator = torch.cuda.default_generators[torch.cuda.current_device()]
                generator.graphsafe_set_state(generator.clone_state())
                with suppress(RuntimeError):  # memory that the function used may go to others next
                    torch.cuda.current_stream().wait_stream(self._memory.stream)
                # Ending a failed capture raises another error; its context is the cause.
                if isinstance(error.__context__, KeyboardInterrupt):
                    raise error.__context__ from None
                raise CaptureError(str(error.__context__ or error)) from error
            torch.cuda.current_stream().wait_stream(self._memory.stream)
            replay()  # the first replay takes longer, because it uploads the graph to the device
        return replay

    def _capture(self, function: Recorded) -> Recorded:
        graph = torch.cuda.CUDAGraph()
        # The tensors to which a graph writes its routing are kept with it, so sampling the routing costs nothing.
        with ExitStack() as stack:
            routed = [(statistics, stack.enter_context(statistics.recording())) for statistics in self._statistics]
            # torch.cuda.graph would empty the allocator's cache each time. Other threads may use the GPU meanwhile.
            with _garbage_waits():
                self._memory.drop_workspaces()
                graph.capture_begin(self._memory.pool, capture_error_mode="thread_local")
                try:
                    function()
                finally:
                    graph.capture_end()
                self._memory.drop_workspaces()

        def replay() -> None:
            graph.replay()
            for statistics, calls in routed:
                statistics.repeat(calls)

        return replay


@contextmanager
def _garbage_waits() -> Iterator[None]:
    """Switch off garbage collection: freeing the graph of a deleted model in the middle of a capture would break it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _Memory:
    """A memory pool that graphs share, and its stream, because the allocator reuses memory only within one stream.

    The allocator refuses a pool whose last graph has been deleted, so the pool keeps its own graph, which never runs.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.stream, self.pool = stream or torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        with torch.cuda.device(device), torch.cuda.stream(self.stream):
            self._keeper = self._tiny_graph()

    def drop_workspaces(self) -> None:
        """Make cuBLAS allocate its workspace anew, on this stream: during a capture, in the memory of the graphs.

        One from before a capture may be freed while the graph still needs it, as newer versions of torch (2.13) free a
        stream's workspace whenever one of its graphs is deleted. Here a tiny one is deleted for that; in older versions
        this has no effect.
        """
        self._tiny_graph().reset()

    def _tiny_graph(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self.pool, capture_error_mode="thread_local")
        try:
            torch.zeros(1, device=self.stream.device)
        finally:
            graph.capture_end()
        return graph


class _Constants(TorchFunctionMode):
    """Caches the tensors that ``torch.tensor`` makes from Python numbers: a graph cannot copy them from the host."""

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
