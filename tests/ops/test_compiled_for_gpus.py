"""The kernels compile for GPUs that this machine lacks; ``benchmarks/gpu_compile.py`` says how, and what that finds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_compile.py"


def compile_kernels(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["sm_80", "sm_89", "sm_90"])
def test_every_kernel_compiles_and_fits(gpu):
    pytest.importorskip("triton")
    done = compile_kernels(gpu)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) kernels compiled", done.stdout)[1]) > 100
