"""Builds and checks the layers for ``gpu.py``: with a forced load, precomposed, and Hugging Face's block."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import torch
from gpu_stages import Shape, Stage, backward_calls, forward_calls, stages
from gpu_timing import both_call, forward_call, reason, synchronize
from torch import Tensor, nn

from intbmoe import ComposedMoE, IntBMoE
from intbmoe.machine import usable_cores
from intbmoe.parts.router import MLPRouter, count_choices, top_k

ROUTINGS = ("balanced", "Zipf")
ALLOWED = 2e-2
"""Allowed relative difference between backends in bfloat16, by norm: they sum products of rounded factors in different
orders."""
MIXTRAL_EXPERTS, MIXTRAL_TOP, MIXTRAL_HIDDEN = 9, 2, 2048


def shares(routing: str, choices: int) -> Tensor:
    """Returns the load that each block should get."""
    load = torch.ones(choices) if routing == "balanced" else 1 / torch.arange(1.0, choices + 1)
    return load / load.sum()


def draw_ids(tokens: int, choices: int, k: int, device: torch.device) -> Tensor:
    """Draws (tokens, k) uniform choices, different ones for each token."""
    return torch.rand(tokens, choices, device=device).topk(k).indices


def build(shape: Shape, device: torch.device) -> IntBMoE:
    """Builds a layer with random biases, because the initial zeros would hide a forgotten bias."""
    torch.manual_seed(0)
    with device:
        layer = IntBMoE(shape.config)
    with torch.no_grad():
        for pool in layer.pools:
            pool.bias.normal_(std=0.1)
    return layer


def precomposed(shape: Shape, experts: int, device: torch.device, router: MLPRouter | None = None) -> ComposedMoE:
    """Builds a bfloat16 layer composed of ``experts`` bases, with a copy of ``router`` if one is given."""
    layer = build(replace(shape, config=replace(shape.config, experts=experts)), device).eval()
    if router is not None:
        layer.router.load_state_dict(router.state_dict())
    return layer.precompose(torch.bfloat16)


@torch.no_grad()
def force_load(router: MLPRouter, x: Tensor, k: int, wanted: Tensor) -> list[float]:
    """Changes the biases of the scores until blocks get the ``wanted`` shares of ``x``; returns the actual shares."""
    x, wanted = x.reshape(-1, x.shape[-1]), wanted.to(x.device)
    router.scores.bias.zero_()
    scores = router(x)
    bias, step = torch.zeros_like(wanted), scores.std(0).mean()
    for _ in range(200):
        load = count_choices(top_k(scores + bias, k), len(wanted)) / (k * len(x))
        bias += step * (wanted.log() - load.clamp(min=1e-4).log())
        step = step * 0.97
    router.scores.bias.copy_(bias)
    return (count_choices(top_k(router(x), k), len(wanted)) / (k * len(x))).tolist()


def largest_difference(layer: IntBMoE, x: Tensor, backends: Sequence[str]) -> float:
    """Returns how far outputs and gradients of ``backends`` are from the naive ones, relative to their norms."""
    both = both_call(layer, x, autocast=True)

    def results(backend: str) -> tuple[Tensor, ...]:
        layer.backend = backend
        x_grad, *gradients = both()
        return forward_call(layer, x, autocast=True)(), x_grad, torch.cat([g.reshape(-1) for g in gradients])

    expected, worst = results("naive"), 0.0
    for backend in backends:
        for found, right in zip(results(backend), expected, strict=True):
            difference = ((found - right).norm() / right.norm()).item()
            worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return worst


def mixtral_block(dim: int, hidden: int, experts: int, implementation: str = "grouped_mm") -> nn.Module:
    """Builds Hugging Face's sparse block in bfloat16, by default with torch's grouped GEMM."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=dim,
        intermediate_size=hidden,
        num_local_experts=experts,
        num_experts_per_tok=MIXTRAL_TOP,
        experts_implementation=implementation,
    )
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():  # only a whole model initialises them
        nn.init.normal_(parameter, std=0.02)
    return block.bfloat16()


def compile_ahead(
    shapes: Sequence[Shape], small: Sequence[tuple[Shape, int]], workers: int, device: torch.device
) -> list[str]:
    """Compiles every kernel that will be timed into Triton's cache, in several processes; returns what failed and why.

    One process would take minutes. Stages come first, so that whole layers find most kernels in the cache.
    """
    first = [(_compile_stage, shape, i, device) for shape in shapes for i in range(len(_stages(shape, device)))]
    second = [(_compile_layer, shape, None, device) for shape in shapes]
    second += [(_compile_layer, shape, tokens, device) for shape, tokens in small]
    with ProcessPoolExecutor(min(workers, len(first)), mp_context=get_context("spawn")) as pool:
        failures = [*pool.map(_attempt, first), *pool.map(_attempt, second)]
    return [failure for failure in failures if failure]


def default_workers() -> int:
    """Returns one process per core, up to a limit, because each takes some GPU memory."""
    return min(12, usable_cores())


def _stages(shape: Shape, device: torch.device) -> list[Stage]:
    return stages(shape, device, lambda n, choices, k: draw_ids(n, choices, k, device))


def _attempt(task: tuple[Callable[..., None], Shape, int | None, torch.device]) -> str:
    function, shape, argument, device = task
    try:
        function(shape, argument, device)
        synchronize(device)
    except Exception as error:
        return f"{shape.name}, {function.__name__.strip('_')} {argument}: {reason(error)}"
    finally:
        torch.cuda.empty_cache()  # for the other processes
    return ""


def _compile_stage(shape: Shape, index: int, device: torch.device) -> None:
    stage = _stages(shape, device)[index]
    forward_calls(stage, device, sets=1)[0]()
    for name in stage.gradients:
        backward_calls(stage, name, device, sets=1)[0]()


def _compile_layer(shape: Shape, tokens: int | None, device: torch.device) -> None:
    """Runs the layer at its full size, forward and backward and precomposed; with ``tokens``, only precomposed."""
    x = torch.randn(1, tokens or shape.tokens, shape.config.dim, device=device)
    backends = ("fused", "grouped", "tiled")
    if tokens is None:
        layer = build(shape, device)
        for backend in backends:
            layer.backend = backend
            forward_call(layer, x, autocast=True)()
            both_call(layer, x, autocast=True)()
    layer = precomposed(shape, 2, device)
    for backend in backends:
        layer.backend = backend
        forward_call(layer, x.bfloat16(), autocast=False)()
