"""The compiled library for the CPU, built where there is a compiler; everything else is in pyproject.toml.

``optional`` lets an installation go on without it: torch's operations then take its place, and ``intbmoe doctor`` says
so.
"""

import zlib
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("src/intbmoe/ops/native")
SOURCES = ("native.c", "instructions.h", "kernels.h")  # in the order of SOURCES in its __init__.py
CHECKSUM = zlib.crc32(b"".join((FOLDER / name).read_bytes() for name in SOURCES))

library = Extension(
    "intbmoe.ops.native._library",
    sources=[str(FOLDER / "native.c")],
    depends=[str(FOLDER / name) for name in SOURCES],
    define_macros=[("SOURCE", f"{CHECKSUM}u")],
    # No trap and no errno are looked at; NaN and infinity keep their meaning.
    extra_compile_args=[
        "-std=gnu11",
        "-O3",
        "-fopenmp",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
    ],
    extra_link_args=["-fopenmp"],
    libraries=["m"],
    optional=True,
)
setup(ext_modules=[library])
