"""Runs tests of Triton kernels on a GPU or, without one, in Triton's interpreter in a separate process.

The interpreter must be chosen before Triton is first imported, which torch may do at any time, and every layer on the
CPU would then use it. So tests/ops/test_interpreted_kernels.py runs the files of kernel tests with TRITON_INTERPRET=1
(``rerun``), as you can run one by hand. Their tests take ``device``, which is "cpu" there and "cuda" where there is a
GPU (``pytest -m gpu``).
"""

import functools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
_without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
_device = "cpu" if INTERPRETING else pytest.param("cuda", marks=[pytest.mark.gpu, _without_gpu])
on_device = pytest.mark.parametrize("device", [_device])


def rerun(*paths):
    """Run the test files at ``paths`` in the interpreter."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-W", "ignore", "-p", "no:cacheprovider", "-x", *paths]
    # Other packages' pytest plugins take seconds to load and are not needed here.
    settings = {"TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def _hurry():
    """Make the interpreter skip work that takes two thirds of its time and changes no result.

    It patches all of Triton's language again whenever a kernel calls another function, checks every sum of integers
    for overflow, which the few elements of a test cannot cause, and reduces by a custom function one number at a time.
    """
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope", "ReduceOps")):
        return  # another version of Triton, with which these tests are slow

    core, replace_all = interpreter.tl.core, interpreter._patch_lang

    @functools.cache
    def languages(function):
        return [value for value in function.__globals__.values() if value is interpreter.tl or value is core]

    def replace_once(function):
        if any(core.is_builtin(language.load) for language in languages(function)):
            return replace_all(function)
        return interpreter._LangPatchScope()

    def reduce_slices(self, parts):
        """Reduce all rows at once, with the same additions in the same order."""
        assert self.axis is not None
        assert not self.keep_dims
        slices = zip(*(np.moveaxis(part.handle.data, self.axis, 0) for part in parts), strict=True)
        slices = [tuple(self.to_tensor(x, part.dtype) for x, part in zip(xs, parts, strict=True)) for xs in slices]
        return functools.reduce(lambda total, xs: self.combine_fn.fn(*total, *xs), slices)

    interpreter._patch_lang = replace_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.ReduceOps.generic_reduce = reduce_slices


if INTERPRETING:
    _hurry()
