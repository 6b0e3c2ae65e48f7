"""Tests of Triton kernels: on a GPU directly, without one in Triton's interpreter, in a process of their own.

The interpreter must be chosen before Triton is first imported, which torch may do at any time, and every layer on the
CPU would then use it. So a file of kernel tests runs itself again with TRITON_INTERPRET=1 (``rerun``), and its tests
take ``device``, which is "cpu" there and "cuda" where there is a GPU (``pytest -m gpu``).
"""

import os
import subprocess
import sys

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
_without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
_device = "cpu" if INTERPRETING else pytest.param("cuda", marks=[pytest.mark.gpu, _without_gpu])
on_device = pytest.mark.parametrize("device", [_device])


def rerun(path):
    """Run the test file at ``path`` in the interpreter."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-W", "ignore", "-p", "no:cacheprovider", "-x", path]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
