"""Compiles the layers' Triton kernels for a GPU, on a machine that need not have one.

    python benchmarks/gpu_compile.py sm_90             # half a minute; with --wide some minutes
    python benchmarks/gpu_compile.py sm_90 --spills 8  # and the kernels that keep the most registers in memory
    python benchmarks/gpu_compile.py sm_90 --random 40 # instead of these layers 40 of random sizes

Triton compiles for whatever GPU its driver reports. Layers run forward and backward, but each launch ends once its
kernel has been compiled to machine code, and all memory is zeros. This finds errors that Triton's interpreter cannot
see: types that do not match, and tiles that need more shared memory than the GPU has. The interpreter's tests check
that the numbers are right. For Hopper, this also checks that each kernel waits for the previous one.
"""

import argparse
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import intbmoe
import intbmoe.ops.blocks.fused  # this and the next before INTERPRETING is set, which changes precisions
import intbmoe.ops.compose.fused
from intbmoe.ops import backend, launch
from intbmoe.ops.cross_entropy import cross_entropy
from intbmoe.ops.scores import fused as scores_fused
from intbmoe.ops.swiglu import fused_hidden, fused_product, fused_tokens, fused_weights

SHARED = {80: 166_912, 89: 101_376, 90: 232_448}  # bytes of shared memory that a kernel may use, by capability
SMALL = [
    ("intbmoe", 96, 384, {"experts": 32, "blocks": 8}, 126),  # IntTravel's
    ("intbmoe", 72, 150, {"experts": 3, "blocks": 20}, 3),
    ("intbmoe", 48, (), {"experts": 2, "blocks": 96}, 40),
    ("intbmoe", 48, (), {"experts": 2, "blocks": 40, "router_dim": 100}, 6000),  # most shared memory in the router
    ("intbmoe", 48, (), {"experts": 64, "blocks": 64, "hyper_dim": 64}, 40),  # the largest hypernetwork with a kernel
    ("remoe", 64, 128, {"experts": 4}, 40),
    ("deepseek", 64, 128, {"experts": 4}, 40),
]
WIDE = [
    ("intbmoe", 768, 2844, {"experts": 8, "blocks": 8}, 4096),  # MiniPile's
    ("intbmoe", 192, 768, {"experts": 16, "blocks": 8}, 16384),  # ImageNet's
    ("intbmoe", 1024, (1024,), {"experts": 48, "blocks": 64, "top_k": 4}, 2048),
    ("intbmoe", 771, 3084, {"experts": 2, "blocks": 24}, 300),
    ("vmoe", 768, 2048, {"experts": 8}, 4096),
    ("dynmoe", 768, 2048, {"experts": 8}, 2048),
    ("mass", 768, 2048, {"experts": 8}, 2048),
]


class AbsentGPU:
    """The part of a Triton driver that compiling needs."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


class Compiler:
    """Replaces ``JITFunction.run``: compiles and does not launch."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.kernels: dict[str, tuple[Any, str]] = {}  # compiled, with its name and constants, by its hash
        self.failures: dict[str, None] = {}  # a set that keeps its order
        self._run = JITFunction.run

    def run(self, function: JITFunction, *arguments, grid, warmup, **constants):
        name = f"{function.fn.__module__}.{function.fn.__name__} {constants}"
        try:
            kernel = self._run(function, *arguments, grid=grid, warmup=True, **constants)
        except Exception as error:  # of any kind, so that the other kernels are still compiled
            self.failures[f"{name}: {type(error).__name__}: {error}"] = None
            return
        self.kernels[kernel.hash] = kernel, name
        if not waits_first(kernel.asm["ptx"], self.capability):
            self.failures[f"{name}: touches memory before begin()"] = None
        if kernel.metadata.shared > SHARED[self.capability]:
            self.failures[f"{name}: {kernel.metadata.shared:,} bytes of shared memory"] = None


def waits_first(code: str, capability: int) -> bool:
    """Returns whether a kernel waits for the previous one before it touches memory (``ops/overlap.py``)."""
    wait, access = code.find("griddepcontrol.wait"), re.search(r"\b(ld|st|red|atom)\.global|\bcp\.", code)
    return capability < 90 or -1 < wait < (len(code) if access is None else access.start())


def registers(code: bytes) -> tuple[int, int]:
    """Returns how many bytes each lane of a kernel keeps in memory for lack of registers, and its registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used, stack = re.search(r"REG:(\d+) STACK:(\d+)", found).groups()
    return int(stack), int(used)


def zero_memory() -> None:
    """Fills new memory with zeros, because memory that no kernel has written must not be read as an index."""

    def zeroed(function):
        return lambda *arguments, **named: function(*arguments, **named).zero_()

    for owner in (torch, torch.Tensor):
        for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"):
            if hasattr(owner, name):
                setattr(owner, name, zeroed(getattr(owner, name)))


def random_layers(count: int, seed: int) -> Iterator[tuple[str, int, tuple[int, ...], dict, int]]:
    draw = random.Random(seed)
    for _ in range(count):
        dim = draw.choice((draw.randint(1, 40), draw.randint(40, 600), 8 * draw.randint(5, 130)))
        hidden = tuple(draw.randint(1, 3 * dim) for _ in range(draw.choice((0, 1, 1, 1, 2, 3))))
        experts, blocks = (draw.choice((1, draw.randint(2, 20), draw.randint(20, 130))) for _ in range(2))
        options = {
            "experts": experts,
            "blocks": blocks,
            "top_k": draw.randint(1, min(blocks, 8)),
            "code_dim": draw.choice((1, 17, 32, 32, 200)),
            "hyper_dim": draw.choice((1, 16, 16, 40, 128)),
            "router_dim": draw.choice((1, 30, 64, 64, 128, 300)),
            **{name: draw.random() < 0.8 for name in ("gate", "filter", "shared", "bias", "layer_norm")},
        }
        yield "intbmoe", dim, hidden, options, draw.choice((1, 5, 100, 1000, 5000))


def run_layer(method: str, dim: int, hidden, options: dict, tokens: int, dtype: torch.dtype) -> None:
    layer = intbmoe.create(method, dim, hidden, **options)
    x = torch.zeros(1, tokens, dim, requires_grad=True)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        y = layer(x)
    y.sum().backward()


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the kernels for a GPU that this machine need not have.")
    parser.add_argument("gpu", choices=[f"sm_{capability}" for capability in SHARED])
    parser.add_argument("--wide", action="store_true", help="also compile for the sizes of large models")
    parser.add_argument("--spills", type=int, default=0, metavar="N", help="list the N kernels that spill the most")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="compile for N layers of random sizes")
    parser.add_argument("--seed", type=int, default=0, help="which random sizes")
    options = parser.parse_args()
    compiler = Compiler(int(options.gpu.removeprefix("sm_")))
    triton.runtime.driver.set_active(AbsentGPU(compiler.capability))
    JITFunction.run = lambda *arguments, **named: compiler.run(*arguments, **named)
    backend.INTERPRETING = launch.INTERPRETING = True  # so that layers use their kernels for CPU tensors
    for module in (scores_fused, fused_hidden, fused_product, fused_tokens, fused_weights):
        module.shared_memory = lambda device: SHARED[compiler.capability]
    zero_memory()
    for layer in random_layers(options.random, options.seed) if options.random else SMALL + WIDE * options.wide:
        for dtype in (torch.bfloat16, torch.float32):
            run_layer(*layer, dtype)
            print(*layer, dtype, len(compiler.kernels), flush=True)
    scores = torch.zeros(64, 16_384, requires_grad=True)
    cross_entropy(scores, torch.zeros(64, dtype=torch.long)).sum().backward()
    most, name = max((kernel.metadata.shared, name.split()[0]) for kernel, name in compiler.kernels.values())
    count = len(compiler.kernels)
    print(f"{count} kernels compiled for {options.gpu}, at most {most:,} bytes of shared memory ({name})")
    if options.spills:
        found = sorted(
            ((*registers(kernel.asm["cubin"]), name) for kernel, name in compiler.kernels.values()), reverse=True
        )
        for spilled, used, name in found[: options.spills]:
            print(f"{spilled} bytes spilled, {used} registers: {name}")
    for failure in compiler.failures:
        print(failure)
    return bool(compiler.failures)


if __name__ == "__main__":
    sys.exit(main())
