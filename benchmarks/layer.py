"""Times the IntBMoE layer on the CPU: each backend against the naive compose-and-loop, and time against E.

    python benchmarks/layer.py                     # minutes, on an otherwise idle machine
    python benchmarks/layer.py --quick             # seconds: a smoke test
    python benchmarks/layer.py --json figures.json

Before anything is timed, every candidate's output (and gradients) must agree with the naive backend's. Candidates then
run round-robin in a shuffled order, so that other work on the machine affects all of them equally; times are medians
over rounds, ratios are between medians of one run. ``benchmarks/README.md`` says how memory is measured.
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler announces every start,
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # and warns about tensors that existed before it

import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import tyro
from measure import (
    MIB,
    Candidate,
    console,
    figures_table,
    inference,
    machine,
    say_facts,
    summary,
    time_round_robin,
    weight_bytes,
    write,
)
from torch import Tensor, nn

from intbmoe import IntBMoE, IntBMoEConfig
from intbmoe.ops import native

NAIVE = "naive"
BACKENDS = (NAIVE, "grouped", "tiled")
INFERENCE_BACKENDS = BACKENDS if native.LIBRARY is None else (*BACKENDS, "native")
TARGET = 3.0
"""How many times faster the precomposed layer should be than naive compose-and-loop at the IntTravel shape."""


@dataclass(frozen=True)
class Shape:
    """One of the paper's layers, with the tokens of one input."""

    name: str
    tokens: int
    config: IntBMoEConfig


SHAPES = (
    Shape("ImageNet", 196, IntBMoEConfig(192, 768, experts=16)),
    Shape("MiniPile", 1024, IntBMoEConfig(768, 2844, experts=8, shared_hidden=2048)),
    Shape("IntTravel", 126, IntBMoEConfig(96, 384, experts=32, residual_scale=0.0)),
)
SWEEP = SHAPES[-1]
SWEEP_EXPERTS = (1, 2, 4, 8, 16, 32, 64, 128)


def build(config: IntBMoEConfig) -> IntBMoE:
    """Builds a layer with random biases, because the initial zeros would hide a forgotten bias."""
    torch.manual_seed(0)
    layer = IntBMoE(config)
    with torch.no_grad():
        for pool in layer.pools:
            pool.bias.normal_(std=0.1)
    return layer


def candidate(layer: nn.Module, backend: str | None, run: Callable[[], object]) -> Candidate:
    def prepare() -> None:
        layer.backend = backend
        layer.zero_grad(set_to_none=True)

    return Candidate(layer, prepare, run)


def forward(layer: nn.Module, x: Tensor, backend: str | None) -> Candidate:
    return candidate(layer, backend, inference(layer, x))


def forward_backward(layer: nn.Module, x: Tensor, backend: str | None) -> Candidate:
    """Returns the output and the gradients of all parameters."""
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    return candidate(layer, backend, lambda: layer(x).backward(grad))


def make_candidates(shape: Shape) -> dict[str, dict[str, Candidate]]:
    """Returns candidates by pass ("forward", "forward+backward") and name; naive compose-and-loop comes first."""
    layer = build(shape.config)
    composed = layer.precompose().eval()
    evaluated = layer.eval()
    trained = build(shape.config).train()
    x = torch.randn(1, shape.tokens, shape.config.dim)
    inference = {f"composing, {backend}": forward(evaluated, x, backend) for backend in INFERENCE_BACKENDS}
    inference |= {
        f"precomposed, {backend or 'default'}": forward(composed, x, backend) for backend in (*INFERENCE_BACKENDS, None)
    }
    training = {f"composing, {backend}": forward_backward(trained, x, backend) for backend in BACKENDS}
    return {"forward": inference, "forward+backward": training}


def check(shape: Shape) -> float:
    """Returns the largest relative difference of any candidate to naive compose-and-loop; raises if it is too large.

    λ is 0.5 here for every shape, so that the gate has an effect.
    """
    worst = 0.0
    for candidates in make_candidates(replace(shape, config=replace(shape.config, residual_scale=0.5))).values():
        expected = None
        for name, one in candidates.items():
            one.prepare()
            output = one.run()
            found = [output] if output is not None else [p.grad.clone() for p in one.layer.parameters()]
            expected = found if expected is None else expected
            for mine, naive in zip(found, expected, strict=True):
                difference = ((mine - naive).abs().max() / naive.abs().max().clamp(min=1e-12)).item()
                if not difference < 1e-4:  # also catches NaN
                    raise AssertionError(f"{shape.name}: {name} differs from naive by {difference:.1e}")
                worst = max(worst, difference)
    return worst


def peak_working_bytes(one: Candidate) -> int:
    """Measures the peak size of live tensors during one call, beyond those alive before it."""
    one.prepare()
    one.run()
    one.prepare()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = one.run()
    del result
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["args"]["Ev Idx"])
    alive = peak = 0
    for event in memory:
        alive += event["args"]["Bytes"]
        peak = max(peak, alive)
    return peak


def bench_shape(shape: Shape, seconds: float, rounds: int) -> dict:
    """Checks, times and measures all candidates at one shape, and prints the table."""
    error = check(shape)
    c = shape.config
    sizes = f"dim {c.dim}, hidden {c.hidden[0]}, E {c.experts}, K {c.blocks}, k {c.top_k}, {shape.tokens} tokens"
    caption = f"agrees with naive to {error:.0e} of the largest entry, λ = 0.5"
    columns = ("candidate", "ms", "naive / this", "working MiB", "weights MiB")
    table = figures_table(f"{shape.name}: {sizes}", *columns, caption=caption)
    results = {}
    for kind, candidates in make_candidates(shape).items():
        times = time_round_robin(candidates, seconds, rounds, f"{shape.name}, {kind}")
        table.add_row(f"[bold]{kind}[/bold]")
        baseline = statistics.median(next(iter(times.values())))
        for name, one in candidates.items():
            entry = summary(times[name])
            entry["ratio_to_naive"] = baseline / entry["median_ms"]
            entry["working_peak_bytes"] = peak_working_bytes(one)
            entry["weight_bytes"] = weight_bytes(one.layer)
            results.setdefault(kind, {})[name] = entry
            table.add_row(
                name,
                f"{entry['median_ms']:.2f}",
                f"{entry['ratio_to_naive']:.2f} ×",
                f"{entry['working_peak_bytes'] / MIB:.1f}",
                f"{entry['weight_bytes'] / MIB:.1f}",
            )
        table.add_section()
    console.print(table)
    return {"shape": shape.name, "tokens": shape.tokens, "largest_difference": error, "passes": results}


def bench_experts(seconds: float, rounds: int) -> list[dict]:
    """Times the default backend, composing and precomposed, against E; every layer has the same routing."""
    x = torch.randn(1, SWEEP.tokens, SWEEP.config.dim)
    layers = {e: build(replace(SWEEP.config, experts=e)).eval() for e in SWEEP_EXPERTS}
    router = layers[SWEEP_EXPERTS[0]].router.state_dict()
    candidates = {}
    for e, layer in layers.items():
        layer.router.load_state_dict(router)
        candidates[f"composing {e}"] = forward(layer, x, None)
        candidates[f"precomposed {e}"] = forward(layer.precompose().eval(), x, None)
    times = time_round_robin(candidates, seconds, rounds, "time against E")
    title = f"Time against E: {SWEEP.name}, {SWEEP.tokens} tokens, forward, default backend"
    table = figures_table(title, "E", "composing ms", "to E = 1", "precomposed ms", "to E = 1", "ratio")
    results = []
    for e in SWEEP_EXPERTS:
        entry = {"experts": e}
        for kind in ("composing", "precomposed"):
            first = statistics.median(times[f"{kind} {SWEEP_EXPERTS[0]}"])
            entry[kind] = summary(times[f"{kind} {e}"])
            entry[kind]["ratio_to_first"] = entry[kind]["median_ms"] / first
        results.append(entry)
        a, b = entry["composing"], entry["precomposed"]
        table.add_row(
            str(e),
            f"{a['median_ms']:.2f}",
            f"{a['ratio_to_first']:.2f} ×",
            f"{b['median_ms']:.2f}",
            f"{b['ratio_to_first']:.2f} ×",
            f"{a['median_ms'] / b['median_ms']:.2f} ×",
        )
    console.print(table)
    return results


def main(quick: bool = False, json: Path | None = None, seconds: float = 30.0, threads: int | None = None) -> None:
    """Time the IntBMoE layer on the CPU.

    Args:
        quick: Smoke test: three rounds, without the largest shape; its figures mean nothing.
        json: File for the raw figures.
        seconds: Time for each table's forwards, and the same again for its backwards; at least 10 rounds.
        threads: Number of torch's threads; torch's own default if not given.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    facts = {**machine(), "native_library": native.STATUS}
    say_facts(facts)
    seconds, rounds = (0.0, 3) if quick else (seconds, 10)
    chosen = [shape for shape in SHAPES if not (quick and shape.config.dim > 256)]
    shapes = [bench_shape(shape, seconds, rounds) for shape in chosen]
    sweep = bench_experts(seconds, rounds)

    ratio = shapes[-1]["passes"]["forward"]["precomposed, default"]["ratio_to_naive"]
    growth = sweep[-1]["precomposed"]["ratio_to_first"]
    console.print(
        f"{SWEEP.name}, precomposed by default against naive compose-and-loop: {ratio:.2f} × faster "
        f"(target {TARGET:.0f} ×: {'met' if ratio >= TARGET else 'missed'}); "
        f"its time at E = {SWEEP_EXPERTS[-1]} is {growth:.2f} × that at E = {SWEEP_EXPERTS[0]}"
    )
    if json is not None:
        date = datetime.now(UTC).date().isoformat()
        options = {"quick": quick, "seconds": seconds, "threads": threads}
        write(json, {"date": date, "options": options, "machine": facts, "shapes": shapes, "experts": sweep})


if __name__ == "__main__":
    tyro.cli(main)
