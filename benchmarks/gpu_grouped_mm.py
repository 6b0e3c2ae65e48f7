"""Times the grouped products of one layer on a GPU: each tile against torch's grouped GEMM and a dense product.

    python benchmarks/gpu_grouped_mm.py                  # about a minute: the paper's shapes
    python benchmarks/gpu_grouped_mm.py --layers wide    # widths 2048 and 4096
    python benchmarks/gpu_grouped_mm.py --json out.json  # also every figure

First every product is checked against float64 on fresh random inputs; if one is wrong, the script exits with status 1.
Then each is timed in bfloat16 by replaying a CUDA graph of many calls, over several sets of inputs if one set would
stay in the L2 cache. The candidates for a product take turns, because a GPU slows down as it warms up. Figures are
microseconds per call, medians over replays, for balanced and then Zipf routing. "dense" is one cuBLAS product of as
many operations, "torch" is F.grouped_mm, "table" is what ``fused.run_mm`` and ``fused.run_outer`` choose. The other
columns are tiles: 256 is 128 × 256, d reads through tensor descriptors, P is persistent. TFLOP/s are those of the
fastest tile, balanced. Wide layers are timed with the best tiles only.

Several processes compile in parallel before anything is timed.
"""

import argparse
import json
import math
import statistics
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from intbmoe.machine import usable_cores
from intbmoe.ops.grouped_mm import fused, naive
from intbmoe.ops.grouped_mm.fused import Tile
from intbmoe.ops.triton_support import aligned

DEVICE = "cuda"
L2_BYTES = 60e6
CALLS, REPLAYS = 20, 9
REPLAY_FLOPS = 1e12
"""About what one replay computes at most: 2 ms on an H200."""
MANY_FLOPS = 5e11
"""Larger products are timed with the best tiles only."""
ROUTINGS = ("balanced", "zipf")
KINDS = ("fwd", "dx", "dw")
MM_TILES = {
    "256": Tile(128, 256, 64, 8, 3),
    "256d": Tile(128, 256, 64, 8, 4, descriptors=True),
    "256dP": Tile(128, 256, 64, 8, 4, descriptors=True, persistent=1),
    "128": Tile(128, 128, 64, 4, 3),
    "128d": Tile(128, 128, 64, 4, 3, descriptors=True),
    "128dP": Tile(128, 128, 64, 4, 3, descriptors=True, persistent=2),
}
WIDE_TILES = {name: MM_TILES[name] for name in ("256d", "256dP")}
OUTER_TILES = {name: MM_TILES[name] for name in ("256", "256d", "128", "128d")}
FEW_ROWS_TILES = {
    "16": Tile(16, 128, 64, 4, 4),
    "16d": Tile(16, 128, 64, 4, 4, descriptors=True),
    "16n": Tile(16, 64, 128, 4, 4),
    "64": Tile(64, 128, 64, 4, 4),
    "64d": Tile(64, 128, 64, 4, 4, descriptors=True),
}


class Product(NamedTuple):
    """One product of a layer; ``kind`` is fwd, dx (by the transposed weights) or dw (the weights' gradient)."""

    name: str
    kind: str
    rows: int
    groups: int
    inputs: int
    outputs: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inputs * self.outputs

    @property
    def tiles(self) -> dict[str, Tile]:
        wide = self.flops > MANY_FLOPS
        if self.kind == "dw":
            return OUTER_TILES if not wide else {"256d": OUTER_TILES["256d"]}
        if wide:
            return WIDE_TILES
        return FEW_ROWS_TILES if self.rows <= 64 * self.groups else MM_TILES


LAYERS = {
    "paper": (("MiniPile", 8192, 768, 2844), ("ImageNet", 50176, 192, 768), ("IntTravel", 8064, 96, 384)),
    "wide": (("2048→5632", 8192, 2048, 5632), ("4096→14336", 8192, 4096, 14336)),
}
"""Name, tokens, width and hidden width of each layer."""
WIDE_WORKERS = 3
"""Processes for wide layers, because each needs up to 40 GB to check in float64."""


def products(layers: str) -> list[Product]:
    """Returns both products of each layer; of the paper's, also MiniPile's first for one and for 126 tokens."""
    found = []
    for name, tokens, dim, hidden in LAYERS[layers]:
        for kind in KINDS:
            found.append(Product(f"{name} 1", kind, 2 * tokens, 8, dim, 2 * hidden))
            found.append(Product(f"{name} 2", kind, 2 * tokens, 8, hidden, 2 * dim))
    if layers == "paper":
        found += [Product(f"{tokens} tokens", "fwd", 2 * tokens, 8, 768, 5688) for tokens in (1, 126)]
    return found


class Inputs(NamedTuple):
    """The inputs of a product; ``probe`` is the gradient of its output."""

    x: Tensor
    weight: Tensor
    offsets: Tensor
    probe: Tensor


def ends(routing: str, rows: int, groups: int) -> Tensor:
    """Returns (groups,), the end of each group's rows."""
    probability = torch.ones(groups)
    if routing == "zipf":
        probability = 1 / torch.arange(1.0, groups + 1)
    elif routing == "one":
        probability = torch.eye(groups)[groups // 2]
    elif routing == "empty":
        probability = (torch.arange(groups) % 2).float()
    grouped = int(0.8 * rows) if routing == "masked" else rows
    ids = torch.multinomial(probability, grouped, replacement=True) if grouped else torch.zeros(0, dtype=torch.long)
    return torch.bincount(ids, minlength=groups).cumsum(0).int().to(DEVICE)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    """Makes random rows that start at multiples of 16 bytes, as in the layer, with NaN behind them."""
    rows = torch.full((*shape[:-1], aligned(shape[-1], dtype)), math.nan, device=DEVICE, dtype=dtype)
    return rows[..., : shape[-1]].copy_(torch.randn(shape, device=DEVICE, dtype=dtype))


def draw(product: Product, routing: str, dtype: torch.dtype) -> Inputs:
    """Makes fresh random inputs."""
    rows, i, o = product.rows, product.inputs, product.outputs
    return Inputs(
        normal(rows, i, dtype=dtype),
        normal(product.groups, i, o, dtype=dtype),
        ends(routing, rows, product.groups),
        normal(rows, o, dtype=dtype),
    )


def run(product: Product, given: Inputs, tile: Tile | None) -> Tensor:
    """Runs the fused product, with the table's tile if none is given."""
    if product.kind == "dw":
        return fused.run_outer(given.x, given.probe, given.offsets, tile=tile)
    if product.kind == "dx":
        return fused.run_mm(given.probe, given.weight.mT, given.offsets, complete=True, tile=tile)
    return fused.run_mm(given.x, given.weight, given.offsets, complete=True, tile=tile)


def run_torch(product: Product, given: Inputs) -> Tensor:
    """Runs torch's grouped GEMM."""
    if product.kind == "dx":
        return F.grouped_mm(given.probe, given.weight.mT, offs=given.offsets)
    if product.kind == "dw":
        return F.grouped_mm(given.x.t(), given.probe, offs=given.offsets)
    return F.grouped_mm(given.x, given.weight, offs=given.offsets)


def run_dense(product: Product, given: Inputs) -> Tensor:
    """Runs one dense product of as many operations."""
    if product.kind == "dx":
        return given.probe @ given.weight[0].t()
    return given.x.t() @ given.probe if product.kind == "dw" else given.x @ given.weight[0]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Returns ‖found − expected‖ / ‖expected‖; infinite for NaN, or if only one of them is zero."""
    if found.numel() == 0:
        return 0.0 if found.shape == expected.shape else math.inf
    size = expected.norm().item()
    error = (found.double() - expected).norm().item()
    if not math.isfinite(error):
        return math.inf
    return error / size if size else (math.inf if error else 0.0)


def expected_of(given: Inputs, *kinds: str) -> list[Tensor]:
    """Computes the output ("fwd") and the gradients ("dx", "dw") in float64."""
    x, weight = given.x.detach().double(), given.weight.detach().double()
    wanted = {"dx": x, "dw": weight}
    gradients = [wanted[kind].requires_grad_() for kind in kinds if kind in wanted]
    out = naive.grouped_mm(x, weight, given.offsets)
    found = list(torch.autograd.grad(out, gradients, given.probe.double())) if gradients else []
    return [out.detach()] * ("fwd" in kinds) + found


def check(task: tuple[Product, str, torch.dtype]) -> tuple[str, float]:
    """Returns the worst relative error of output and gradients through the op, in units of what its type allows."""
    product, routing, dtype = task
    name = f"{product.rows} rows, {product.inputs}→{product.outputs}, {routing}, {str(dtype)[6:]}"
    try:
        torch.manual_seed(zlib.crc32(name.encode()))
        given = draw(product, routing, dtype)
        expected = expected_of(given, *KINDS)
        x, weight = given.x.requires_grad_(), given.weight.requires_grad_()
        for shape in (expected[0].shape, x.shape, weight.shape):  # so that memory that is not written is NaN
            normal(*shape, dtype=dtype).fill_(math.nan)
        out = fused.grouped_mm(x, weight, given.offsets, routing != "masked")
        found = (out, *torch.autograd.grad(out, (x, weight), given.probe))
        allowed = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
        return name, max(relative_error(a.detach(), b) for a, b in zip(found, expected, strict=True)) / allowed
    except Exception:
        return f"{name}\n{traceback.format_exc()}", math.inf


def check_tile(task: tuple[Product, str]) -> tuple[str, float]:
    """Returns the error of one tile at the shape at which it is timed; also compiles it."""
    product, tile_name = task
    name = f"{product.name} {product.kind}, tile {tile_name}"
    try:
        torch.manual_seed(zlib.crc32(name.encode()))
        given = draw(product, "zipf", torch.bfloat16)
        tile = product.tiles.get(tile_name)
        found = run(product, given, tile)
        (expected,) = expected_of(given, product.kind)
        return name, relative_error(found, expected) / torch.finfo(torch.bfloat16).eps
    except Exception:
        return f"{name}\n{traceback.format_exc()}", math.inf


def checks() -> list[tuple[Product, str, torch.dtype]]:
    """Returns routings, types, numbers of rows and widths; "masked" has rows that belong to no group."""
    found = []
    for dtype in fused.DTYPES:
        for inputs, outputs in ((192, 384), (187, 61), (284, 572)):
            for rows in (0, 1, 7, 16384):
                product = Product("check", "fwd", rows, 8, inputs, outputs)
                routings = ("balanced", "zipf", "one", "empty", "masked") if rows > 7 else ("balanced", "masked")
                found += [(product, routing, dtype) for routing in routings]
    return found


def work(tasks: list) -> list[tuple[str, float]]:
    """Runs one process's share of the checks."""
    return [check(task) if len(task) == 3 else check_tile(task) for task in tasks]


def check_everything(timed: list[Product], workers: int) -> bool:
    """Runs all checks in parallel, also of the products to be timed; returns whether all passed."""
    # Checks that share kernels go to the same process, so that none is compiled twice.
    by_kernel: dict[object, list] = {}
    for task in checks():
        product = task[0]
        by_kernel.setdefault((product.inputs, task[2], product.rows > 7), []).append(task)
    bundles = list(by_kernel.values())
    bundles += [[(product, name)] for product in timed for name in ("table", *product.tiles)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        results = [result for bundle in pool.map(work, bundles) for result in bundle]
    failed = [(name, error) for name, error in results if not error <= 1]
    for name, error in failed:
        print(f"WRONG by {error:.3g} × what is allowed: {name}")
    worst = max(results, key=lambda result: result[1])
    print(f"{len(results) - len(failed)} of {len(results)} products right; the worst at {worst[1]:.2f} of its bound")
    return not failed


def captured(calls: list[Callable[[], object]], count: int) -> torch.cuda.CUDAGraph:
    """Captures a graph of ``count`` calls, which cycle through ``calls``, and replays it once."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            calls[number % len(calls)]()
    graph.replay()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Times one replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measure(product: Product, routing: str) -> dict[str, float | None]:
    """Measures the microseconds of every candidate; None for one that failed."""
    first = draw(product, routing, torch.bfloat16)
    size = sum(t.numel() * t.element_size() for t in first)
    sets = [first, *(draw(product, routing, torch.bfloat16) for _ in range(min(7, int(3 * L2_BYTES // size))))]
    count = max(2, min(CALLS, int(REPLAY_FLOPS / product.flops)))

    def each(function: Callable[..., Tensor], *arguments: object) -> list[Callable[[], object]]:
        return [lambda given=given: function(product, given, *arguments) for given in sets]

    candidates = {
        "dense": each(run_dense),
        "torch": each(run_torch),
        "table": each(run, None),
        **{name: each(run, tile) for name, tile in product.tiles.items()},
    }
    graphs = {}
    for name, calls in candidates.items():
        try:
            graphs[name] = captured(calls, count)
        except Exception as error:
            print(f"{product.name} {product.kind} {name}: {type(error).__name__}: {str(error)[:150]}")
    rounds = [{name: milliseconds(graph) for name, graph in graphs.items()} for _ in range(REPLAYS)]
    median = {name: statistics.median(times[name] for times in rounds) for name in graphs}
    return {name: median[name] * 1e3 / count if name in median else None for name in candidates}


def report(product: Product, figures: dict[str, dict[str, float | None]]) -> str:
    """Formats one line: balanced/Zipf microseconds of each candidate, and the rate of the fastest tile."""
    balanced, zipf = (figures[routing] for routing in ROUTINGS)
    show = lambda time: "–" if time is None else f"{time:.0f}" if time >= 99.5 else f"{time:.1f}"  # noqa: E731
    cells = [f"{name} {show(balanced[name])}/{show(zipf[name])}" for name in balanced if name != "dense"]
    tiles = {name: balanced[name] for name in product.tiles if balanced[name] is not None}
    best = min(tiles, key=tiles.get) if tiles else "none"
    rate = f"{best} {product.flops / tiles[best] / 1e6:.0f} TFLOP/s" if tiles else "no tile ran"
    return f"{product.name:>12} {product.kind:<3} | dense {show(balanced['dense'])} {' '.join(cells)} | {rate}"


def main() -> int:
    """Checks, times and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", choices=LAYERS, default="paper", help="whose products to time (default: paper)")
    parser.add_argument("--json", type=Path, help="also write every figure here")
    parser.add_argument("--workers", type=int, default=min(12, usable_cores()), help="processes that compile")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return 2
    begin = time.perf_counter()
    timed = products(arguments.layers)
    workers = min(arguments.workers, WIDE_WORKERS) if arguments.layers == "wide" else arguments.workers
    right = check_everything(timed, workers)
    print(f"checked and compiled in {time.perf_counter() - begin:.0f} s")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, µs a call, balanced/Zipf", flush=True)
    everything = {}
    for product in timed:
        figures = {routing: measure(product, routing) for routing in ROUTINGS}
        everything[f"{product.name} {product.kind}"] = figures
        print(report(product, figures), flush=True)
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - begin:.0f} s in all")
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=1) + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
