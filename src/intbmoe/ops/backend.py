"""Which implementation of an operation runs: decided here, once per forward, and passed down.

fused      Triton kernels: on a GPU
native     the compiled library: on the CPU without gradients, where it has been built
grouped    torch's grouped GEMM and plain operations: on the CPU, and on a GPU that has it but not Triton
tiled      plain torch throughout: float64, export, torch.func, other devices
naive      the specification: slow, written to be read

All compute the same result. An operation without an implementation for a backend runs plain torch there.
"""

import os
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

from intbmoe.ops import native
from intbmoe.ops.eager import exporting, has_dual_numbers, transformed, unobserved

Backend = Literal["fused", "native", "grouped", "tiled", "naive"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

# Triton comes with torch's CUDA builds, but is optional. INTBMOE_TRITON=0 is for GPUs it does not compile for.
HAS_TRITON = find_spec("triton") is not None
TRITON = HAS_TRITON and os.environ.get("INTBMOE_TRITON") != "0"
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on the CPU, for tests; Triton also reads it once
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of Triton's kernels and torch's grouped GEMM


def choose_backend(
    x: Tensor, dtype: torch.dtype | None = None, wanted: Backend | None = None, *, has_native: bool = False
) -> Backend:
    """Return the fastest backend for numbers of ``dtype`` (None: that of ``x``) on the device of ``x``, here and now.

    No backend waits for the device or has a shape that depends on the data. A ``wanted`` backend is returned if it can
    run; otherwise an error says why not. ``has_native`` means that the compiled library can do what the caller needs.
    """
    dtype = dtype or x.dtype
    if wanted is not None:
        _require(wanted, x, dtype, has_native)
        return wanted
    plain = exporting() or transformed()  # an exported program must not need our kernels; torch.func does not know them
    if not plain and triton_runs(x.device, dtype):
        return "fused"
    if has_native and _native_runs(x, dtype):
        return "native"
    if plain or dtype not in DTYPES:
        return "tiled"
    if x.device.type == "cuda":
        # In other cases torch's grouped GEMM copies the offsets to the host and loops.
        one_kernel = dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (9, 0)
        return "grouped" if one_kernel else "tiled"
    return "grouped" if x.device.type == "cpu" else "tiled"


def triton_runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our kernels run there. They do not compile for AMD's GPUs, whose type is "cuda" too."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return TRITON and dtype in DTYPES and (nvidia or (INTERPRETING and device.type == "cpu"))


def _native_runs(x: Tensor, dtype: torch.dtype) -> bool:
    # In this order: a compiler understands the first condition, and must not see the rest.
    return unobserved(x) and native.LIBRARY is not None and dtype in native.DTYPES


def _require(backend: Backend, x: Tensor, dtype: torch.dtype, has_native: bool) -> None:
    if backend in ("fused", "grouped") and has_dual_numbers():  # torch would silently drop their tangents
        raise RuntimeError(
            f"backend {backend!r} has no forward-mode derivative: leave layer.backend None, or take 'tiled'"
        )
    if backend == "fused" and not triton_runs(x.device, dtype):
        off = "switched off by INTBMOE_TRITON=0" if HAS_TRITON else "not installed"
        found = f"here Triton is {'installed' if TRITON else off}, x is {dtype} on {x.device}"
        raise RuntimeError(
            f"backend 'fused' needs Triton and an NVIDIA GPU (or the CPU in Triton's interpreter, TRITON_INTERPRET=1), "
            f"in float32, bfloat16 or float16; {found}: leave layer.backend None to have it chosen"
        )
    if backend == "native" and not has_native:
        raise RuntimeError(
            "backend 'native' has no code for this layer's options (see repr(layer)): the compiled library runs the "
            "paper's blocks only; leave layer.backend None to have one chosen"
        )
    if backend == "native" and native.LIBRARY is None:
        raise RuntimeError(f"backend 'native' needs the compiled library, which is {native.STATUS}")
    if backend == "native" and not _native_runs(x, dtype):
        gradients = "on" if torch.is_grad_enabled() else "off"
        raise RuntimeError(
            f"backend 'native' runs eagerly without gradients (torch.no_grad, torch.inference_mode) on the CPU in "
            f"float32 or float64; here x is {dtype} on {x.device}, gradients are {gradients}: "
            f"leave layer.backend None to have it chosen"
        )
