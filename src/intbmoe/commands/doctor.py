"""``intbmoe doctor``: what this machine has, which backend it gets, and whether that backend computes correctly.

Each check runs a small IntBMoE layer and compares its outputs and, in training, its gradients with the specification in
float64.
"""

import copy
import platform
import warnings
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from intbmoe.foreign import import_torchvision, torchvision_is_repaired
from intbmoe.methods.intbmoe import IntBMoE
from intbmoe.ops import native
from intbmoe.ops.backend import TRITON, Backend, choose_backend

EXTRAS = {
    "plots": ("matplotlib", "jinja2"),
    "train": ("accelerate", "safetensors", "tensorboard", "yaml", "numpy", "sklearn", "PIL", "psutil", "scipy"),
    "images": ("timm", "torchvision", "pyarrow"),
    "text": ("tokenizers", "pyarrow"),
    "travel": ("duckdb",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "serve": ("starlette", "uvicorn", "httptools", "uvloop", "msgpack", "prometheus_client"),
    "huggingface": ("transformers",),
    "ray": ("ray",),
}
"""The modules of each extra in pyproject.toml except those for developers."""
WITH_TORCHVISION = ("timm", "torchvision", "transformers")
"""Modules that import torchvision if it is installed."""
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""How far outputs and gradients may be from float64, relative to the norm: a few units in the last place, and the sums
of a few hundred of them."""


class Finding(NamedTuple):
    name: str
    value: str
    good: bool | None = None  # None if there is nothing to judge


def examine() -> list[Finding]:
    return [*machine(), *_packages(), *(_check(case) for case in _cases())]


def machine() -> list[Finding]:
    found = [Finding("python", platform.python_version()), Finding("torch", torch.__version__)]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            name = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
            found.append(Finding(f"cuda:{index}", name))
    else:
        found.append(Finding("cuda", "no device"))
    instructions = torch.backends.cpu.get_cpu_capability()
    name = platform.machine() if instructions == "DEFAULT" else f"{platform.machine()}, {instructions}"
    threads = torch.get_num_threads()
    return [*found, Finding("cpu", f"{threads} thread{'' if threads == 1 else 's'}, {name}")]


def _packages() -> list[Finding]:
    triton = "not installed: a GPU runs plain torch, which is slower"
    found = [Finding("triton", _version("triton") if TRITON else triton), Finding("native library", native.STATUS)]
    return [*found, *(_extra(extra, modules) for extra, modules in EXTRAS.items())]


def _extra(extra: str, modules: tuple[str, ...]) -> Finding:
    """Import the packages of an extra: one that is installed may still lack a library or another package.

    A torchvision that does not fit torch is no fault here, because intbmoe repairs its import, but it is elsewhere.
    """
    faults = [(module, fault) for module in modules if (fault := _import(module)) is not None]
    missing = [module for module, fault in faults if fault == "missing"]
    broken = [f"{module} cannot be imported: {fault}" for module, fault in faults if fault != "missing"]
    told = [f"{', '.join(missing)} missing: pip install 'intbmoe[{extra}]'"] if missing else []
    repaired = [module for module in modules if module in WITH_TORCHVISION and module not in dict(faults)]
    if repaired and torchvision_is_repaired():
        told.append(
            f"{', '.join(repaired)} usable inside intbmoe only: torchvision was built for another torch; install the "
            f"torchvision that fits torch {torch.__version__}"
        )
    return Finding(f"extra {extra}", "; ".join([*broken, *told]) or "works", False if broken else None)


@cache
def _import(module: str) -> str | None:
    """Return None if the module can be imported, otherwise why not, in a few words."""
    try:
        if module in WITH_TORCHVISION:
            import_torchvision(required=False)
        import_module(module)
    except Exception as error:  # whatever another package raises
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            return "missing"
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "installed"


class _Case(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    backend: Backend | None = None
    gradients: bool = True


def _cases() -> list[_Case]:
    device = torch.device("cpu")
    cases = [_Case(device, dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    cases += [_Case(device, dtype, gradients=False) for dtype in native.DTYPES]
    if torch.cuda.is_available():
        device = torch.device("cuda")
        cases += [_Case(device, torch.float32), _Case(device, torch.bfloat16), _Case(device, torch.bfloat16, "tiled")]
    return cases


def _check(case: _Case) -> Finding:
    like = torch.empty(0, dtype=case.dtype, device=case.device)
    with torch.set_grad_enabled(case.gradients):
        chosen = case.backend or choose_backend(like, has_native=True)
    inference = "" if case.gradients else ", inference"
    name = f"IntBMoE, {case.device.type}, {str(case.dtype).removeprefix('torch.')}{inference}"
    kernels = ", by Triton" if chosen == "fused" else ""
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            error = _distance(case)
    except Exception as failure:  # a broken driver, a missing compiler: this is what doctor is there to find
        return Finding(name, f"backend {chosen}{kernels}: {type(failure).__name__}: {failure}", False)
    good = error <= BOUNDS[case.dtype]
    verdict = "correct" if good else "WRONG"
    # Only the first line: below it torch may have listed the calls of its own code.
    warned = "".join(f"; warning: {line}" for line in dict.fromkeys(str(w.message).partition("\n")[0] for w in said))
    return Finding(
        name, f"backend {chosen}{kernels}: {verdict}, {error:.1e} relative error against float64{warned}", good
    )


def _distance(case: _Case) -> float:
    """Return the largest relative distance from the specification: of the outputs, or of all gradients together."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = IntBMoE(64, 128, experts=4, blocks=4).to(case.dtype)
        x = torch.randn(2, 96, 64).to(case.dtype)
        probe = torch.randn(2, 96, 64).to(case.dtype)
    exact = copy.deepcopy(layer).double()
    exact.backend = "naive"
    layer = layer.to(case.device)
    layer.backend = case.backend
    expected = _run(exact, x.double(), probe.double(), case.gradients)
    found = _run(layer, x.to(case.device), probe.to(case.device), case.gradients)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def _run(layer: IntBMoE, x: torch.Tensor, probe: torch.Tensor, gradients: bool) -> list[torch.Tensor]:
    """Return the output and, if asked for, all gradients, each flattened, on the CPU in float64."""
    with torch.set_grad_enabled(gradients):
        y = layer(x.requires_grad_(gradients))
    parts = [[y], torch.autograd.grad(y, [x, *layer.parameters()], probe)] if gradients else [[y]]
    return [torch.cat([tensor.detach().double().cpu().reshape(-1) for tensor in part]) for part in parts]
