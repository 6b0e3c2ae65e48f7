"""Times the IntBMoE layer on a GPU: each stage and the whole layer, compared with the device's limits and with others.

    python benchmarks/gpu.py                          # about two minutes; several processes compile the kernels first
    python benchmarks/gpu.py --json figures.json      # also every figure
    python benchmarks/gpu.py --sections stages small  # some of: stages layers experts small goals grid

Times are medians of device events. "graph" is a replayed CUDA graph; "eager" includes the host where it is the slower
one. ``benchmarks/README.md`` explains each table. Exits with status 1 if a backend is wrong.

A dry run without a GPU: TRITON_INTERPRET=1 python benchmarks/gpu.py --device cpu --tiny
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_goals import time_goals
from gpu_grid import grid, time_grid, worst_of
from gpu_layers import (
    ALLOWED,
    MIXTRAL_EXPERTS,
    MIXTRAL_HIDDEN,
    MIXTRAL_TOP,
    ROUTINGS,
    build,
    compile_ahead,
    default_workers,
    draw_ids,
    force_load,
    largest_difference,
    mixtral_block,
    precomposed,
    shares,
)
from gpu_stages import SHAPES, Shape, measure, stages
from gpu_timing import (
    MIB,
    Ceilings,
    Graph,
    both_call,
    describe,
    eager_ms,
    forward_call,
    graph_ms,
    interleaved,
    measure_ceilings,
    number,
    peak_bytes,
    print_table,
    reason,
    say,
)
from measure import write
from torch import Tensor, nn

from intbmoe.ops.backend import choose_backend, triton_runs

SECTIONS = ("stages", "layers", "experts", "small", "goals", "grid")
EXPERTS = (1, 2, 4, 8, 16, 32, 64, 128)
SMALL_SHAPES = ("MiniPile", "IntTravel")
SMALL_TOKENS = (1, 8, 32, 126, 512, 2048)
FLAT = 1.05
"""Largest allowed ratio between precomposed times over E."""
SWEEP_CALLS = 8
"""Calls of the layer in one graph of the sweep over E; a single call is too short for events."""

REFERENCES: dict[str, dict[str, tuple[float | None, float | None]]] = {
    "MiniPile": {
        "sketch": (1.38, 5.63),
        "GEMMs alone": (0.44, None),
        "reach": (0.80, 2.8),
    },
    "ImageNet": {
        "sketch": (1.64, 6.91),
        "GEMMs alone": (0.26, None),
        "reach": (0.60, 2.4),
    },
    "IntTravel": {
        "sketch": (0.33, 1.27),
        "GEMMs alone": (0.06, None),
        "reach": (0.15, 0.6),
    },
}
"""Constants: milliseconds, forward and forward+backward, measured on an NVIDIA H200 before these kernels were written.

"sketch" is torch's grouped GEMM under torch.compile, in a graph; "GEMMs alone" are cuBLAS's; "reach" is what we thought
possible. They mean nothing on another device.
"""


@dataclass
class Run:
    """What the sections share, and their results."""

    device: torch.device
    tiny: bool
    shapes: tuple[Shape, ...]
    ceilings: Ceilings
    begin: float
    results: dict[str, Any] = field(default_factory=dict)
    wrong: bool = False

    @property
    def backends(self) -> list[str]:
        """The backends that run here, without the naive one."""
        return [
            backend
            for backend in ("fused", "grouped", "tiled")
            if backend != "fused" or triton_runs(self.device, torch.float32)
        ]

    def tokens(self, shape: Shape, count: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """(1, N, d) random tokens."""
        return torch.randn(1, count or shape.tokens, shape.config.dim, device=self.device).to(dtype)

    def timed(self, section: str) -> None:
        """Prints the time since the start."""
        print(f"[{section}: {time.perf_counter() - self.begin:.0f} s since the start]", flush=True)


def time_stages(run: Run) -> None:
    """Times each stage of the fused backend and compares it with its floor."""
    if "fused" not in run.backends:
        print("\nstages: left out, Triton's kernels do not run here (no GPU, and no TRITON_INTERPRET=1)")
        return
    for shape in run.shapes:
        torch.manual_seed(0)
        entries = [
            entry
            for stage in stages(shape, run.device, lambda n, choices, k: draw_ids(n, choices, k, run.device))
            for entry in measure(stage, run.device, run.ceilings)
        ]
        run.results.setdefault("stages", {})[shape.name] = entries
        rows = []
        for kind in ("forward", "backward"):
            own = [entry for entry in entries if entry["pass"] == kind]
            rows += [(f"{kind}:", "", "", "", "", "", "")]
            rows += [_stage_row(f"  {entry['stage']}", entry) for entry in own]
            sums = {key: sum(entry.get(key, 0) for entry in own) for key in ("bytes", "flops", "floor_ms", "ms")}
            rows += [_stage_row("  all of these", sums)]
        header = ("stage", "MB", "GFLOP", "floor µs", "µs", "× floor", "TB/s")
        print_table(f"{title(shape)}: stages, fused backend, balanced, inputs cold", header, rows)
        for entry in entries:
            if "failed" in entry:
                say(f"failed: {entry['pass']}, {entry['stage']}: {entry['failed']}")


def _stage_row(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    ms = entry.get("ms")
    return (
        name,
        number(entry["bytes"] / 1e6, 1),
        number(entry["flops"] / 1e9, 1),
        number(entry["floor_ms"] * 1e3, 1),
        number(None if ms is None else ms * 1e3, 1),
        number(None if ms is None else ms / entry["floor_ms"], 2),
        number(None if ms is None else entry["bytes"] / ms / 1e9, 2),
    )


def title(shape: Shape) -> str:
    """Describes a shape in words."""
    c = shape.config
    widths = "→".join(str(width) for width in c.widths)
    return f"{shape.name} {widths}, E {c.experts}, K {c.blocks}, k {c.top_k}, {shape.tokens:,} tokens"


def time_passes(run: Run, module: nn.Module, x: Tensor, autocast: bool, graph: bool = True) -> dict[str, Any]:
    """Measures forward and forward+backward: eager and graph milliseconds, and peak memory above the parameters."""
    found: dict[str, Any] = {}
    for name, make in (("forward", forward_call), ("both", both_call)):
        module.train(name == "both")
        call = make(module, x, autocast)
        found[f"{name}_peak_bytes"] = peak_bytes(call, run.device)
        found[f"{name}_eager_ms"] = eager_ms(call, run.device, least=5)
        if graph:
            found[f"{name}_graph_ms"] = graph_ms([call], run.device)
    return found


def time_layers(run: Run) -> None:
    """Times the whole layer with every backend, balanced and Zipf; and Hugging Face's block at the first shape."""
    for shape in run.shapes:
        torch.manual_seed(0)
        layer, x = build(shape, run.device), run.tokens(shape)
        references = REFERENCES[shape.name]
        rows, notes, found = [], [], run.results.setdefault("layers", {}).setdefault(shape.name, {})
        for routing in ROUTINGS:
            load = force_load(layer.router, x, shape.config.top_k, shares(routing, shape.config.blocks))
            difference = largest_difference(layer, x, run.backends)
            verdict = "agree" if difference <= ALLOWED else "WRONG: differ"
            run.wrong |= difference > ALLOWED
            notes.append(
                f"{routing}: blocks get {', '.join(f'{share:.1%}' for share in load)}; backends {verdict} with naive "
                f"to {difference:.1e}"
            )
            found[routing] = {"load": load, "largest_difference": difference}
            for backend in (*run.backends, "naive"):
                if backend == "tiled" and routing != ROUTINGS[0]:
                    continue  # its work does not depend on the load
                layer.backend = backend
                try:
                    entry = time_passes(run, layer, x, autocast=True, graph=backend != "naive")
                except Exception as error:
                    notes.append(f"failed: {routing}, {backend}: {reason(error)}")
                    continue
                found[routing][backend] = entry
                rows.append(_layer_row(f"{backend}, {routing}", entry, references["reach"]))
        found["references"] = references
        rows += [_reference_row(f"constant: {name}", times) for name, times in references.items()]
        if shape.name == "MiniPile":
            rows += _mixtral_rows(run, shape, notes)
        over = ("", "fwd", "fwd", "fwd+bwd", "fwd+bwd", "fwd", "fwd+bwd", "fwd graph", "fwd+bwd graph")
        header = ("backend", "eager", "graph", "eager", "graph", "MiB", "MiB", "/ reach", "/ reach")
        heading = f"{title(shape)}: whole layer, bf16 autocast, ms, and peak memory above the parameters"
        print_table(heading, header, rows, "\n".join(notes), over)
        del layer, x
        if run.device.type == "cuda":
            torch.cuda.empty_cache()


def _layer_row(name: str, entry: dict[str, Any], reach: Sequence[float | None]) -> tuple[str, ...]:
    keys = ("forward_eager_ms", "forward_graph_ms", "both_eager_ms", "both_graph_ms")
    peaks = [entry[f"{key}_peak_bytes"] for key in ("forward", "both")]
    ratios = [
        "–" if goal is None or f"{key}_graph_ms" not in entry else f"{entry[f'{key}_graph_ms'] / goal:.2f} ×"
        for key, goal in zip(("forward", "both"), reach, strict=True)
    ]
    mebibytes = [number(None if peak is None else peak / MIB, 0) for peak in peaks]
    return (name, *(number(entry.get(key)) for key in keys), *mebibytes, *ratios)


def _reference_row(name: str, times: Sequence[float | None]) -> tuple[str, ...]:
    forward, both = (number(ms, 2) for ms in times)
    return (name, "", forward, "", both, "", "", "", "")


def _mixtral_rows(run: Run, shape: Shape, notes: list[str]) -> list[tuple[str, ...]]:
    try:
        with run.device:
            block = mixtral_block(shape.config.dim, MIXTRAL_HIDDEN, MIXTRAL_EXPERTS)
        entry = time_passes(run, block, run.tokens(shape, dtype=torch.bfloat16), autocast=False)
    except Exception as error:
        notes.append(f"Hugging Face's Mixtral block left out: {reason(error)}")
        return []
    c = shape.config
    ours = c.top_k * 4 * c.expert_weights + 6 * c.dim * c.shared_width + 2 * c.dim**2
    theirs = MIXTRAL_TOP * 6 * c.dim * MIXTRAL_HIDDEN
    run.results["mixtral"] = {**entry, "flops_to_ours": theirs / ours}
    notes.append(
        f"Mixtral: Hugging Face's block over grouped_mm in bf16, top {MIXTRAL_TOP} of {MIXTRAL_EXPERTS} experts of "
        f"width {MIXTRAL_HIDDEN}, {theirs / ours:.2f} × our FLOPs"
    )
    return [_layer_row("Hugging Face Mixtral", entry, (None, None))]


def sweep_experts(run: Run) -> None:
    """Times the precomposed forward over E; the time must not grow."""
    times: dict[str, list[float]] = {}
    for shape in run.shapes:
        torch.manual_seed(0)
        x, router = run.tokens(shape, dtype=torch.bfloat16), build(shape, run.device).router
        force_load(router, x.float(), shape.config.top_k, shares("balanced", shape.config.blocks))
        graphs = []
        for experts in EXPERTS:
            call = forward_call(precomposed(shape, experts, run.device, router), x, autocast=False)
            graphs.append(Graph([call] * (1 if run.tiny else SWEEP_CALLS), run.device))
        found = interleaved([graph.replay for graph in graphs], run.device, least=15)
        times[shape.name] = [ms / len(graphs[0].calls) for ms in found]
    rows = [(str(e), *(number(column[i], 4) for column in times.values())) for i, e in enumerate(EXPERTS)]
    spread = {name: max(column) / min(column) for name, column in times.items()}
    rows.append(("max / min", *(f"{ratio:.3f}" for ratio in spread.values())))
    flat = all(ratio <= FLAT for ratio in spread.values())
    note = f"flat within {FLAT - 1:.0%}: {'yes' if flat else 'NO'}"
    print_table("Precomposed bf16 forward over E, graph, ms", ("E", *times), rows, note)
    run.results["experts"] = {"experts": EXPERTS, "ms": times, "max_to_min": spread, "flat": flat}


def time_small(run: Run) -> None:
    """Times precomposed layers with few tokens, to find the fastest backend for each number."""
    for shape in run.shapes:
        if shape.name not in SMALL_SHAPES:
            continue
        torch.manual_seed(0)
        layer, rows = precomposed(shape, 2, run.device), []
        for count in SMALL_TOKENS[: 2 if run.tiny else None]:
            x = run.tokens(shape, count, torch.bfloat16)
            found: dict[str, dict[str, float]] = {"eager": {}, "graph": {}}
            for backend in run.backends:
                layer.backend = backend
                call = forward_call(layer, x, autocast=False)
                found["eager"][backend] = eager_ms(call, run.device)
                found["graph"][backend] = graph_ms([call], run.device)
            best = {mode: min(times, key=times.get) for mode, times in found.items()}
            chosen = choose_backend(x, has_native=True)
            entry = {"tokens": count, **found, "fastest": best, "chosen": chosen}
            run.results.setdefault("small", {}).setdefault(shape.name, []).append(entry)
            cells = [number(found[mode][backend] * 1e3, 1) for backend in run.backends for mode in found]
            rows.append((f"{count:,}", *cells, best["eager"], best["graph"], chosen))
        over = ("", *(backend for backend in run.backends for _ in found), "fastest", "fastest", "chosen by")
        header = ("tokens", *(mode for _ in run.backends for mode in found), *found, "default")
        print_table(f"{shape.name}: few tokens, precomposed bf16 forward, µs", header, rows, over=over)


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write every figure here")
    parser.add_argument(
        "--sections",
        nargs="+",
        choices=SECTIONS,
        default=SECTIONS[:-2],
        help="what to measure (default: the first four)",
    )
    parser.add_argument("--shapes", nargs="+", choices=[s.name for s in SHAPES], help="which shapes (default: all)")
    parser.add_argument("--of", type=Path, metavar="FILE", help="grid: time the worst layers of this earlier output")
    parser.add_argument("--worst", type=int, default=19, metavar="N", help="grid: how many of them (default: 19)")
    parser.add_argument("--workers", type=int, help="processes that compile the kernels in advance; 0: none")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, whose figures mean nothing")
    arguments = parser.parse_args()
    begin, device = time.perf_counter(), torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device: use --device cpu --tiny for a dry run")
        return 2
    shapes = tuple(shape for shape in SHAPES if shape.name in (arguments.shapes or [s.name for s in SHAPES]))
    shapes = tuple(shape.tiny() for shape in shapes) if arguments.tiny else shapes
    facts = describe(device)
    say(", ".join(f"{key} {value}" for key, value in facts.items()))
    workers = (default_workers() if device.type == "cuda" else 0) if arguments.workers is None else arguments.workers
    if workers and not set(arguments.sections) <= {"goals", "grid"}:
        small = [(s, tokens) for s in shapes if s.name in SMALL_SHAPES for tokens in SMALL_TOKENS]
        for failure in compile_ahead(shapes, small if "small" in arguments.sections else [], workers, device):
            say(f"not compiled in advance: {failure}")
    run = Run(device, arguments.tiny, shapes, measure_ceilings(device, arguments.tiny), begin)
    say(str(run.ceilings))
    run.timed("kernels compiled, ceilings measured")
    sections = {"stages": time_stages, "layers": time_layers, "experts": sweep_experts, "small": time_small}
    points = worst_of(arguments.of, arguments.worst) if arguments.of else list(grid())
    points = [(shape.tiny(), routing) for shape, routing in points[:2]] if arguments.tiny else points
    sections["goals"] = lambda run: run.results.update(goals=time_goals(device, run.ceilings, workers, run.tiny))
    sections["grid"] = lambda run: run.results.update(grid=time_grid(device, run.ceilings, workers, points))
    for name in arguments.sections:
        sections[name](run)
        run.timed(name)
    if arguments.json:
        rates = {str(dtype)[6:]: rate for dtype, rate in run.ceilings.flops.items()}
        ceilings = {"bytes_per_s": run.ceilings.bytes_per_s, "flops": rates, "kernel_ms": run.ceilings.kernel_ms}
        write(arguments.json, {"machine": facts, "ceilings": ceilings, **run.results})
    return 1 if run.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
