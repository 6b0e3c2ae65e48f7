"""Times served layers with and without the compiled library, next to dense ones, in float32 without gradients.

    python benchmarks/native.py                    # two minutes, on an otherwise idle machine
    python benchmarks/native.py --seconds 1        # a smoke test

Each layer runs twice in every round, once with the library and once with torch's operations, in a shuffled order; first
their outputs must agree. Dense layers never use the library: their figure is that of a mixture of one expert. A time is
the fastest of all rounds, because other work on the machine can only add to it. "dense, 2 ×" is the dense FFN with
twice the width, which has as many multiplications as a token's two experts.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import tyro
from measure import Candidate, console, figures_table, inference, machine, say_facts, time_round_robin
from torch import Tensor

import intbmoe
from intbmoe.ops import native
from methods import PRECOMPOSED, SHAPES, Shape

SIZES = {"inttravel": (1, 126), "imagenet": (1, 196), "minipile": (1, 256)}
"""Sequences and tokens of one request."""
METHODS = {"switch": 1, "vmoe": 2, "mixtral": 2, "deepseek": 3, PRECOMPOSED: 3}
"""A token's multiplications as a multiple of the dense FFN's, including the shared expert."""
LIBRARY = native.LIBRARY


def candidate(layer: intbmoe.MoELayer, x: Tensor, library: object) -> Candidate:
    run = inference(layer, x)
    if library is not None and layer.choices is None:
        run = inference(as_mixture_of_one(layer), x)
    return Candidate(layer, lambda: setattr(native, "LIBRARY", library), run)


def as_mixture_of_one(layer: intbmoe.MoELayer) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        ids, weights = torch.zeros(len(tokens), 1, dtype=torch.int64), torch.ones(len(tokens), 1)
        return layer.experts.route(tokens, ids, weights, complete=True)[0].view(x.shape)

    return run


def bench(shape: Shape, seconds: float) -> None:
    """Checks, times and prints one shape and number of tokens."""
    x = shape.input()
    widths = sorted(set(METHODS.values()))
    dense = {f"dense, {n} ×": replace(shape, hidden=n * shape.hidden).build(shape.baseline) for n in widths}
    layers = {name: layer.eval() for name, layer in (dense | {name: shape.build(name) for name in METHODS}).items()}
    candidates = {}
    for name, layer in layers.items():
        candidates[name, "torch"] = candidate(layer, x, None)
        candidates[name, "library"] = candidate(layer, x, LIBRARY)
        outputs = []
        for way in ("torch", "library"):
            candidates[name, way].prepare()
            outputs.append(candidates[name, way].run())
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    times = time_round_robin(candidates, seconds, 10, shape.name)
    milliseconds = {key: min(found) for key, found in times.items()}
    sizes = f"{shape.name}, {shape.batch} × {shape.tokens} tokens, {torch.get_num_threads()} threads"
    columns = ("method", "torch ms", "library ms", "torch / library", "library / dense")
    table = figures_table(f"{sizes}: fastest of {len(times[name, 'torch'])} rounds", *columns)
    for name in layers:
        slow, fast = milliseconds[name, "torch"], milliseconds[name, "library"]
        beside = milliseconds[f"dense, {METHODS[name]} ×", "torch"] if name in METHODS else None
        ratio = f"{fast / beside:.2f}" if beside else ""
        table.add_row(name, f"{slow:.3f}", f"{fast:.3f}", f"{slow / fast:.2f} ×", ratio)
    console.print(table)


def main(seconds: float = 10.0, threads: tuple[int, ...] = (1, 2), shapes: tuple[str, ...] = tuple(SIZES)) -> None:
    """Time methods with and without the compiled library.

    Args:
        seconds: Time for each table; at least ten rounds.
        threads: Numbers of threads, one table for each.
        shapes: The layers.
    """
    say_facts({**machine(), "native_library": native.STATUS})
    if LIBRARY is None:
        raise SystemExit(f"there is nothing to compare: the compiled library is {native.STATUS}")
    for count in threads:
        torch.set_num_threads(count)
        for name in shapes:
            batch, tokens = SIZES[name]
            for size in (replace(SHAPES[name], batch=batch, tokens=tokens), replace(SHAPES[name], batch=1, tokens=1)):
                bench(size, seconds)


if __name__ == "__main__":
    tyro.cli(main)
