"""What the benchmarks share: interleaved timing, peak memory as the operating system sees it, machine facts.

**Time.** Candidates run round-robin in a shuffled order, so that other work on the machine affects all of them equally.
Times are medians over rounds; ratios are between medians of one run.

**Memory.** ``peak_growth`` is how far the process's resident set rises above its size before the call, by the system's
high-water mark. So it counts all memory that is really held: tensors, the libraries' work buffers, memory that the
allocator keeps. Measure in a fresh process (``in_fresh_process``), because reused memory would not show. It is accurate
to a few MiB.
"""

import ctypes
import gc
import json
import os
import platform
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from intbmoe.machine import usable_cores

MIB = 2**20
console = Console()


@dataclass(frozen=True)
class Candidate:
    """One way to run one layer, to be timed."""

    layer: nn.Module
    prepare: Callable[[], object]
    """Called before each run, not timed."""
    run: Callable[[], object]


def inference(layer: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.inference_mode():
            return layer(x)

    return run


def time_round_robin(
    candidates: Mapping[str, Candidate], seconds: float, rounds: int, label: str
) -> dict[str, list[float]]:
    """Measures each candidate's milliseconds in each round: at least ``rounds`` rounds, more while ``seconds`` last."""
    for candidate in candidates.values():  # warm up
        candidate.prepare()
        candidate.run()
    order = list(candidates.items())
    shuffle = random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in candidates}
    begin = time.perf_counter()
    done = 0
    with console.status(label) as status:
        while done < rounds or time.perf_counter() - begin < seconds:
            shuffle(order)
            for name, candidate in order:
                candidate.prepare()
                start = time.perf_counter()
                candidate.run()
                times[name].append((time.perf_counter() - start) * 1e3)
            done += 1
            status.update(f"{label}: {done} rounds")
    return times


def summary(times: Sequence[float]) -> dict[str, float | int]:
    """Returns median and quartiles."""
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return {"median_ms": middle, "lower_quartile_ms": low, "upper_quartile_ms": high, "rounds": len(times)}


def weight_bytes(layer: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*layer.parameters(), *layer.buffers()))


def figures_table(title: str, first: str, *others: str, **look: Any) -> Table:
    """Makes a table of names and numbers, with the names in the first column."""
    table = Table(title=title, **look)
    table.add_column(first, no_wrap=True)
    for column in others:
        table.add_column(column, justify="right")
    return table


def peak_growth(*calls: Callable[[], object]) -> list[int]:
    """Returns, after each call, by how many bytes the resident set has grown at most since before the first."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system, so that reusing it shows
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark to the current size
    before = _high_water()
    growth = []
    for call in calls:
        result = call()
        growth.append(_high_water() - before)
        del result
    return growth


def _high_water() -> int:
    """Returns the largest resident set so far, in bytes.

    Linux's ru_maxrss does not work here: a process inherits it from its parent, through fork and exec.
    """
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: bytes
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs ``function(*arguments)`` in a new interpreter, which then ends."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def machine(device: str = "cpu") -> dict[str, object]:
    """Returns the facts that the figures depend on; ``device`` is where the models run."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "cores_usable": usable_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        **({"gpu": torch.cuda.get_device_name(device)} if device.startswith("cuda") else {}),
    }


def say_facts(facts: Mapping[str, object]) -> None:
    console.print(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items()))


def write(path: Path, figures: dict) -> None:
    """Writes figures as indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
