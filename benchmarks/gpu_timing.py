"""What the GPU benchmarks share: device events, CUDA graphs, peak memory, the device's ceilings, plain tables.

Without a GPU everything runs on the CPU by the host's clock, and a "graph" is just its calls: enough to see that a
script works, and nothing else.
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

MIB = 2**20
PAGE = 110
"""Columns."""
SECONDS = 0.12
"""Given to one measurement after its warm-up, as far as its least number of repetitions allows."""

Call = Callable[[], object]


@cache
def stream() -> torch.cuda.Stream:
    """The one stream on which graphs are captured: what is differentiated in one must have been computed on it."""
    return torch.cuda.Stream()


@contextmanager
def capturing_stream(device: torch.device) -> Iterator[None]:
    """Run what is inside on the stream of the graphs, after all that came before and before all that follows."""
    if device.type == "cpu":
        yield
        return
    stream().wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream()):
        yield
    torch.cuda.current_stream().wait_stream(stream())


class Graph:
    """Calls captured once, to be replayed together; their outputs stay apart, so none is overwritten in the cache."""

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
        """All calls once."""
        if self.device.type == "cpu":
            for call in self.calls:
                call()
        else:
            self.graph.replay()


class _HostMark:
    """An event by the host's clock."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: "_HostMark") -> float:
        return (end.seconds - self.seconds) * 1e3


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(calls: Sequence[Call], device: torch.device, seconds: float = SECONDS, least: int = 7) -> list[float]:
    """Milliseconds of each call, medians over rounds in which all run once, with events between them."""
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
    """Every call, and the wait for it."""
    for call in calls:
        call()
    synchronize(device)


def eager_ms(call: Call, device: torch.device, least: int = 7) -> float:
    """Milliseconds of a call, started operation by operation."""
    return interleaved([call], device, least=least)[0]


def graph_ms(calls: Sequence[Call], device: torch.device) -> float:
    """Milliseconds of one of ``calls`` when a replayed graph holds them all."""
    return interleaved([Graph(calls, device).replay], device)[0] / len(calls)


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """The most bytes of tensors alive at once during a call, beyond those alive before it; None on the CPU."""
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
    """What the device reached on large, simple work."""

    bytes_per_s: float
    """A copy, bytes read and bytes written."""
    flops: dict[torch.dtype, float]
    """A square matrix product by torch, by type."""
    kernel_ms: float
    """The smallest kernel there is, among others of its kind in a graph."""

    def __str__(self) -> str:
        rates = ", ".join(f"{str(dtype)[6:]} {rate / 1e12:,.1f} TFLOP/s" for dtype, rate in self.flops.items())
        return (
            f"copy {self.bytes_per_s / 1e12:.2f} TB/s (read + written); matrix product {rates}; "
            f"smallest kernel in a graph {self.kernel_ms * 1e3:.1f} µs"
        )


def measure_ceilings(device: torch.device, tiny: bool) -> Ceilings:
    """Copy 2 GiB, and multiply random matrices of 8192 rows and columns."""
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
    """The least that must be done: each input read once, each output written once, and the arithmetic."""

    bytes: float
    flops: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    """Of the products."""

    def floor_ms(self, ceilings: Ceilings) -> float:
        """The largest of the times to move the bytes, to multiply, and of the smallest kernel there is."""
        work = max(self.bytes / ceilings.bytes_per_s, self.flops / ceilings.flops[self.dtype])
        return max(1e3 * work, ceilings.kernel_ms)


def bf16_autocast(device: torch.device) -> AbstractContextManager:
    """Autocast without its cache of weights, which a graph must not share with what ran before it."""
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def forward_call(module: nn.Module, x: Tensor, autocast: bool) -> Call:
    """One forward without gradients."""

    def run() -> Tensor:
        with torch.no_grad(), bf16_autocast(x.device) if autocast else nullcontext():
            return module(x)

    return run


def both_call(module: nn.Module, x: Tensor, autocast: bool) -> Call:
    """One forward and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    leaves = [x, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    probe = torch.randn_like(x)

    def run() -> tuple[Tensor, ...]:
        with bf16_autocast(x.device) if autocast else nullcontext():
            y = module(x)
        return torch.autograd.grad(y, leaves, probe)

    return run


def describe(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
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
    """An error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"


def number(value: float | None, digits: int = 3) -> str:
    """A figure for a table; a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def say(text: str) -> None:
    """Print, lines folded to the width of a page."""
    for line in text.splitlines():
        print(textwrap.fill(line, PAGE, subsequent_indent="  ", break_on_hyphens=False))
    sys.stdout.flush()


def print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "", over: Sequence[str] = ()
) -> None:
    """A plain table: the first column to the left, all others to the right; ``over`` is a line above the header."""
    heads = [over, header] if over else [header]
    widths = [max(len(row[i]) for row in (*heads, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "  ".join([f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in rest)]).rstrip()

    print()
    say(title)
    print(*map(line, heads), "  ".join("-" * width for width in widths), *map(line, rows), sep="\n")
    say(note)
