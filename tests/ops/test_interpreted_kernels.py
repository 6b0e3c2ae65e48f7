"""Runs the tests of Triton kernels in its interpreter, all in one process (``tests/interpreter.py``)."""

from pathlib import Path

from interpreter import rerun

TESTS = Path(__file__).parent.parent
FILES = (
    "ops/test_tiles.py",
    "ops/test_pieces.py",
    "ops/test_fused.py",
    "ops/test_fused_weights.py",
    "ops/test_swiglu.py",
    "ops/test_cross_entropy.py",
    "ops/test_expert_rows.py",
    "ops/test_hypernetwork.py",
    "ops/test_grouped_mm_fused.py",
    "ops/test_branches.py",
    "methods/test_fused_layer.py",
)


def test_in_the_interpreter():
    rerun(*(str(TESTS / file) for file in FILES))
