"""Lists the kernels of a layer's replayed CUDA graph by when they start, to find what the others wait for.

    python benchmarks/gpu_timeline.py "64→256" "128→128, E 48"    # layers of the grid or with a goal
    python benchmarks/gpu_timeline.py IntTravel --forward         # without gradients
    INTBMOE_BRANCHES=0 python benchmarks/gpu_timeline.py "64→256"

Each line has a kernel's start and duration in µs, its branch, programs, threads of a program, registers of a thread and
shared memory. A kernel that starts before the previous one has ended also counts the time that it waits. Profiling
makes a layer a few percent slower; ``gpu.py --sections grid`` times layers without it.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpu_goals import GOALS
from gpu_grid import describe, grid
from gpu_layers import build, force_load, shares
from gpu_stages import Shape
from gpu_timing import Graph, both_call, forward_call, say
from torch.profiler import ProfilerActivity, profile

REPLAYS = 3
"""Replays in a profile; the last is shown."""
NAME = 60
"""Characters of a kernel's name."""
SIZES = ("registers per thread", "shared memory")


def find(wanted: list[str]) -> list[tuple[Shape, str]]:
    """Returns the layers whose names or descriptions begin with one of ``wanted``."""
    points = [*grid(), *((goal.shape, "balanced") for goal in GOALS)]
    chosen = [point for point in points if _begins(point, wanted)]
    if not chosen:
        known = "\n".join(describe(*point) for point in points)
        raise SystemExit(f"no layer begins with {' or '.join(map(repr, wanted))}; the layers are\n{known}")
    return chosen


def _begins(point: tuple[Shape, str], wanted: list[str]) -> bool:
    return any(text.startswith(tuple(wanted)) for text in (point[0].name, describe(*point)))


def kernels_of(graph: Graph) -> list[dict[str, Any]]:
    """Profiles replays and returns the events of the last one, by their start."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found = [event for event in events if event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    found.sort(key=lambda event: event["ts"])
    return found[-(len(found) // REPLAYS) :]


def line(event: dict[str, Any], begin: float) -> str:
    facts = event["args"]
    programs = "×".join(map(str, facts.get("grid", ())))
    threads, (registers, shared) = facts.get("block", ("",))[0], (facts.get(key, "") for key in SIZES)
    start, stream = event["ts"] - begin, facts.get("stream", "")
    sizes = f"{programs:>14} {threads:>5} {registers:>4} {shared:>7}"
    return f"{start:8.1f} {event['dur']:7.1f} {stream:>6} {sizes}  {event['name'][:NAME]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="+", help="how the layers' descriptions or names begin")
    parser.add_argument("--forward", action="store_true", help="only the forward, without gradients")
    options = parser.parse_args()
    points = find(options.layers)
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device")
    device = torch.device("cuda")
    for shape, routing in points:
        layer, x = build(shape, device), torch.randn(1, shape.tokens, shape.config.dim, device=device)
        force_load(layer.router, x, shape.config.top_k, shares(routing, shape.config.blocks))
        layer.train(not options.forward)
        graph = Graph([(forward_call if options.forward else both_call)(layer, x, True)], device)
        events = kernels_of(graph)
        say(f"\n{describe(shape, routing)}: {len(events)} kernels")
        print("   start      µs branch       programs thrds regs  shared  kernel")
        print(*(line(event, events[0]["ts"]) for event in events), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
