"""Times the whole layer over a grid of sizes, to find sizes that are far from the sum of their stages' floors.

``gpu.py --sections grid`` runs it; ``--worst 19 --of FILE`` times only the worst layers of an earlier output again. A
cliff is a layer that takes more than ``CLIFF`` times the sum, or, if that sum is below ``SHORT_MS``, more than
``SHORT_CLIFF`` times, because launches dominate there. For the worst layers the stages are timed too, to find the slow
one.
"""

import random
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from gpu_layers import build, draw_ids, force_load, shares
from gpu_stages import Shape, measure, stages
from gpu_timing import Ceilings, both_call, forward_call, graph_ms, number, print_table, reason, say

from intbmoe import IntBMoEConfig

CLIFF, SHORT_CLIFF, SHORT_MS = 2.5, 4.0, 0.05
WORST = 20
LOOKED_INTO = 6
"""How many of the worst layers are timed stage by stage."""
LARGE_BYTES = 6e9
"""Layers larger than this are compiled one at a time: several at once would not fit into the device's memory."""


def grid() -> Iterator[tuple[Shape, str]]:
    """Returns shapes and routings: a language model's layer with one size changed at a time, then with several."""

    def point(dim=768, hidden=None, experts=16, blocks=8, k=2, tokens=8192, routing="balanced"):
        hidden = 4 * dim if hidden is None else hidden
        config = IntBMoEConfig(dim, hidden, experts=experts, blocks=blocks, top_k=min(k, blocks))
        return Shape("grid", tokens, config), routing

    for dim in (64, 96, 100, 192, 256, 384, 512, 771, 1024, 1536, 2048):
        yield point(dim)
    for dim, hidden in ((2048, 5632), (3072, 8192), (4096, 14336), (8192, 16384)):
        yield point(dim, hidden, experts=4, tokens=4096)
    for hidden in (768, 1001, 2050, 2844, 3001, 3080):
        yield point(hidden=hidden)
    for blocks in (1, 2, 4, 16, 32, 64, 256):
        yield point(blocks=blocks)
    for k in (1, 4, 8):
        yield point(k=k)
    for experts in (1, 4, 64, 256):
        yield point(experts=experts)
    for hidden in ((), (1024, 1024), (512, 512, 512)):
        yield point(hidden=hidden)
    for tokens in (1, 16, 128, 1024, 2048, 65536):
        yield point(tokens=tokens)
    yield point(routing="Zipf")
    yield point(blocks=64, routing="Zipf")
    for dim, experts, blocks, k in ((384, 128, 64, 4), (192, 512, 128, 8), (96, 512, 256, 8), (256, 32, 32, 1)):
        yield point(dim, experts=experts, blocks=blocks, k=k)
    yield point(1024, 4096, experts=32, blocks=16, tokens=16384)
    yield point(2048, 5632, experts=8)
    draw = random.Random(0)
    for _ in range(16):
        dim = draw.choice((64, 80, 128, 200, 320, 640, 1000, 1280))
        hidden = tuple(draw.randrange(dim, 4 * dim + 1) for _ in range(draw.choice((0, 1, 1, 1, 2, 3))))
        blocks = draw.choice((1, 3, 6, 8, 12, 24, 48, 96))
        sizes = {"experts": draw.choice((1, 2, 7, 16, 48, 200)), "blocks": blocks, "k": draw.choice((1, 2, 3, 6))}
        yield point(dim, hidden, **sizes, tokens=draw.choice((4, 300, 3000, 12000, 30000)), routing="Zipf")


def describe(shape: Shape, routing: str) -> str:
    c = shape.config
    widths = "→".join(str(width) for width in c.widths)
    return f"{widths}, E {c.experts}, K {c.blocks}, k {c.top_k}, {shape.tokens:,} tokens, {routing}"


def worst_of(path: Path, count: int) -> list[tuple[Shape, str]]:
    """Returns the points of the grid that were farthest from their floors in the output of an earlier run."""
    lines = re.findall(r"^(.+): forward ([\d.]+) × both ([\d.]+) ×$", path.read_text(), re.MULTILINE)
    if not lines:
        raise ValueError(f"{path} has no line '<layer>: forward … × both … ×': give the output of --sections grid")
    ratios = {layer: max(float(forward), float(both)) for layer, forward, both in lines}
    points = [point for point in grid() if describe(*point) in ratios]
    return sorted(points, key=lambda point: -ratios[describe(*point)])[:count]


def time_point(shape: Shape, routing: str, device: torch.device, ceilings: Ceilings) -> dict[str, Any]:
    """Measures milliseconds, floors, TFLOP/s and TB/s of forward and of forward+backward, in a graph."""
    torch.manual_seed(0)
    layer, x = build(shape, device), torch.randn(1, shape.tokens, shape.config.dim, device=device)
    force_load(layer.router, x, shape.config.top_k, shares(routing, shape.config.blocks))
    every = stages(shape, device, lambda n, choices, k: draw_ids(n, choices, k, device))
    costs = {"forward": [stage.cost for stage in every]}
    costs["both"] = costs["forward"] + [cost for stage in every for _, cost in stage.gradients.values()]
    found: dict[str, Any] = {"shape": describe(shape, routing)}
    for name, make in (("forward", forward_call), ("both", both_call)):
        layer.train(name == "both")
        ms = graph_ms([make(layer, x, True)], device)
        floor = sum(cost.floor_ms(ceilings) for cost in costs[name])
        found[name] = {
            "ms": ms,
            "floor_ms": floor,
            "ratio": ms / floor,
            "tflops": sum(cost.flops for cost in costs[name]) / ms / 1e9,
            "tb_per_s": sum(cost.bytes for cost in costs[name]) / ms / 1e9,
            "cliff": ms / floor > (SHORT_CLIFF if floor < SHORT_MS else CLIFF),
        }
    return found


def worst_stages(shape: Shape, device: torch.device, ceilings: Ceilings) -> str:
    """Lists the stages that lose the most time compared with their floors."""
    every = stages(shape, device, lambda n, choices, k: draw_ids(n, choices, k, device))
    entries = [entry for stage in every for entry in measure(stage, device, ceilings)]
    timed = [entry for entry in entries if "ms" in entry]
    timed.sort(key=lambda entry: entry["floor_ms"] - entry["ms"])
    text = [f"{e['pass']} {e['stage']} {e['ms'] * 1e3:.0f} µs ({e['ms'] / e['floor_ms']:.1f} ×)" for e in timed[:5]]
    return "; ".join(text + [f"{e['stage']} failed: {e['failed']}" for e in entries if "failed" in e])


def compile_points(points: list[tuple[Shape, str]], workers: int, device: torch.device) -> None:
    """Compiles the kernels of ``points`` in several processes, a layer at a time each; prints what failed and why."""
    if workers:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            for failure in filter(None, pool.map(_compile, *zip(*points, strict=True), [device] * len(points))):
                say(f"not compiled in advance: {failure}")


def time_grid(
    device: torch.device, ceilings: Ceilings, workers: int, points: list[tuple[Shape, str]]
) -> dict[str, Any]:
    """Times ``points``, prints the worst and those that cannot run, and returns all figures."""
    compile_points([point for point in points if _bytes(point[0]) < LARGE_BYTES], workers, device)
    found = []
    for shape, routing in points:
        try:
            found.append((time_point(shape, routing, device, ceilings), shape))
            entry = found[-1][0]
            ratios = " ".join(f"{name} {entry[name]['ratio']:.2f} ×" for name in ("forward", "both"))
            print(f"{entry['shape']}: {ratios}", file=sys.stderr, flush=True)
        except Exception as error:
            say(f"failed: {describe(shape, routing)}: {reason(error)}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    found.sort(key=lambda entry: -max(entry[0][name]["ratio"] for name in ("forward", "both")))
    header = ("layer", "fwd µs", "× floor", "TFLOP/s", "TB/s", "fwd+bwd µs", "× floor", "TFLOP/s", "TB/s", "cliff")
    rows = [
        (entry["shape"], *_cells(entry["forward"]), *_cells(entry["both"]), _cliffs(entry))
        for entry, _ in found[:WORST]
    ]
    cliffs = sum(bool(_cliffs(entry)) for entry, _ in found)
    note = f"{cliffs} of {len(found)} layers are cliffs"
    print_table(f"The worst {len(rows)} of {len(found)} layers", header, rows, note)
    for entry, shape in found[:LOOKED_INTO]:
        say(f"{entry['shape']}: {worst_stages(shape, device, ceilings)}")
    return {"points": [entry for entry, _ in found], "cliffs": cliffs}


def _cells(entry: dict[str, float]) -> tuple[str, ...]:
    return (
        number(entry["ms"] * 1e3, 0),
        number(entry["ratio"], 2),
        number(entry["tflops"], 0),
        number(entry["tb_per_s"], 2),
    )


def _cliffs(entry: dict[str, Any]) -> str:
    return ", ".join(name for name in ("forward", "both") if entry[name]["cliff"])


def _bytes(shape: Shape) -> float:
    """Estimates how much memory a forward and backward need at once."""
    c = shape.config
    rows = shape.tokens * c.top_k * sum(c.widths) * 12
    return 8 * c.experts * c.expert_weights + 8 * c.blocks * c.expert_weights + rows


def _compile(shape: Shape, routing: str, device: torch.device) -> str:
    """Runs the layer forward and backward once, to fill Triton's cache; returns the reason if that failed."""
    try:
        layer, x = build(shape, device), torch.randn(1, shape.tokens, shape.config.dim, device=device)
        forward_call(layer, x, True)()
        both_call(layer, x, True)()
        torch.cuda.synchronize(device)
    except Exception as error:
        return f"{describe(shape, routing)}: {reason(error)}"
    finally:
        torch.cuda.empty_cache()
    return ""
