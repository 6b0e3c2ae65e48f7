"""What compiled code must not hold."""

import re


def read_backs(code: str) -> list[str]:
    """Kernels of Inductor's code that load what they stored, with no barrier in between.

    Other threads' stores may be missing then (pytorch/pytorch#190519).
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
