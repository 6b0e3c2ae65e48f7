"""Kernels that are set up before the previous one has ended, on GPUs of compute capability 9 (Hopper).

Between two kernels of a stream, a GPU is idle for about a microsecond, a large part of what a narrow layer's kernels
take. With programmatic dependent launch, the programs of the next kernel start while the last ones of this kernel still
run, and wait on the device. So every kernel must call ``begin`` before it touches memory; ``launch`` does the rest.
"""

import triton
import triton.language as tl

from intbmoe.ops.backend import INTERPRETING

_COMPILED = tl.constexpr(not INTERPRETING)


@triton.jit
def begin():
    """Wait until the previous kernel has ended and its results can be read; let the next one start and wait, too."""
    if _COMPILED and tl.target_info.cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
