"""Times training steps on a GPU: the paper's ViT and 18-layer decoder, dense, with IntBMoE, and with its naive backend.

    python benchmarks/gpu_training.py                      # about two minutes
    python benchmarks/gpu_training.py --json figures.json  # also every figure
    python benchmarks/gpu_training.py --models llama --whole
    python benchmarks/gpu_training.py --models llama --ways both --ffns IntBMoE --profile 25  # a step's kernels

A step is that of the training loop in docs/layer.md: forward in bf16 autocast with float32 parameters, loss,
``aux_loss``, backward, ``before_step``, fused AdamW, ``after_step``, on random data that is already on the device.
Times are medians of device events over at least ten steps after warm-up (three for the naive backend); memory is the
peak of all tensors, including parameters and optimizer. Blocks are compiled one by one, and equal ones share a graph,
as with ``train.compile``; ``--whole`` compiles the whole model at once. "captured": forward and backward are replayed
from a CUDA graph, as with ``train.capture``; the optimizer's step is not part of it. "compiled, captured": the graph
contains compiled kernels. "reduce-overhead": the compiler's mode of that name, which makes CUDA graphs itself; nothing
else is captured. Without any of these, mixtures replay graphs of their own (graphs/training.py), unless the row says
"launched from Python".

A dry run without a GPU: python benchmarks/gpu_training.py --device cpu --tiny
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_layers import compile_ahead, default_workers
from gpu_stages import SHAPES
from gpu_timing import describe, interleaved, number, print_table, reason, say, synchronize
from measure import write
from torch import Tensor, nn

import intbmoe
from intbmoe.graphs import replay
from intbmoe.layer import moe_layers
from intbmoe.models.llama import Llama, LlamaConfig
from intbmoe.models.vit import ViT, ViTConfig
from intbmoe.ops.cross_entropy import cross_entropy
from intbmoe.train.capture import CapturedBackward
from intbmoe.train.distribution import stacked_blocks

DENSE, INTBMOE, NAIVE = "dense", "IntBMoE", "IntBMoE naive"
EAGER, COMPILED, CAPTURED, BOTH, REDUCED = "", "compiled", "captured", "compiled, captured", "reduce-overhead"
LAUNCHED = "launched from Python"
WAYS = {
    "eager": ((DENSE, INTBMOE, NAIVE), EAGER),
    "launched": ((INTBMOE,), LAUNCHED),
    "captured": ((DENSE, INTBMOE), CAPTURED),
    "compiled": ((DENSE, INTBMOE), COMPILED),
    "both": ((DENSE, INTBMOE), BOTH),
    "reduced": ((DENSE, INTBMOE), REDUCED),
    "naive-compiled": ((NAIVE,), COMPILED),
}
"""The ways to run a step, in the order of measurement."""
WITH_COMPILER = (COMPILED, BOTH, REDUCED)
STEPS, NAIVE_STEPS, WARM_UP, PROFILED = 10, 3, 3, 3
SECONDS = 1.0
"""Minimum time of measured steps, if ten take less."""
UNROLLING = 60.0
"""Seconds that must be left to compile the naive backend, whose loop over blocks becomes one large graph."""


@dataclass(frozen=True)
class Experiment:
    """A backbone with its batch."""

    name: str
    sizes: str
    unit: str
    """The unit of throughput."""
    items: int
    """Units per batch."""
    build: Callable[[bool], nn.Module]
    """Builds the backbone, with IntBMoE or dense."""
    batch: Callable[[torch.device], tuple[Tensor, Tensor]]
    """Draws inputs and targets."""
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    """The task's loss, given scores and targets."""


def experiments(tiny: bool, times: int = 1) -> dict[str, Experiment]:
    """Returns the paper's two backbones by name, with batches ``times`` as large as the paper's."""
    images, side = (2, 32) if tiny else (256 * times, 224)
    sizes = {"image_size": 32, "dim": 24, "depth": 2, "hidden": 48, "moe_layers": (0,), "classes": 10} if tiny else {}
    vit = ViTConfig(**sizes)
    vit_options = intbmoe.match_budget("intbmoe", vit.dim, vit.hidden, experts=4 if tiny else 16)
    sequences, length = (2, 8) if tiny else (8 * times, 1024)
    sizes = {"vocabulary": 50, "dim": 24, "depth": 3, "heads": 2, "hidden": 32} if tiny else {}
    llama = LlamaConfig(**sizes)
    width = None if tiny else 2844
    budget = {"experts": 4 if tiny else 8, "expert": "swiglu", "intbmoe_hidden": width}
    llama_options = intbmoe.match_budget("intbmoe", llama.dim, llama.hidden, **budget)
    return {
        "vit": Experiment(
            "ViT",
            f"{vit.depth} layers, {len(vit.moe_layers)} of them mixtures, batch {images}",
            "images",
            images,
            lambda moe: ViT(vit, (lambda: intbmoe.IntBMoE(vit.dim, **vit_options)) if moe else None),
            lambda device: (
                torch.randn(images, 3, side, side, device=device),
                torch.randint(vit.classes, (images,), device=device),
            ),
        ),
        "llama": Experiment(
            "Llama",
            f"{llama.depth} layers, all of them mixtures, batch {sequences} × {length}",
            "tokens",
            sequences * length,
            lambda moe: Llama(llama, (lambda: intbmoe.IntBMoE(llama.dim, **llama_options)) if moe else None),
            lambda device: tuple(torch.randint(llama.vocabulary, (2, sequences, length), device=device)),
            lambda scores, targets: cross_entropy(scores, targets).mean(),
        ),
    }


def make_step(model: nn.Module, experiment: Experiment, device: torch.device, how: str) -> Callable[[], Tensor]:
    """Returns one step of the training loop in docs/layer.md."""
    inputs, targets = experiment.batch(device)
    measure_loss = experiment.loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    mixture = any(True for _ in moe_layers(model))
    batch = {"inputs": inputs, "targets": targets}

    def backward(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            scores = model(batch["inputs"])
            loss = measure_loss(scores, batch["targets"])
        if mixture:
            loss = loss + intbmoe.aux_loss(model)
        loss.backward()
        return loss.detach()

    forward_and_backward = CapturedBackward(backward, model) if how in (CAPTURED, BOTH) else backward

    def step() -> Tensor:
        optimizer.zero_grad()
        if how == REDUCED:
            torch.compiler.cudagraph_mark_step_begin()
        loss = forward_and_backward(batch)
        intbmoe.before_step(model, optimizer)
        optimizer.step()
        intbmoe.after_step(model, optimizer)
        return loss

    return step


def compile_model(model: nn.Module, whole: bool, fullgraph: bool, mode: str | None) -> None:
    """Marks the model, or its blocks, to be compiled when they first run."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._functorch.config.backward_pass_autocast = "off"  # as in training, see ``compile_in_place``
    for part in [model] if whole else stacked_blocks(model):
        part.compile(fullgraph=fullgraph, mode=mode)


def kernel_table(step: Callable[[], Tensor], name: str, lines: int) -> None:
    """Prints the kernels that take the most of a step's time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent.setdefault(event.name, []).append(event.self_device_time_total)
    total = sum(map(sum, spent.values()))
    most = sorted(spent.items(), key=lambda item: -sum(item[1]))[:lines]
    rows = [
        (kernel[:70], f"{len(times) / PROFILED:.0f}", number(sum(times) / PROFILED / 1e3), f"{sum(times) / total:.1%}")
        for kernel, times in most
    ]
    print_table(f"{name}: {number(total / PROFILED / 1e3, 1)} ms of kernels", ("", "calls", "ms", "share"), rows)


def title(experiment: Experiment, ffn: str, how: str) -> str:
    """Returns a row's first cell."""
    return ", ".join(part for part in (experiment.name, ffn, how) if part)


@dataclass
class Bench:
    """What all measurements share, and their results."""

    device: torch.device
    whole: bool
    deadline: float
    profile: int = 0  # how many kernels to show
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, experiment: Experiment, ffn: str, how: str) -> None:
        """Measures one row, a model trained for some steps. A failure or an omission becomes a note."""
        compiled = how in WITH_COMPILER
        name = title(experiment, ffn, how)
        left = self.deadline - time.perf_counter()
        if left < (UNROLLING if compiled and ffn == NAIVE else 0):
            self.notes.append(f"{name}: left out, {max(left, 0):.0f} of --seconds are left")
            return
        # If the graph broke at every block, code would run eagerly between the pieces: only a whole graph counts.
        attempts = [False] if not compiled else [True] if ffn == NAIVE else [True, False]
        for fullgraph in attempts:
            try:
                self.add(experiment, ffn, how, self.train(experiment, ffn, how, fullgraph), fullgraph)
                return
            except Exception as error:
                attempt = f" with fullgraph={fullgraph}" if compiled else ""
                self.notes.append(f"{name}{attempt} failed: {reason(error)}")
            finally:
                gc.collect()
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()

    def train(self, experiment: Experiment, ffn: str, how: str, fullgraph: bool) -> dict[str, Any]:
        """Measures a step in milliseconds, peak memory, seconds until the first step was done, and the last loss."""
        torch.manual_seed(0)
        replay.enabled = how != LAUNCHED
        with self.device:
            model = experiment.build(ffn != DENSE).train()
        for _, layer in moe_layers(model):
            layer.backend = "naive" if ffn == NAIVE else None
        if how in WITH_COMPILER:
            compile_model(model, self.whole, fullgraph, "reduce-overhead" if how == REDUCED else None)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        step = make_step(model, experiment, self.device, how)
        begin = time.perf_counter()
        step()
        synchronize(self.device)
        first = time.perf_counter() - begin
        for _ in range(WARM_UP):
            loss = step()
        least = NAIVE_STEPS if ffn == NAIVE else STEPS
        ms = interleaved([step], self.device, seconds=0 if ffn == NAIVE else SECONDS, least=least)[0]
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        if not loss.isfinite():
            raise ArithmeticError(f"the loss is {loss.item()}")
        if self.profile:
            kernel_table(step, title(experiment, ffn, how), self.profile)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] if how in WITH_COMPILER else 0
        return {"ms": ms, "peak_bytes": peak, "first_step_s": first, "loss": loss.item(), "graphs": graphs}

    def add(self, experiment: Experiment, ffn: str, how: str, found: dict[str, Any], fullgraph: bool) -> None:
        """Stores the results, with ratios to the dense model run in the same way."""
        compiled = how in WITH_COMPILER
        entry = {"model": experiment.name, "ffn": ffn, "how": how or "eager", "fullgraph": compiled and fullgraph}
        entry |= {**found, f"{experiment.unit}_per_s": experiment.items / found["ms"] * 1e3}
        self.results.append(entry)
        same = [e for e in self.results if e["model"] == experiment.name and e["ffn"] == DENSE]
        base = next((e for e in same if e["how"] == entry["how"]), None)
        peak = entry["peak_bytes"]
        memory = None if peak is None or base is None else peak / base["peak_bytes"]
        graphs = "" if not compiled else f"{found['graphs']}" if fullgraph else f"{found['graphs']}, broken"
        self.rows.append(
            (
                title(experiment, ffn, how),
                graphs,
                number(entry["ms"], 2),
                f"{number(entry[f'{experiment.unit}_per_s'], 0)} {experiment.unit}",
                number(None if base is None else entry["ms"] / base["ms"], 2),
                number(None if peak is None else peak / 2**30, 2),
                number(memory, 2),
                number(entry["first_step_s"], 1),
            )
        )


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write every figure here")
    parser.add_argument("--models", nargs="+", choices=("vit", "llama"), default=("vit", "llama"))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=tuple(WAYS), help="how steps run (default: all)")
    parser.add_argument("--ffns", nargs="+", choices=(DENSE, INTBMOE, NAIVE), default=(DENSE, INTBMOE, NAIVE))
    parser.add_argument("--batch-times", type=int, default=1, metavar="N", help="batches N times as large (default: 1)")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="also print a step's kernels")
    parser.add_argument("--whole", action="store_true", help="compile whole models, not block by block: takes minutes")
    parser.add_argument("--seconds", type=float, default=140, help="start no measurement after this many seconds")
    parser.add_argument("--workers", type=int, help="processes that compile the kernels in advance; 0: none")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, whose figures mean nothing")
    arguments = parser.parse_args()
    begin, device = time.perf_counter(), torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device: use --device cpu --tiny for a dry run")
        return 2
    facts = describe(device)
    say(", ".join(f"{key} {value}" for key, value in facts.items()))
    workers = (default_workers() if device.type == "cuda" else 0) if arguments.workers is None else arguments.workers
    if workers:
        names = {"vit": "ImageNet", "llama": "MiniPile"}
        shapes = [shape for shape in SHAPES if shape.name in [names[model] for model in arguments.models]]
        shapes = [shape.tiny() for shape in shapes] if arguments.tiny else shapes
        for failure in compile_ahead(shapes, [], workers, device):
            say(f"not compiled in advance: {failure}")
        say(f"[kernels compiled: {time.perf_counter() - begin:.0f} s since the start]")
    bench = Bench(device, arguments.whole, begin + arguments.seconds, arguments.profile)
    every = experiments(arguments.tiny, arguments.batch_times)
    chosen = [experiment for name, experiment in every.items() if name in arguments.models]
    plan = [WAYS[way] for way in WAYS if way in arguments.ways]
    if device.type == "cpu":
        plan = [(ffns, how) for ffns, how in plan if how not in (CAPTURED, BOTH, REDUCED)]
    for ffns, how in plan:
        for experiment in chosen:
            for ffn in (ffn for ffn in ffns if ffn in arguments.ffns):
                bench.measure(experiment, ffn, how)
    header = ("model, FFN", "graphs", "ms", "a second", "× dense", "GiB", "× dense", "first step s")
    sizes = "; ".join(f"{experiment.name}: {experiment.sizes}" for experiment in chosen)
    about = f"Training step, bf16 autocast, float32 parameters, fused AdamW. {sizes}"
    print_table(about, header, bench.rows, "\n".join(bench.notes))
    say(f"[{time.perf_counter() - begin:.0f} s in all]")
    if arguments.json:
        write(arguments.json, {"machine": facts, "steps": bench.results, "notes": bench.notes})
    return 0


if __name__ == "__main__":
    sys.exit(main())
