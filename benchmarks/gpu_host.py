"""Measures the host time of one layer on a GPU: Python, the dispatcher and the launches, while the device waits.

    python benchmarks/gpu_host.py                 # milliseconds of one call, and the kernels it starts
    python benchmarks/gpu_host.py --profile 40    # also where Python's time goes, function by function

A call is timed by the host's clock without waiting for the device, with so few tokens that the device is always
faster; so the figure is what an eager loop costs at any size. Figures are medians over rounds of ten calls each, with
kernels launched from Python and, in turns with that, replayed from CUDA graphs where that applies (graphs/replay.py).
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable

import torch
from gpu_layers import build
from gpu_stages import SHAPES
from gpu_timing import bf16_autocast, describe, forward_call, number, print_table
from torch import Tensor

from intbmoe import aux_loss, create
from intbmoe.graphs import replay

TOKENS, ROUNDS, IN_A_ROW = 64, 40, 10


def gradient_forward(layer: torch.nn.Module, x: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with bf16_autocast(x.device):
            return layer(x)

    return run


def training_call(layer: torch.nn.Module, x: Tensor) -> Callable[[], None]:
    forward = gradient_forward(layer, x)

    def run() -> None:
        layer.zero_grad()
        x.grad = None
        (forward().sum() + aux_loss(layer)).backward()

    return run


def calls(device: torch.device) -> dict[str, Callable[[], object]]:
    shape = next(shape for shape in SHAPES if shape.name == "MiniPile")
    dim = shape.config.dim
    layer, inference = build(shape, device), build(shape, device).eval()
    x = torch.randn(1, TOKENS, dim, device=device)
    composed, one = inference.precompose(torch.bfloat16), torch.randn(1, 1, dim, device=device, dtype=torch.bfloat16)
    found = {
        "IntBMoE, forward without gradients": forward_call(inference, x, autocast=True),
        "IntBMoE, forward": gradient_forward(layer, x.clone().requires_grad_()),
        "IntBMoE, forward and backward": training_call(layer, x.clone().requires_grad_()),
        "IntBMoE precomposed, one token": forward_call(composed, one, autocast=False),
    }
    for method in ("dense", "switch", "vmoe", "deepseek", "remoe"):
        with device:
            other = create(method, dim, shape.config.hidden[0])
        found[f"{method}, forward and backward"] = training_call(other, x.clone().requires_grad_())
    return found


def host_ms(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(IN_A_ROW):
        call()  # a graph is free again when the result of a forward without a backward is gone
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    return took * 1e3 / IN_A_ROW


def kernels(call: Callable[[], object]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="lines of Python's profile per call")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    measured = calls(device)
    times: dict[tuple[str, bool], list[float]] = {(name, graphs): [] for name in measured for graphs in (False, True)}
    for name, graphs in times:
        replay.enabled = graphs
        for _ in range(5):
            measured[name]()
    for _ in range(ROUNDS):
        for (name, graphs), found in times.items():
            replay.enabled = graphs
            found.append(host_ms(measured[name]))
    replay.enabled = False
    rows = [
        [name, *(number(statistics.median(times[name, graphs])) for graphs in (False, True)), str(kernels(call))]
        for name, call in measured.items()
    ]
    machine = ", ".join(f"{key} {value}" for key, value in describe(device).items())
    about = f"Host time of one call, ms, {TOKENS} tokens at MiniPile's shape ({machine})"
    print_table(about, ["", "launched", "replayed", "kernels"], rows)
    for name, graphs in times if arguments.profile else ():
        print(f"\n{name}, {'replayed' if graphs else 'launched'}")
        replay.enabled = graphs
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(50):
            measured[name]()
        profile.disable()
        torch.cuda.synchronize()
        pstats.Stats(profile).sort_stats("tottime").print_stats(arguments.profile)


if __name__ == "__main__":
    main()
