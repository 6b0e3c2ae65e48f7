"""``intbmoe doctor``: what this machine has, which form of each operation it gets, and whether that form is right.

Every form is run on a small IntBMoE layer and held against the specification in float64, outputs and gradients.
"""

import copy
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple

import torch

from intbmoe.methods.intbmoe import IntBMoE
from intbmoe.ops.triton_support import INSTALLED, usable
from intbmoe.parts.blocks import choose_form

EXTRAS = {
    "plots": ("matplotlib",),
    "train": ("accelerate", "safetensors", "yaml", "sklearn"),
    "images": ("timm", "pyarrow"),
    "text": ("tokenizers", "pyarrow"),
    "travel": ("pyarrow",),
}
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""How far, relative to the norm, outputs and gradients may be from float64: some units in the last place, and the sums
of a few hundred of them."""


class Finding(NamedTuple):
    """One line of the report."""

    name: str
    value: str
    good: bool | None = None
    """None where there is nothing to judge."""


def examine() -> list[Finding]:
    """Everything, in the order to print it."""
    return [*_machine(), *_packages(), *(_check(*case) for case in _cases())]


def _machine() -> list[Finding]:
    found = [Finding("python", platform.python_version()), Finding("torch", torch.__version__)]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            name = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
            found.append(Finding(f"cuda:{index}", name))
    else:
        found.append(Finding("cuda", "no device"))
    threads = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    return [*found, Finding("cpu", threads)]


def _packages() -> list[Finding]:
    triton = "not installed: a GPU runs the plain forms, which are slower"
    found = [Finding("triton", _version("triton") if INSTALLED else triton)]
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if find_spec(module) is None]
        value = "installed" if not missing else f"{', '.join(missing)} missing: pip install 'intbmoe[{extra}]'"
        found.append(Finding(f"extra {extra}", value))
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "installed"


def _cases() -> list[tuple[torch.device, torch.dtype, str | None]]:
    cases = [
        (torch.device("cpu"), torch.float64, None),
        (torch.device("cpu"), torch.float32, None),
        (torch.device("cpu"), torch.bfloat16, None),
    ]
    if torch.cuda.is_available():
        device = torch.device("cuda")
        cases += [(device, torch.float32, None), (device, torch.bfloat16, None), (device, torch.bfloat16, "tiled")]
    return cases


def _check(device: torch.device, dtype: torch.dtype, form: str | None) -> Finding:
    """Run a small layer and compare; any exception is a finding too."""
    like = torch.empty(0, dtype=dtype, device=device)
    chosen = form or choose_form(like)
    name = f"IntBMoE on {device.type} in {str(dtype).removeprefix('torch.')}"
    kernels = ", by Triton" if chosen == "fused" and usable(like) else ""
    try:
        error = _distance(device, dtype, form)
    except Exception as failure:  # a broken driver, a missing compiler: what doctor is there to tell
        return Finding(name, f"form {chosen}{kernels}: {type(failure).__name__}: {failure}", False)
    good = error <= BOUNDS[dtype]
    verdict = "right" if good else "WRONG"
    return Finding(name, f"form {chosen}{kernels}: {verdict}, {error:.1e} from float64", good)


def _distance(device: torch.device, dtype: torch.dtype, form: str | None) -> float:
    """The largest relative distance of outputs and of all gradients taken together from the specification's."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = IntBMoE(64, 128, experts=4, blocks=4).to(dtype)
        x = torch.randn(2, 96, 64).to(dtype)
        probe = torch.randn(2, 96, 64).to(dtype)
    exact = copy.deepcopy(layer).double()
    exact.form = "naive"
    layer = layer.to(device)
    layer.form = form
    expected = _run(exact, x.double(), probe.double())
    found = _run(layer, x.to(device), probe.to(device))
    pairs = [(found[0], expected[0]), (torch.cat(found[1:]), torch.cat(expected[1:]))]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def _run(layer: IntBMoE, x: torch.Tensor, probe: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients, flat, on the CPU in float64."""
    x = x.requires_grad_()
    y = layer(x)
    gradients = torch.autograd.grad(y, [x, *layer.parameters()], probe)
    return [tensor.detach().double().cpu().reshape(-1) for tensor in (y, *gradients)]
