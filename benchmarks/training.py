"""Times forward and backward on the CPU: IntBMoE and V-MoE next to dense FFNs of equal FLOPs; also prints a profile.

    python benchmarks/training.py                 # three minutes, on an otherwise idle machine
    python benchmarks/training.py --profile-rows 12   # also the operations that take longest

The dense FFN of equal FLOPs is wide enough to have the FLOPs of forward and backward that torch counts in the layer,
including composition and router. Each shape runs in two fresh processes: one with default settings, and one in which
glibc keeps the memory that tensors free (Linux only), like MALLOC_MMAP_THRESHOLD_=2147483647 and
MALLOC_TRIM_THRESHOLD_=2147483647. A time is the fastest of all rounds, because other work can only add to it.
"""

import ctypes
from dataclasses import replace
from unittest import mock

import torch
import tyro
from layer import SHAPES, Shape, build, forward_backward
from measure import Candidate, console, figures_table, in_fresh_process, machine, say_facts, time_round_robin
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import intbmoe
from intbmoe.ops.compose import native

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt


def keep_freed_memory() -> None:
    """Makes glibc keep all freed memory for the rest of this process, both blocks and the end of its heap."""
    for threshold in (MMAP_THRESHOLD, TRIM_THRESHOLD):
        if ctypes.CDLL(None).mallopt(threshold, 2**31 - 1) != 1:
            raise RuntimeError(f"mallopt refused parameter {threshold}: this table needs glibc")


def plain(layer: nn.Module, x: Tensor) -> Candidate:
    """Returns a call of forward and backward of a layer that has no choice of backends."""
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))

    def run() -> None:
        ((layer(x) * grad).sum() + intbmoe.aux_loss(layer)).backward()

    return Candidate(layer, lambda: layer.zero_grad(set_to_none=True), run)


def by_torch(step: Candidate) -> Candidate:
    """Returns the same step with plain torch's composition instead of the compiled library's."""

    def run() -> None:
        with mock.patch.object(native, "LIBRARY", None):
            step.run()

    return replace(step, run=run)


def flops_of(candidate: Candidate) -> int:
    candidate.prepare()
    with FlopCounterMode(display=False) as counter:
        candidate.run()
    return counter.get_total_flops()


def make_candidates(shape: Shape) -> dict[str, Candidate]:
    """Returns IntBMoE in three ways, V-MoE with as many experts as IntBMoE has bases, and a dense FFN for each."""
    c = shape.config
    x = torch.randn(1, shape.tokens, c.dim)
    layer = build(c).train()
    naive = build(c).train()
    sparse = intbmoe.create("vmoe", c.dim, c.hidden[0], experts=c.experts, top_k=c.top_k).train()
    candidates = {
        "IntBMoE, naive": forward_backward(naive, x, "naive"),
        "IntBMoE, grouped": (grouped := forward_backward(layer, x, "grouped")),
        "IntBMoE, composed by torch": by_torch(grouped),
        "V-MoE, grouped": plain(sparse, x),
    }
    for name in ("IntBMoE, grouped", "V-MoE, grouped"):
        # Five products of two FLOPs: two forward and three backward, because x needs no gradient.
        width = round(flops_of(candidates[name]) / (10 * shape.tokens * c.dim))
        dense = plain(intbmoe.create("dense", c.dim, width).train(), x)
        candidates[f"dense, FLOPs of {name.split(',')[0]}"] = dense
    return candidates


def measure(shape: Shape, keep: bool, seconds: float, threads: int) -> dict[str, tuple[float, float]]:
    """Returns GFLOPs and fastest milliseconds by candidate; run it in a fresh process."""
    torch.set_num_threads(threads)
    if keep:
        keep_freed_memory()
    candidates = make_candidates(shape)
    times = time_round_robin(candidates, seconds, 3, shape.name)
    return {name: (flops_of(one) / 1e9, min(times[name])) for name, one in candidates.items()}


def bench(shape: Shape, seconds: float, threads: int) -> None:
    found = {keep: in_fresh_process(measure, shape, keep, seconds, threads) for keep in (False, True)}
    columns = ("forward and backward", "GFLOP", "ms", "memory kept, ms", "gain", "× dense", "naive / this")
    table = figures_table(f"{shape.name}, {shape.tokens} tokens, {threads} threads", *columns)
    for name, (flops, milliseconds) in found[False].items():
        kept = found[True][name][1]
        method = name.split(",")[0]
        dense = found[True].get(f"dense, FLOPs of {method}")
        cells = [f"{flops:.2f}", f"{milliseconds:.2f}", f"{kept:.2f}", f"{milliseconds / kept:.2f} ×"]
        cells += [f"{kept / dense[1]:.2f}" if dense else ""]
        cells += [f"{found[True]['IntBMoE, naive'][1] / kept:.2f} ×" if method == "IntBMoE" else ""]
        table.add_row(name, *cells)
    console.print(table)


def profile(shape: Shape, rows: int) -> None:
    """Prints the slowest operations of IntBMoE's forward and backward by the shapes of their inputs, on one thread."""
    torch.set_num_threads(1)
    step = make_candidates(shape)["IntBMoE, grouped"]
    for _ in range(2):
        step.prepare()
        step.run()
    step.prepare()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        step.run()
    events = sorted(profiler.key_averages(group_by_input_shape=True), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    table = figures_table(f"{shape.name}, IntBMoE, grouped: {total / 1e3:.1f} ms", "operation", "calls", "ms", "share")
    for event in events[:rows]:
        shapes = " · ".join("×".join(map(str, size)) for size in event.input_shapes if size)
        cells = (str(event.count), f"{event.self_cpu_time_total / 1e3:.2f}", f"{event.self_cpu_time_total / total:.1%}")
        table.add_row(f"{event.key.removeprefix('aten::')[:24]} {shapes[:46]}", *cells)
    console.print(table)


def main(seconds: float = 8.0, threads: int = 2, shapes: tuple[str, ...] = (), profile_rows: int = 0) -> None:
    """Time training steps of single layers.

    Args:
        seconds: Time for each shape and process; at least three rounds.
        threads: Number of torch's threads.
        shapes: ImageNet, MiniPile, IntTravel; all if not given.
        profile_rows: How many operations of a profile to print for each shape.
    """
    say_facts(machine() | {"threads": threads})
    for shape in SHAPES:
        if not shapes or shape.name in shapes:
            # At λ = 0, IntTravel's initial value, the gate would have no gradient.
            shape = replace(shape, config=replace(shape.config, residual_scale=1.0))
            bench(shape, seconds, threads)
            if profile_rows:
                profile(shape, profile_rows)


if __name__ == "__main__":
    tyro.cli(main)
