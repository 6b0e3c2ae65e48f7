"""Finds what compiled code must not contain."""

import re


def read_backs(code: str) -> list[str]:
    """Kernels in Inductor's code that load what they have stored, without a barrier in between.

    The stores of other threads may then be missing (pytorch/pytorch#190519).
    """
    found = []
    for kernel in code.split("@triton.jit")[1:]:
        stored: set[str] = set()
        for line in kernel.split("'''")[0].splitlines():
            if "tl.debug_barrier" in line:
                stored.clear()
            if stored & set(re.findall(r"tl\.load\(\(?(\w+)", line)):
                found.append(kernel)
                break
            stored.update(re.findall(r"tl\.store\(\(?(\w+)", line))
    return found
