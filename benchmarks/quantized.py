"""Measures 8-bit weights: the size of the paper's models, the time of a layer, and what integer products would gain.

    python benchmarks/quantized.py            # on a GPU if there is one; a minute

Bytes are counted on the meta device, so even large models take no time. Times are those of a precomposed layer with
random weights, all types in the same rounds. On a CPU, "multiplied out" is int8 without the compiled library, which
reads such weights directly; the last table is one product of a block in float32 and in torch's int8, where the inputs
are also rounded to 8 bits.
"""

import copy
import time
from collections.abc import Callable
from unittest import mock

import torch
from gpu_timing import print_table, synchronize
from measure import machine

import intbmoe
from intbmoe.ops import native
from intbmoe.quantization import quantize
from intbmoe.recipes import load_recipe
from intbmoe.tasks import make_task

RECIPES = ("imagenet", "minipile", "inttravel")
SHAPES = {
    "ImageNet": {"dim": 192, "hidden": 768, "blocks": 8, "top_k": 2},
    "IntTravel": {"dim": 96, "hidden": 384, "blocks": 8, "top_k": 2},
    "MiniPile": {"dim": 768, "hidden": 3072, "blocks": 8, "top_k": 2},
}
SIZES = ("float32", "bfloat16", "int8, rest float32", "int8, rest bfloat16", "share in 8 bits")
TOKENS = (1, 32, 256)
ROWS = (1, 8, 32, 128)
ROUNDS = 8


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    print(", ".join(f"{name} {value}" for name, value in (facts | machine()).items()))
    print_table("megabytes of the precomposed model", ["recipe", *SIZES], [sizes(name) for name in RECIPES])
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for name, shape in SHAPES.items():
        found = {count: times(shape, count, device, dtype) for count in TOKENS}
        rows = [[str(count), *(f"{each:.3g}" for each in row.values())] for count, row in found.items()]
        print_table(f"{name}, a layer in {dtype}: milliseconds", ["tokens", *found[TOKENS[0]]], rows)
    if device.type == "cpu":
        for name, shape in SHAPES.items():
            found = {count: products(shape["dim"], 2 * shape["hidden"], count) for count in ROWS}
            rows = [[str(count), *(f"{each:.3g}" for each in row.values())] for count, row in found.items()]
            print_table(f"{name}, a product of a block: milliseconds", ["rows", *found[ROWS[0]]], rows)


def sizes(name: str) -> list[str]:
    reports = []
    for dtype in (torch.float32, torch.bfloat16):
        with torch.device("meta"):
            model = make_task(load_recipe(name)).make_model()
        reports.append(quantize(intbmoe.precompose(model, dtype), "int8"))
    found = [report.bytes_before for report in reports] + [report.bytes_after for report in reports]
    kept = sum(size for _, size in reports[0].kept.values())
    return [name, *(f"{size / 1e6:,.1f}" for size in found), f"{1 - kept / found[0]:.1%}"]


def fastest(runs: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Returns the milliseconds of the fastest round, because other work on the machine can only add to it."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(1 + ROUNDS):  # the first is a warm-up
        for name, run in runs.items():
            synchronize(device)
            begin = time.perf_counter()
            run()
            synchronize(device)
            found[name].append(1e3 * (time.perf_counter() - begin))
    return {name: min(each[1:]) for name, each in found.items()}


@torch.no_grad()
def times(shape: dict[str, int], count: int, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    torch.manual_seed(0)
    plain = intbmoe.IntBMoE(experts=2, **shape).eval().to(device).precompose(dtype)
    int8, fp8 = copy.deepcopy(plain), copy.deepcopy(plain)
    quantize(int8, "int8")
    quantize(fp8, "fp8")
    x = torch.randn(1, count, shape["dim"], device=device, dtype=dtype)
    runs = {"as it is": lambda: plain(x), "int8": lambda: int8(x), "fp8": lambda: fp8(x)}
    if device.type == "cpu" and native.LIBRARY is not None:

        def multiplied_out() -> None:
            with mock.patch.object(native, "LIBRARY", None):
                int8(x)

        runs["int8, multiplied out"] = multiplied_out
    return fastest(runs, device)


@torch.no_grad()
def products(inputs: int, outputs: int, rows: int) -> dict[str, float]:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inputs), torch.randn(inputs, outputs)
    numbers, scales = torch.randint(-127, 128, (inputs, outputs), dtype=torch.int8), torch.rand(outputs)
    dynamic = torch.ao.nn.quantized.dynamic.Linear(inputs, outputs)
    runs = {
        "float32": lambda: x @ weight,
        "int8, multiplied out": lambda: x @ numbers.float().mul_(scales),
        "int8 inputs too": lambda: dynamic(x),
    }
    return fastest(runs, x.device)


if __name__ == "__main__":
    main()
