"""Compares the two forms of ``ops/merged_mm``, forward and backward, by size of a group and number of matrices.

    python benchmarks/merged.py            # on a GPU if there is one; a minute

Each figure is the time with means of matrices divided by the time with spread inputs, both in the same rounds: above 1,
spreading is faster. A star marks where ``merged_mm`` spreads. First, the gradients of both forms are compared with the
plain ones in the same type.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from gpu_timing import interleaved, print_table
from measure import machine
from torch import Tensor

import intbmoe.ops.merged_mm as package

INPUTS, OUTPUTS = 192, 768
MATRICES = (4, 8, 16, 32)
SIZES = {"cpu": (1, 2, 4, 8, 16), "cuda": (1, 4, 8, 16, 32, 64, 128)}
TOKENS = {"cpu": 512, "cuda": 32_768}
TYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float32)}
ROUNDS = 5
LARGEST_ERROR = 0.02
"""Allowed error of a gradient, by its norm: bfloat16 rounds at different places in the two forms."""


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    print(", ".join(f"{name} {value}" for name, value in (facts | machine()).items()))
    for dtype in TYPES[device.type]:
        print_table(
            f"{dtype}, {TOKENS[device.type]:,} inputs of {INPUTS} to {OUTPUTS}: time of means / of spreading",
            ["inputs a group", *(f"E = {matrices}" for matrices in MATRICES)],
            [
                [str(size), *(ratio(device, dtype, size, matrices) for matrices in MATRICES)]
                for size in SIZES[device.type]
            ],
        )


def ratio(device: torch.device, dtype: torch.dtype, size: int, matrices: int) -> str:
    torch.manual_seed(0)
    groups = TOKENS[device.type] // size
    z = torch.randn(groups, size, INPUTS, device=device, dtype=dtype, requires_grad=True)
    a = torch.randn(groups, matrices, device=device).softmax(-1).requires_grad_()
    weight = (torch.randn(matrices, INPUTS, OUTPUTS, device=device) / INPUTS**0.5).requires_grad_()
    upstream = torch.randn(groups, size, OUTPUTS, device=device, dtype=dtype)

    def gradients(form: Callable[..., Tensor]) -> Sequence[Tensor]:
        return torch.autograd.grad(form(z, a, weight), (z, a, weight), upstream)

    def forced(spreading: bool) -> Sequence[Tensor]:
        with mock.patch.object(package, "spreads", return_value=spreading):
            return gradients(package.merged_mm)

    calls = [lambda: forced(False), lambda: forced(True)]
    expected = gradients(package.naive.merged_mm)
    for call in calls:
        for found, true in zip(call(), expected, strict=True):
            error = float((found - true).double().norm() / true.double().norm())
            if error > LARGEST_ERROR:
                raise SystemExit(f"a gradient of {size} × E = {matrices} in {dtype} differs by {error:.1%}")
    del expected
    rounds = [interleaved(calls, device) for _ in range(ROUNDS if z.is_cpu else 1)]
    by_means, by_spreading = (statistics.median(times) for times in zip(*rounds, strict=True))
    return f"{by_means / by_spreading:.2f}{'*' if package.spreads(z, matrices) else ' '}"


if __name__ == "__main__":
    begin = time.perf_counter()
    main()
    print(f"[{time.perf_counter() - begin:.0f} s in all]")
