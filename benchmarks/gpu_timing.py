"""What the GPU benchmarks share: device events, CUDA graphs, peak memory, the device's ceilings, plain tables.

Without a GPU, everything runs on the CPU by the host's clock, and a "graph" is just its calls. This shows only that a
script works.
"""

import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from intbmoe.graphs import replay

MIB = 2**20
PAGE = 110
"""Columns."""
SECONDS = 0.12
"""Time for one measurement after its warm-up; longer if its minimum number of repetitions needs it."""

Call = Callable[[], object]


@cache
def stream() -> torch.cuda.Stream:
    """Returns the one stream on which graphs are captured: a captured backward needs its forward on the same stream."""
    return torch.cuda.Stream()


@contextmanager
def capturing_stream(device: torch.device) -> Iterator[None]:
    """Runs its body on the graphs' stream, after all earlier work and before all later work."""
    if device.type == "cpu":
        yield
        return
    stream().wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream()):
        yield
    torch.cuda.current_stream().wait_stream(stream())


class Graph:
    """Calls captured once and replayed together; each keeps its own output, so none is overwritten in the cache."""

    def __init__(self, calls: Sequence[Call], device: torch.device) -> None:
        self.calls = calls
        self.device = device
        if device.type == "cpu":
            return
        with capturing_stream(device):
            for call in calls:
                call()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream()):
            kept = [call() for call in calls]
        del kept

    def replay(self) -> None:
        """Runs all calls once."""
        if self.device.type == "cpu":
            for call in self.calls:
                call()
        else:
            self.graph.replay()


class _HostMark:
    """A replacement for a device event that uses the host's clock."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: "_HostMark") -> float:
        return (end.seconds - self.seconds) * 1e3


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(calls: Sequence[Call], device: torch.device, seconds: float = SECONDS, least: int = 7) -> list[float]:
    """Measures each call in milliseconds: medians over rounds in which all run once, with events between them."""
    rounds = 1
    if device.type == "cuda":
        one_by_one(calls, device)
        begin = time.perf_counter()
        one_by_one(calls, device)
        one_round = time.perf_counter() - begin
        rounds = max(least, min(200, int(seconds * len(calls) / one_round)))
    make = _HostMark if device.type == "cpu" else lambda: torch.cuda.Event(enable_timing=True)
    marks = [[(make(), make()) for _ in calls] for _ in range(rounds)]
    for row in marks:
        for (start, end), call in zip(row, calls, strict=True):
            start.record()
            call()
            end.record()
    synchronize(device)
    return [statistics.median(row[i][0].elapsed_time(row[i][1]) for row in marks) for i in range(len(calls))]


def one_by_one(calls: Sequence[Call], device: torch.device) -> None:
    """Runs every call and waits for it."""
    for call in calls:
        call()
    synchronize(device)


def eager_ms(call: Call, device: torch.device, least: int = 7) -> float:
    """Measures a call in milliseconds, launched operation by operation, as layers replay no graphs of their own."""
    enabled, replay.enabled = replay.enabled, False
    try:
        return interleaved([call], device, least=least)[0]
    finally:
        replay.enabled = enabled


def graph_ms(calls: Sequence[Call], device: torch.device) -> float:
    """Measures one of ``calls`` in milliseconds, in a replayed graph of all of them."""
    return interleaved([Graph(calls, device).replay], device)[0] / len(calls)


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Measures the peak size of live tensors during a call, beyond those alive before it; None on the CPU."""
    if device.type == "cpu":
        call()
        return None
    call()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak


@dataclass(frozen=True)
class Ceilings:
    """The rates that the device reached on large, simple work."""

    bytes_per_s: float
    """Of a copy: bytes read plus bytes written."""
    flops: dict[torch.dtype, float]
    """Of torch's square matrix product, by type."""
    kernel_ms: float
    """Of the smallest possible kernel, among others of its kind in a graph."""

    def __str__(self) -> str:
        rates = ", ".join(f"{str(dtype)[6:]} {rate / 1e12:,.1f} TFLOP/s" for dtype, rate in self.flops.items())
        return (
            f"copy {self.bytes_per_s / 1e12:.2f} TB/s (read + written); matrix product {rates}; "
            f"smallest kernel in a graph {self.kernel_ms * 1e3:.1f} µs"
        )


def measure_ceilings(device: torch.device, tiny: bool) -> Ceilings:
    """Copies 2 GiB, and multiplies random matrices of 8192 rows and columns."""
    source = torch.randn(2**16 if tiny else 2**29, device=device)
    target = torch.empty_like(source)
    copy_ms = eager_ms(lambda: target.copy_(source), device)
    bandwidth = 2 * source.numel() * source.element_size() / copy_ms * 1e3
    side, flops = 64 if tiny else 8192, {}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        flops[dtype] = 2 * side**3 / eager_ms(lambda a=a, b=b: a @ b, device) * 1e3
    one = torch.zeros(1, device=device)
    return Ceilings(bandwidth, flops, graph_ms([lambda: one.add_(1)] * 64, device))


@dataclass(frozen=True)
class Cost:
    """The minimum work: reading each input once, writing each output once, and the arithmetic."""

    bytes: float
    flops: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    """Of the products."""

    def floor_ms(self, ceilings: Ceilings) -> float:
        """Returns the largest of three times: moving the bytes, multiplying, and the smallest possible kernel."""
        work = max(self.bytes / ceilings.bytes_per_s, self.flops / ceilings.flops[self.dtype])
        return max(1e3 * work, ceilings.kernel_ms)


def bf16_autocast(device: torch.device) -> AbstractContextManager:
    """Returns autocast without its cache of weights, which a graph must not share with earlier code."""
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def forward_call(module: nn.Module, x: Tensor, autocast: bool) -> Call:
    """Returns a call of one forward without gradients."""

    def run() -> Tensor:
        with torch.no_grad(), bf16_autocast(x.device) if autocast else nullcontext():
            return module(x)

    return run


def both_call(module: nn.Module, x: Tensor, autocast: bool) -> Call:
    """Returns a call of one forward and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    leaves = [x, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    probe = torch.randn_like(x)

    def run() -> tuple[Tensor, ...]:
        with bf16_autocast(x.device) if autocast else nullcontext():
            y = module(x)
        return torch.autograd.grad(y, leaves, probe)

    return run


def describe(device: torch.device) -> dict[str, Any]:
    """Returns the facts that the figures depend on."""
    try:
        import triton

        version = triton.__version__
    except ModuleNotFoundError:
        version = "none"
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none: a dry run, whose figures mean nothing"
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version,
        "date": datetime.now(UTC).date().isoformat(),
    }


def reason(error: Exception) -> str:
    """Describes an error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"


def number(value: float | None, digits: int = 3) -> str:
    """Formats a figure for a table, or a dash if there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def say(text: str) -> None:
    """Prints text, with lines folded to the width of a page."""
    for line in text.splitlines():
        print(textwrap.fill(line, PAGE, subsequent_indent="  ", break_on_hyphens=False))
    sys.stdout.flush()


def print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "", over: Sequence[str] = ()
) -> None:
    """Prints a plain table, the first column aligned left, the others right; ``over`` is a line above the header."""
    heads = [over, header] if over else [header]
    widths = [max(len(row[i]) for row in (*heads, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "  ".join([f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in rest)]).rstrip()

    print()
    say(title)
    print(*map(line, heads), "  ".join("-" * width for width in widths), *map(line, rows), sep="\n")
    say(note)
