"""Kernels that are set up before the previous one has ended, on GPUs of compute capability 9 (Hopper).

Between two kernels of a stream, a GPU is idle for about a microsecond, a large part of what a narrow layer's kernels
take. With programmatic dependent launch, the next kernel is set up as soon as the programs of this one have ended, but
before what they wrote can be read, and waits for that on the device. So every kernel must call ``begin`` before it
touches memory; ``launch`` does the rest. A kernel could let the next one start even earlier, but programs that wait
hold registers and shared memory, which other branches of a graph could use: a layer became slower by up to 16 %.
"""

import triton
import triton.language as tl

from intbmoe.ops.backend import INTERPRETING

_COMPILED = tl.constexpr(not INTERPRETING)


@triton.jit
def begin():
    """Wait until the previous kernel's results can be read."""
    if _COMPILED and tl.target_info.cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()
