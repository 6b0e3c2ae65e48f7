"""Defines the stages of one IntBMoE layer in the fused backend: what each computes, and the least it must move.

Letters as in ``methods/intbmoe.py``; ``n`` tokens make ``m = n·k`` rows. A stage's inputs and outputs are counted
as the layer passes them on: tokens and rows in bfloat16; parameters, the layer's input and output in float32; indices
in int64. Data that a stage writes only to read it again is not counted.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from gpu_timing import Call, Ceilings, Cost, capturing_stream, graph_ms, reason
from torch import Tensor, nn

from intbmoe import IntBMoEConfig
from intbmoe.ops.aligned_linear import square_linear
from intbmoe.ops.blocks.naive import LAYER_NORM_EPS
from intbmoe.ops.choose import choose
from intbmoe.ops.compose import Coefficients, compose_both
from intbmoe.ops.filter_terms import filter_terms
from intbmoe.ops.grouped_mm import grouped_mm
from intbmoe.ops.permute import permute
from intbmoe.ops.triton_support import empty_rows
from intbmoe.parts.experts import SwiGLU
from intbmoe.parts.linear import Linear
from intbmoe.parts.router import MLPRouter

BF16, F32, I64 = 2, 4, 8
COLD_BYTES = 240e6
"""Total size of the inputs of one graph's calls: several times an H200's L2 cache (60 MB), so that each call's inputs
are cold. The smallest stages stay in the cache anyway; in the layer, they find their inputs there too."""
FEWEST_SETS, MOST_SETS, CALLS = 2, 24, 12


@dataclass(frozen=True)
class Shape:
    """One of the paper's layers, with the tokens of one batch."""

    name: str
    tokens: int
    config: IntBMoEConfig

    def tiny(self) -> "Shape":
        """Returns the same layer in small, for a dry run."""
        small = replace(self.config, dim=16, hidden=20, experts=4, shared_hidden=12)
        return Shape(self.name, 24, small)


SHAPES = (
    Shape("MiniPile", 8192, IntBMoEConfig(768, 2844, experts=8, shared_hidden=2048)),
    Shape("ImageNet", 50176, IntBMoEConfig(192, 768, experts=16, shared_hidden=512)),
    Shape("IntTravel", 8064, IntBMoEConfig(96, 384, experts=32, shared_hidden=256, residual_scale=0.0)),
)

Given = dict[str, Any]
"""Inputs of a stage by name: tensors, and modules for their parameters."""


@dataclass(frozen=True)
class Stage:
    """One step of the layer's forward."""

    name: str
    draw: Callable[[], Given]
    run: Callable[[Given], Any]
    """Returns the output tensors, floating-point ones first."""
    cost: Cost
    gradients: dict[str, tuple[tuple[str, ...], Cost]]
    """For each backward stage by name: the inputs that are differentiated, and its cost."""


def stages(shape: Shape, device: torch.device, routing_of: Callable[..., Tensor]) -> list[Stage]:
    """Returns all stages of one layer; ``routing_of(tokens, blocks, k)`` draws the tokens' choices."""
    c = shape.config
    n, d, blocks, bases, shared = shape.tokens, c.dim, c.blocks, c.experts, c.shared_width
    m, layers = n * c.top_k, list(pairwise(c.widths))
    compute = torch.bfloat16

    def normal(*size: int, dtype: torch.dtype = compute, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, device=device) * scale).to(dtype)

    def rows(width: int) -> Tensor:
        """Makes rows as the products and kernels lay them out: each starts at a multiple of 16 bytes."""
        return empty_rows(torch.empty(0, device=device, dtype=compute), m, width).normal_()

    def wide(*size: int, scale: float = 1.0) -> Tensor:
        return normal(*size, dtype=torch.float32, scale=scale)

    def plan() -> Any:
        return permute(routing_of(n, blocks, c.top_k), blocks, "tiled", complete=True)

    def module(make: Callable[..., nn.Module], *sizes: Any) -> nn.Module:
        with device:
            return make(*sizes)

    def product(name: str, i: int, o: int) -> Stage:
        factor, weight, out, flops = BF16 * m * i, BF16 * blocks * i * o, BF16 * m * o, 2 * m * i * o
        cost = Cost(factor + weight + out, flops)
        return Stage(
            name,
            lambda: {"z": rows(i), "weight": normal(blocks, i, o, scale=i**-0.5), "plan": plan()},
            lambda g: grouped_mm(g["z"], g["weight"], g["plan"].ends, "fused", complete=True),
            cost,
            {f"{name}, rows' gradient": (("z",), cost), f"{name}, weights' gradient": (("weight",), cost)},
        )

    def row_operation(number: str, h: int) -> Stage:
        return Stage(
            f"row operation{number}",
            lambda: {
                "rows": rows(2 * h),
                "bias": wide(blocks, 2 * h),
                "gain": wide(h),
                "scale": wide(1),
                "norm": wide(h),
                "shift": wide(h),
                "plan": plan(),
            },
            lambda g: gated_rows(
                g["rows"], g["bias"], g["gain"], g["scale"], (g["norm"], g["shift"]), g["plan"].ends, LAYER_NORM_EPS
            ),
            Cost(BF16 * 3 * m * h + 3 * F32 * m),
            {
                f"row operation{number}": (
                    ("rows", "bias", "gain", "scale", "norm", "shift"),
                    Cost(BF16 * 5 * m * h + 3 * F32 * m),
                )
            },
        )

    def block_stages() -> Iterator[Stage]:
        """Yields the products and the stages between them."""
        for number, (i, o) in enumerate(layers, 1):
            yield product(f"grouped GEMM {number}", i, 2 * o)
            if number < len(layers):
                yield row_operation(f" {number}" if len(layers) > 2 else "", o)

    pool = bases * c.expert_weights
    composed = 2 * blocks * c.expert_weights
    outputs = sum(c.widths[1:])
    products = 2 * 2 * blocks * pool
    router_flops = 2 * n * (d * c.router_dim + c.router_dim * blocks)
    from intbmoe.ops.blocks.fused_combine import gated_combine
    from intbmoe.ops.blocks.fused_filter import filter_rows
    from intbmoe.ops.blocks.fused_gate import gated_rows

    def compose_small(g: Given) -> list[Tensor]:
        alpha = g["hypernetwork"](g["codebook"], "fused")
        return [*alpha[:2], *filter_terms(g["filter"].weight, g["filter"].bias, g["codebook"], compute, "fused")]

    def compose_pools(g: Given) -> list[Tensor]:
        alpha = Coefficients(g["value"], g["gate"], bases**-0.5)
        pools = zip(g["pools"], g["biases"], strict=True)
        return [each for pool in pools for each in compose_both(alpha, *pool, compute, "fused")]

    return [
        Stage(
            "router, choice",
            lambda: {"x": wide(n, d), "router": module(MLPRouter, d, c.router_dim, blocks)},
            lambda g: choose(g["router"](g["x"], backend="fused"), c.top_k, "fused")[::-1],
            Cost(F32 * n * d + (I64 + F32) * m, router_flops, torch.float32),
            {"router, choice": (("x", "router"), Cost(F32 * (2 * n * d + m), 2 * router_flops, torch.float32))},
        ),
        Stage(
            "cast of the tokens",
            lambda: {"x": wide(n, d)},
            lambda g: g["x"].to(compute),
            Cost((F32 + BF16) * n * d),
            {"cast of the tokens": (("x",), Cost((F32 + BF16) * n * d))},
        ),
        Stage(
            "permutation",
            lambda: {"ids": routing_of(n, blocks, c.top_k)},
            lambda g: permute(g["ids"], blocks, "fused"),
            Cost(5 * I64 * m),
            {},
        ),
        Stage(
            "coefficients, filter's terms",
            lambda: {
                "codebook": wide(blocks, c.code_dim),
                "hypernetwork": module(c.make_hypernetwork),
                "filter": module(Linear, d + c.code_dim, d),
            },
            compose_small,
            Cost((F32 + BF16) * d * d + F32 * blocks * (2 * bases + d)),
            {
                "coefficients, filter's terms": (
                    ("codebook", "hypernetwork", "filter"),
                    Cost((F32 + BF16) * d * d + F32 * blocks * (2 * bases + d)),
                )
            },
        ),
        Stage(
            "composition",
            lambda: {
                "value": wide(blocks, bases),
                "gate": wide(blocks, bases),
                "pools": [wide(bases, i, o, scale=i**-0.5) for i, o in layers],
                "biases": [wide(bases, o) for _, o in layers],
            },
            compose_pools,
            Cost(F32 * (pool + (bases + 2 * blocks) * outputs) + BF16 * composed, products, torch.float32),
            {
                "composition": (
                    ("value", "gate", "pools", "biases"),
                    Cost(
                        F32 * (2 * pool + (2 * bases + 2 * blocks) * outputs) + BF16 * composed,
                        2 * products,
                        torch.float32,
                    ),
                )
            },
        ),
        Stage(
            "token filter term",
            lambda: {"x": normal(n, d), "weight": normal(d, d, scale=d**-0.5)},
            lambda g: square_linear(g["x"], g["weight"]),
            Cost(BF16 * (2 * n * d + d * d), 2 * n * d * d),
            {"token filter term": (("x", "weight"), Cost(BF16 * (3 * n * d + 2 * d * d), 4 * n * d * d))},
        ),
        Stage(
            "filter and gather",
            lambda: {"x": normal(n, d), "token": normal(n, d), "block": normal(blocks, d), "plan": plan()},
            lambda g: filter_rows(g["x"], g["token"], g["block"], g["plan"]),
            Cost(BF16 * (2 * n * d + m * d) + 2 * I64 * m),
            {"filter and gather": (("x", "token", "block"), Cost(BF16 * (4 * n * d + m * d) + 2 * I64 * m))},
        ),
        *block_stages(),
        Stage(
            "shared expert",
            lambda: {"x": normal(n, d), "expert": module(SwiGLU, d, shared)},
            lambda g: g["expert"](g["x"]),
            Cost(2 * BF16 * n * d + 3 * F32 * d * shared, 6 * n * d * shared),
            {"shared expert": (("x", "expert"), Cost(3 * BF16 * n * d + 6 * F32 * d * shared, 12 * n * d * shared))},
        ),
        Stage(
            "gated combine",
            lambda: {
                "rows": rows(2 * d),
                "bias": wide(blocks, 2 * d),
                "gain": wide(d),
                "scale": wide(1),
                "weights": wide(n, c.top_k).softmax(-1),
                "shared": normal(n, d),
                "plan": plan(),
            },
            lambda g: gated_combine(
                g["rows"], g["bias"], g["gain"], g["scale"], g["weights"], g["shared"], g["plan"], torch.float32
            ),
            Cost(BF16 * (2 * m * d + n * d) + F32 * n * d + (2 * I64 + F32) * m),
            {
                "gated combine": (
                    ("rows", "bias", "gain", "scale", "weights", "shared"),
                    Cost(BF16 * (4 * m * d + n * d) + F32 * n * d + (2 * I64 + 2 * F32) * m),
                )
            },
        ),
    ]


def _tensors(given: Any) -> list[Tensor]:
    """Returns all tensors in inputs, outputs or modules."""
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, nn.Module):
        return list(given.parameters())
    if isinstance(given, str | bool):  # a plan has these besides tensors
        return []
    if isinstance(given, dict):
        given = given.values()
    return [tensor for part in given for tensor in _tensors(part)]


def _bytes(given: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(given))


def forward_calls(stage: Stage, device: torch.device, sets: int | None = None) -> list[Call]:
    """Makes calls of the forward on enough fresh sets of inputs to keep each one cold."""

    def call(given: Given) -> Call:
        def run() -> Any:
            with torch.no_grad():
                return stage.run(given)

        return run

    return [call(given) for given in _draw(stage, device, sets)]


def backward_calls(stage: Stage, name: str, device: torch.device, sets: int | None = None) -> list[Call]:
    """Makes calls of the backward stage ``name`` in the same way; their forwards have already run."""
    inputs, _ = stage.gradients[name]

    def call(given: Given) -> Call:
        leaves = [tensor.requires_grad_() for tensor in _tensors([given[key] for key in inputs])]
        outputs = [t for t in _tensors([stage.run(given)]) if t.requires_grad]
        probes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).normal_() for t in outputs]
        return lambda: torch.autograd.grad(outputs, leaves, probes, retain_graph=True, allow_unused=True)

    with capturing_stream(device):
        return [call(given) for given in _draw(stage, device, sets)]


def _draw(stage: Stage, device: torch.device, sets: int | None) -> list[Given]:
    """Makes ``sets`` sets of inputs; without ``sets``, enough to keep each one cold."""
    first = stage.draw()
    if sets is None:
        sets = max(FEWEST_SETS, min(MOST_SETS, math.ceil(COLD_BYTES / _bytes(first)))) if device.type == "cuda" else 1
    return [first, *(stage.draw() for _ in range(sets - 1))]


def measure(stage: Stage, device: torch.device, ceilings: Ceilings) -> list[dict[str, Any]]:
    """Measures milliseconds, floor and their ratio for the forward and each gradient; a failure is recorded."""
    candidates = [("forward", stage.name, stage.cost, lambda: forward_calls(stage, device))]
    for name, (_, cost) in stage.gradients.items():
        candidates.append(("backward", name, cost, lambda name=name: backward_calls(stage, name, device)))
    found = []
    for kind, name, cost, make in candidates:
        entry = {"pass": kind, "stage": name, "bytes": cost.bytes, "flops": cost.flops}
        entry["floor_ms"] = cost.floor_ms(ceilings)
        try:
            calls = make()
            entry["ms"] = graph_ms(calls * math.ceil((CALLS if device.type == "cuda" else 1) / len(calls)), device)
        except Exception as error:
            entry["failed"] = reason(error)
        found.append(entry)
    return found
