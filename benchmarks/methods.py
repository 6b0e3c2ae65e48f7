"""Times every method in place of one FFN, at the paper's three layer shapes, and measures its memory.

    python benchmarks/methods.py                                      # tens of minutes, on an otherwise idle machine
    python benchmarks/methods.py --quick                              # a smoke test
    python benchmarks/methods.py --shapes inttravel --methods switch intbmoe --json figures.json

Figures are ratios to the dense FFN. ``match_budget`` sizes the layers, so all have about the same number of parameters;
the dense FFN has those of one expert. Forward runs in evaluation mode without gradients; forward+backward in training
mode, with the auxiliary losses and the gradients of input and parameters. Routers are as initialised: the cost of
ReMoE, DynMoE and MASS depends on how many experts a trained router opens, and the balance of Switch and the others on
how it spreads the tokens.

``measure.py`` says how time and memory are measured. Peaks are beyond weights and input, in a fresh process for each
method; for forward+backward they include the gradients of all parameters, so they are never less than the weights.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch
import tyro
from measure import (
    MIB,
    Candidate,
    console,
    figures_table,
    in_fresh_process,
    inference,
    machine,
    peak_growth,
    say_facts,
    summary,
    time_round_robin,
    weight_bytes,
    write,
)
from rich import box
from rich.progress import track
from rich.table import Table
from torch import Tensor

import intbmoe
from intbmoe.budget import match_budget
from intbmoe.registry import find_method

PRECOMPOSED = "intbmoe_precomposed"


@dataclass(frozen=True)
class Shape:
    """One of the paper's backbone FFNs, its E, and the number of tokens in a forward."""

    name: str
    dim: int
    hidden: int
    expert: Literal["gelu", "swiglu"]
    experts: int
    batch: int
    tokens: int
    soft_tokens: int | None = None
    """The number of tokens if it is fixed, for Soft MoE's slots."""
    intbmoe_hidden: int | None = None

    @property
    def baseline(self) -> str:
        """The dense FFN that all methods are compared with."""
        return "dense" if self.expert == "gelu" else "swiglu"

    def build(self, name: str) -> intbmoe.MoELayer:
        """Builds the method's layer at the paper's budget."""
        torch.manual_seed(0)
        method = "intbmoe" if name == PRECOMPOSED else name
        options = match_budget(
            method,
            self.dim,
            self.hidden,
            experts=self.experts,
            expert=self.expert,
            tokens=self.soft_tokens,
            intbmoe_hidden=self.intbmoe_hidden,
        )
        layer = intbmoe.create(method, self.dim, **options)
        return layer.precompose() if name == PRECOMPOSED else layer

    def shrunk(self) -> "Shape":
        """Returns a shape small enough for a smoke test."""
        return replace(self, dim=16, hidden=24, batch=1, tokens=8, intbmoe_hidden=None)

    def input(self) -> Tensor:
        """Draws one batch of tokens with unit variance, like the output of a norm before the layer."""
        return torch.randn(self.batch, self.tokens, self.dim, generator=torch.Generator().manual_seed(1))


SHAPES = {
    "imagenet": Shape("ImageNet", 192, 768, "gelu", 16, batch=8, tokens=196, soft_tokens=196),
    "minipile": Shape("MiniPile", 768, 2048, "swiglu", 8, batch=1, tokens=256, intbmoe_hidden=2844),
    "inttravel": Shape("IntTravel", 96, 384, "gelu", 32, batch=4, tokens=126),
}


def forward(layer: intbmoe.MoELayer, x: Tensor) -> Candidate:
    """Returns a forward in evaluation mode; gradients of an earlier training pass are freed first."""
    return Candidate(layer, lambda: layer.eval().zero_grad(set_to_none=True), inference(layer, x))


def forward_backward(layer: intbmoe.MoELayer, x: Tensor) -> Candidate:
    """Returns a training pass, which computes the gradients of the input and the parameters."""

    def run() -> Tensor:
        own = x.detach().requires_grad_()
        (layer(own).square().mean() + intbmoe.aux_loss(layer)).backward()
        return own.grad

    return Candidate(layer, lambda: layer.train().zero_grad(set_to_none=True), run)


PASSES = {"forward": forward, "forward+backward": forward_backward}


def passes_of(name: str) -> list[str]:
    """Returns the passes to time: a precomposed layer is for inference only."""
    return ["forward"] if name == PRECOMPOSED else list(PASSES)


def check(shape: Shape, name: str, layer: intbmoe.MoELayer) -> None:
    """Raises unless output and gradients are finite: the time of a broken layer means nothing."""
    for kind in passes_of(name):
        candidate = PASSES[kind](layer, shape.input())
        candidate.prepare()
        found = [candidate.run(), *(p.grad for p in layer.parameters() if p.grad is not None)]
        if not all(tensor.isfinite().all() for tensor in found):
            raise AssertionError(f"{shape.name}: {kind} of {name} is not finite")


def measure_memory(shape: Shape, name: str, threads: int) -> dict[str, int]:
    """Returns the peak bytes of each pass beyond weights and input; run it in a fresh process."""
    torch.set_num_threads(threads)
    # A tiny layer first: it loads the libraries' code and buffers into memory, which must not count.
    tiny = shape.shrunk()
    layers = [(tiny, tiny.build(name)), (shape, shape.build(name))]
    growth: list[int] = []
    for size, layer in layers:
        candidates = [PASSES[kind](layer, size.input()) for kind in passes_of(name)]

        def call(candidate: Candidate) -> object:
            candidate.prepare()
            return candidate.run()

        growth = peak_growth(*(lambda candidate=candidate: call(candidate) for candidate in candidates))
    return dict(zip(passes_of(name), growth, strict=True))


def bench_shape(shape: Shape, names: list[str], seconds: float, rounds: int, memory: list[str]) -> dict:
    """Times all methods, measures the memory of those in ``memory``, and prints the table."""
    layers = {name: shape.build(name) for name in names}
    for name, layer in layers.items():
        check(shape, name, layer)
    figures = {
        name: {
            "parameters": sum(p.numel() for p in layer.parameters()),
            "weight_bytes": weight_bytes(layer),
        }
        for name, layer in layers.items()
    }
    for kind, make in PASSES.items():
        candidates = {name: make(layers[name], shape.input()) for name in names if kind in passes_of(name)}
        times = {
            name: summary(t)
            for name, t in time_round_robin(candidates, seconds, rounds, f"{shape.name}, {kind}").items()
        }
        for name, entry in times.items():
            ratio = entry["median_ms"] / times[shape.baseline]["median_ms"]
            figures[name][kind] = {**entry, "ratio_to_dense": ratio}
    for name in track(memory, description="memory", console=console, transient=True):
        for kind, growth in in_fresh_process(measure_memory, shape, name, torch.get_num_threads()).items():
            figures[name][kind]["peak_bytes"] = growth
    console.print(make_table(shape, figures))
    return {"shape": shape.name, "baseline": shape.baseline, "methods": figures}


def make_table(shape: Shape, figures: dict[str, dict]) -> Table:
    """Makes a table with one row per method, the dense FFN first, then by the time of forward+backward."""
    tokens = f"{shape.batch} × {shape.tokens} tokens"
    sizes = f"dim {shape.dim}, {shape.expert} {shape.hidden}, E = {shape.experts}, {tokens}"
    caption = f"×: ratio to {shape.baseline!r}; peak: MiB beyond the weights, in a fresh process each"
    columns = ("method", "fwd ms", "×", "peak", "fwd+bwd ms", "×", "peak", "weights")
    look = {"caption": caption, "box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
    table = figures_table(f"{shape.name}: {sizes}", *columns, **look)

    def rank(name: str) -> tuple[bool, float]:
        return name != shape.baseline, figures[name].get("forward+backward", figures[name]["forward"])["median_ms"]

    order = sorted(figures, key=rank)
    for name in order:
        cells = []
        for kind in PASSES:
            entry = figures[name].get(kind)
            if entry is None:
                cells += ["", "", ""]
                continue
            peak = entry.get("peak_bytes")
            cells += [f"{entry['median_ms']:.2f}", f"{entry['ratio_to_dense']:.2f}"]
            cells += ["" if peak is None else f"{peak / MIB:.1f}"]
        table.add_row(name, *cells, f"{figures[name]['weight_bytes'] / MIB:.1f}")
    return table


def main(
    shapes: tuple[Literal["imagenet", "minipile", "inttravel"], ...] = tuple(SHAPES),
    methods: tuple[str, ...] = (),
    quick: bool = False,
    json: Path | None = None,
    seconds: float = 60.0,
    threads: int | None = None,
) -> None:
    """Time every method on the CPU and measure its memory.

    Args:
        shapes: The layer shapes.
        methods: Registry names and "intbmoe_precomposed"; all if not given. The dense FFN is always included.
        quick: Smoke test: tiny layers, three rounds, memory of the dense FFN only; the figures mean nothing.
        json: File for the raw figures.
        seconds: Time for each shape's forwards, and the same again for its backwards; at least 10 rounds.
        threads: Number of torch's threads; torch's own default if not given.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    for name in methods:
        if name != PRECOMPOSED:
            find_method(name)
    facts = machine()
    say_facts(facts)
    results = []
    for shape in (SHAPES[key] for key in shapes):
        chosen = list(methods) or [*intbmoe.list_methods(), PRECOMPOSED]
        names = [shape.baseline, *(name for name in chosen if name != shape.baseline)]
        if quick:
            shape = shape.shrunk()
            results.append(bench_shape(shape, names, seconds=0.0, rounds=3, memory=names[:1]))
        else:
            results.append(bench_shape(shape, names, seconds, rounds=10, memory=names))
    if json is not None:
        options = {"quick": quick, "seconds": seconds, "threads": threads}
        date = datetime.now(UTC).date().isoformat()
        write(json, {"date": date, "options": options, "machine": facts, "shapes": results})


if __name__ == "__main__":
    tyro.cli(main)
