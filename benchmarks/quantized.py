"""8-bit weights: how small they make the paper's models, and what multiplying them out costs a layer.

    python benchmarks/quantized.py            # on a GPU if there is one; a minute

Bytes are counted of models without memory, so even large ones take no time. Times are medians of a precomposed layer
with random weights, all types in the same rounds.
"""

import copy
import statistics
import time

import torch
from gpu_timing import print_table, synchronize
from measure import machine

import intbmoe
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
ROUNDS = 15


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    print(", ".join(f"{name} {value}" for name, value in (facts | machine()).items()))
    print_table("megabytes of the precomposed model", ["recipe", *SIZES], [sizes(name) for name in RECIPES])
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for name, shape in SHAPES.items():
        rows = [[str(count), *times(shape, count, device, dtype)] for count in TOKENS]
        print_table(f"{name}, a layer in {dtype}: milliseconds", ["tokens", "as it is", "int8", "fp8"], rows)


def sizes(name: str) -> list[str]:
    reports = []
    for dtype in (torch.float32, torch.bfloat16):
        with torch.device("meta"):
            model = make_task(load_recipe(name)).make_model()
        reports.append(quantize(intbmoe.precompose(model, dtype), "int8"))
    found = [report.bytes_before for report in reports] + [report.bytes_after for report in reports]
    kept = sum(size for _, size in reports[0].kept.values())
    return [name, *(f"{size / 1e6:,.1f}" for size in found), f"{1 - kept / found[0]:.1%}"]


@torch.no_grad()
def times(shape: dict[str, int], count: int, device: torch.device, dtype: torch.dtype) -> list[str]:
    torch.manual_seed(0)
    plain = intbmoe.IntBMoE(experts=2, **shape).eval().to(device).precompose(dtype)
    layers = [plain, *(copy.deepcopy(plain) for _ in range(2))]
    for layer, storage in zip(layers[1:], ("int8", "fp8"), strict=True):
        quantize(layer, storage)
    x = torch.randn(1, count, shape["dim"], device=device, dtype=dtype)
    found: list[list[float]] = [[] for _ in layers]
    for _ in range(1 + ROUNDS):  # the first warms up
        for milliseconds, layer in zip(found, layers, strict=True):
            synchronize(device)
            begin = time.perf_counter()
            layer(x)
            synchronize(device)
            milliseconds.append(1e3 * (time.perf_counter() - begin))
    return [f"{statistics.median(milliseconds[1:]):.3g}" for milliseconds in found]


if __name__ == "__main__":
    main()
