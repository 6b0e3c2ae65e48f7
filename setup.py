"""The compiled library for the CPU, built where there is a compiler; everything else is in pyproject.toml.

``optional`` lets an installation go on without it: torch's operations then take its place, and ``intbmoe doctor`` says
so. The library is loaded by ctypes and has nothing of Python in it, so one wheel serves every Python.
"""

import zlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/intbmoe/ops/native")
# In the order of SOURCES in its __init__.py.
SOURCES = ("native.c", "instructions.h", "kernels.h", "product.h", "compose.h")
CHECKSUM = zlib.crc32(b"".join((FOLDER / name).read_bytes() for name in SOURCES))


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"  # NAME in its __init__.py


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


library = Extension(
    "intbmoe.ops.native._library",
    sources=[str(FOLDER / "native.c")],
    depends=[str(FOLDER / name) for name in SOURCES],
    define_macros=[("SOURCE", f"{CHECKSUM}u")],
    # The code checks no traps and no errno; NaN and infinity keep their meaning. It is linked without -fopenmp, because
    # the library uses the OpenMP that torch has loaded.
    extra_compile_args=[
        "-std=gnu11",
        "-O3",
        "-fopenmp",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
    ],
    libraries=["m"],
    optional=True,
)
setup(ext_modules=[library], cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel})
