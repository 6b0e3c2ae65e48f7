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
    """Make the interpreter skip work that takes three quarters of its time and changes no result.

    It patches all of Triton's language again whenever a kernel calls another function, checks every sum of integers
    for overflow, which the few elements of a test cannot cause, reduces by a custom function one number at a time,
    checks and names every block's type anew, derives the same shape from it for every value, makes every constant twice
    whenever it is used, and broadcasts what already has the same shape.
    """
    from triton.runtime import interpreter

    names = ("_patch_lang", "_LangPatchScope", "ReduceOps", "_get_np_dtype", "interpreter_semantic")
    if not all(hasattr(interpreter, name) for name in names):
        return  # another version of Triton, with which these tests are slow

    core, replace_all = interpreter.tl.core, interpreter._patch_lang
    semantic = type(interpreter.interpreter_semantic)
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    find_dtype, broadcast = interpreter._get_np_dtype, semantic.broadcast_impl_value
    constant, promote, unwrap = semantic.scalar_constant, semantic.computation_type_impl, core._unwrap_if_constexpr
    wrapped, blocks, dtypes, constants, promoted = (core.constexpr, core.tuple, list, tuple), {}, {}, {}, {}

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

    def make_block_once(self, element, shape):
        key = element.name, *[getattr(size, "value", size) for size in shape]
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = vars(self)
        self.__dict__ = blocks[key]

    def make_tensor_like_others(self, handle, type):
        if "tensor" not in vars(type):
            make_tensor(self, None, type)
            type.tensor = dict(vars(self))  # shape, number of elements and type of each
        vars(self).update(type.tensor, handle=handle, type=type)

    def unwrap_quickly(value):
        if type(value) is core.constexpr:
            return value.value
        return unwrap(value) if isinstance(value, wrapped) else value

    def make_constant_once(self, value, dtype):
        key = type(value), value, dtype.name
        if key not in constants:
            constants[key] = constant(self, value, dtype)
        return constants[key]

    def promote_once(self, left, left_is_scalar, right, right_is_scalar, divides):
        key = left.name, left_is_scalar, right.name, right_is_scalar, divides
        if key not in promoted:
            promoted[key] = promote(self, left, left_is_scalar, right, right_is_scalar, divides)
        return promoted[key]

    def find_dtype_once(dtype):
        if dtype.name not in dtypes:
            dtypes[dtype.name] = find_dtype(dtype)
        return dtypes[dtype.name]

    def broadcast_unequal(self, left, right):
        blocks = left.type.is_block(), right.type.is_block()
        if blocks == (False, False):
            return left, right
        if blocks == (True, True):
            sizes, others = left.type.shape.values, right.type.shape.values
            if sizes == others:
                return left, right
            if len(sizes) == len(others) and all(a == b or 1 in (a, b) for a, b in zip(sizes, others, strict=True)):
                shape = [max(pair) for pair in zip(sizes, others, strict=True)]
                return tuple(self.broadcast_impl_shape(each, shape) for each in (left, right))
        return broadcast(self, left, right)

    interpreter._patch_lang = replace_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.ReduceOps.generic_reduce = reduce_slices
    core.block_type.__init__ = make_block_once
    core.tensor.__init__ = make_tensor_like_others
    core._unwrap_if_constexpr = unwrap_quickly
    semantic.scalar_constant, semantic.computation_type_impl = make_constant_once, promote_once
    interpreter._get_np_dtype = find_dtype_once
    semantic.broadcast_impl_value = broadcast_unequal


if INTERPRETING:
    _hurry()
