"""Large layers compared with the goals set for them, and their memory compared with a dense FFN of equal FLOPs.

``gpu.py --sections goals`` runs it. A share is of 989 TFLOP/s, an H200's peak in bfloat16, or of a copy's bandwidth if
the layer is narrow. Memory is the peak of forward and backward above the parameters, launched from Python.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_grid import compile_points, time_point
from gpu_layers import build
from gpu_stages import SHAPES, Shape
from gpu_timing import MIB, Ceilings, both_call, number, peak_bytes, print_table, reason, say

from intbmoe import IntBMoEConfig, MoELayer, create

PEAK_FLOPS = 989e12
MINIPILE, IMAGENET, INTTRAVEL = SHAPES


@dataclass(frozen=True)
class Goal:
    """A layer, and the shares to reach."""

    shape: Shape
    forward: float
    both: float
    bandwidth: bool = False
    """Whether the shares are of a copy's bandwidth."""


GOALS = (
    Goal(MINIPILE, 0.46, 0.42),
    Goal(Shape("40,960 tokens", 40960, MINIPILE.config), 0.48, 0.44),
    Goal(Shape("2048→5632", 8192, IntBMoEConfig(2048, 5632, experts=8)), 0.55, 0.50),
    Goal(Shape("4096→14336", 8192, IntBMoEConfig(4096, 14336, experts=8)), 0.60, 0.56),
    Goal(IMAGENET, 0.70, 0.70, bandwidth=True),
    Goal(INTTRAVEL, 0.70, 0.70, bandwidth=True),
)


def dense_of_equal_flops(config: IntBMoEConfig) -> MoELayer:
    """A SwiGLU network with the FLOPs of a token's blocks, filter and shared expert; its width is a multiple of 16."""
    flops = config.top_k * 4 * config.expert_weights + 6 * config.dim * config.shared_width + 2 * config.dim**2
    return create("swiglu", config.dim, max(16, round(flops / (6 * config.dim) / 16) * 16))


def time_goals(device: torch.device, ceilings: Ceilings, workers: int, tiny: bool) -> list[dict[str, Any]]:
    """Times all layers and prints both tables; returns all figures."""
    goals = [replace(goal, shape=goal.shape.tiny()) for goal in GOALS] if tiny else GOALS
    compile_points([(goal.shape, "balanced") for goal in goals], workers, device)
    found = []
    for goal in goals:
        try:
            found.append(_measure(goal, device, ceilings))
        except Exception as error:
            say(f"failed: {goal.shape.name}: {reason(error)}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    header = ("layer", "of", "fwd ms", "share", "goal", "", "fwd+bwd ms", "share", "goal", "")
    rows = [(entry["layer"], entry["of"], *_cells(entry, "forward"), *_cells(entry, "both")) for entry in found]
    copy = f"{ceilings.bytes_per_s / 1e12:.2f} TB/s"
    note = f"peak: {PEAK_FLOPS / 1e12:.0f} TFLOP/s; copy: {copy}. GPUs of one kind differ, so compare the ceilings"
    print_table("Large layers and their goals, bf16 autocast, graph, balanced", header, rows, note)
    header = ("layer", "IntBMoE", "recompute", "dense", "IntBMoE / dense")
    rows = [(entry["layer"], *_memory(entry["peak_bytes"])) for entry in found]
    heading = "Peak memory of forward+backward above the parameters, MiB; dense: a SwiGLU of equal FLOPs"
    print_table(heading, header, rows)
    return found


def _measure(goal: Goal, device: torch.device, ceilings: Ceilings) -> dict[str, Any]:
    shape = goal.shape
    timed = time_point(shape, "balanced", device, ceilings)
    entry: dict[str, Any] = {"layer": shape.name, "of": "copy" if goal.bandwidth else "peak"}
    for name in ("forward", "both"):
        found = timed[name]
        share = found["tb_per_s"] / ceilings.bytes_per_s if goal.bandwidth else found["tflops"] / PEAK_FLOPS
        entry[name] = {"ms": found["ms"], "share": 1e12 * share, "goal": getattr(goal, name)}
    layer, x = build(shape, device), torch.randn(1, shape.tokens, shape.config.dim, device=device)
    peaks = {"IntBMoE": peak_bytes(both_call(layer, x, True), device)}
    layer.recompute = True
    peaks["recompute"] = peak_bytes(both_call(layer, x, True), device)
    with device:
        dense = dense_of_equal_flops(shape.config)
    peaks["dense"] = peak_bytes(both_call(dense, x, True), device)
    return entry | {"peak_bytes": peaks}


def _cells(entry: dict[str, Any], name: str) -> tuple[str, ...]:
    part = entry[name]
    reached = "reached" if part["share"] >= part["goal"] else ""
    return number(part["ms"]), f"{part['share']:.1%}", f"{part['goal']:.0%}", reached


def _memory(peaks: dict[str, int | None]) -> tuple[str, ...]:
    if peaks["dense"] is None:
        return ("–",) * 4
    return (*(number(peak / MIB, 0) for peak in peaks.values()), number(peaks["IntBMoE"] / peaks["dense"], 2))
