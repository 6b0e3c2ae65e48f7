"""Triton's kernels that make weights against their specifications in float64, outputs and gradients.

The interpreter runs them where there is no GPU (``tests/interpreter.py``).
"""

import pytest
import torch

from intbmoe.ops.backend import TRITON
from interpreter import on_device
from near import gradients_near, near, pairs

if not TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from intbmoe.ops.compose import fused as compose_fused
from intbmoe.ops.compose import naive as compose_naive
from intbmoe.ops.filter_terms import filter_terms


@on_device
@pytest.mark.parametrize("gate", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize(
    ("blocks", "bases", "inputs", "outputs"),
    [
        (8, 16, 12, 20),
        (8, 5, 7, 11),
        (1, 40, 3, 299),
        (32, 33, 1, 9),
        (50, 70, 3, 41),
        (70, 3, 5, 150),
        (20, 1, 3, 7),
        (13, 9, 3, 40),
        (20, 6, 9, 30),
        (12, 33, 2, 40),
    ],
)
def test_composition(device, gate, blocks, bases, inputs, outputs):
    second = torch.randn(blocks, bases) if gate else None
    given = torch.randn(blocks, bases), second, torch.randn(bases, inputs, outputs), torch.randn(bases, outputs)
    quick, exact = pairs(device, *given)
    paths = [path * 0.3 for path in exact[:2] if path is not None]
    composed, biases = compose_fused.compose(*quick, 0.3, torch.float32)
    expected = [compose_naive.compose(paths, each) for each in exact[2:]]
    near(composed, expected[0])
    near(biases, expected[1])
    assert composed.stride(1) * 4 % 16 == 0
    probes = [torch.randn(each.shape) for each in expected]
    torch.autograd.backward([composed, biases], [probe.to(device) for probe in probes])
    torch.autograd.backward(expected, [probe.double() for probe in probes])
    gradients_near(quick, exact)


@on_device
@pytest.mark.parametrize(
    ("blocks", "bases", "inputs", "outputs"), [(8, 16, 3, 20), (13, 9, 3, 40), (21, 70, 2, 41), (40, 20, 5, 70)]
)
def test_composition_of_large_matrices(device, blocks, bases, inputs, outputs, monkeypatch):
    """Larger tiles, and several for each program."""
    monkeypatch.setattr(compose_fused, "SMALL_MATRIX", 0)
    monkeypatch.setattr(compose_fused, "FEW_WARPS", 0)
    for name in ("FEW_ROWS_BACKWARD_CUT", "ONE_PASS_CUT", "ONE_PASS_MANY_BASES_CUT", "COEFFICIENTS_CUT"):
        monkeypatch.setattr(compose_fused, name, getattr(compose_fused, name)._replace(programs=2))
    test_composition(device, True, blocks, bases, inputs, outputs)
    test_gradients_in_bfloat16(device, blocks, bases, inputs, outputs)


@on_device
@pytest.mark.parametrize(
    ("blocks", "bases", "inputs", "outputs"),
    [(8, 16, 3, 40), (3, 5, 7, 11), (20, 6, 3, 30), (12, 40, 2, 24), (70, 3, 2, 90), (40, 9, 2, 36)],
)
def test_gradients_in_bfloat16(device, blocks, bases, inputs, outputs):
    """They are as exact as in float32, given a gradient in bfloat16."""
    given = [torch.randn(shape) for shape in [(blocks, bases)] * 2 + [(bases, inputs, outputs), (bases, outputs)]]
    quick, exact = pairs(device, *given)
    composed, biases = compose_fused.compose(*quick, 0.3, torch.bfloat16)
    expected = [compose_naive.compose([path * 0.3 for path in exact[:2]], each) for each in exact[2:]]
    assert (composed.cpu().double() - expected[0]).norm() <= 2**-8 * expected[0].norm()
    probes = [torch.randn(expected[0].shape).bfloat16(), torch.randn(expected[1].shape)]
    torch.autograd.backward([composed, biases], [probe.to(device) for probe in probes])
    torch.autograd.backward(expected, [probe.double() for probe in probes])
    gradients_near(quick, exact)


@on_device
def test_the_stride_of_a_single_base_may_be_anything(device):
    pool = torch.randn(6, 1, 5, device=device).transpose(0, 1)
    assert pool.stride(0) != 30
    composed, _ = compose_fused.compose(torch.ones(1, 1, device=device), None, pool, None, 1.0, torch.bfloat16)
    torch.testing.assert_close(composed.float(), pool, rtol=2**-7, atol=0)


@on_device
def test_composition_without_biases(device):
    quick, exact = pairs(device, torch.randn(3, 10), None, torch.randn(10, 2, 5))
    composed, biases = compose_fused.compose(*quick, None, 1.0, torch.float32)
    assert len(biases) == 0
    expected = compose_naive.compose(exact[:1], exact[2])
    near(composed, expected)
    composed.sum().backward()
    expected.sum().backward()
    gradients_near(quick, exact)


@on_device
@pytest.mark.parametrize(("width", "codes", "code"), [(37, 5, 3), (300, 17, 20)])
def test_filter_terms(device, width, codes, code):
    given = torch.randn(width, width + code), torch.randn(width), torch.randn(codes, code)
    quick, exact = pairs(device, *given)
    found = filter_terms(*quick, torch.float32, "fused")
    expected = filter_terms(*exact, torch.float64, "naive")
    probes = [torch.randn(each.shape) for each in expected]
    for a, b in zip(found, expected, strict=True):
        near(a, b)
    torch.autograd.backward(found, [probe.to(device) for probe in probes])
    torch.autograd.backward(expected, [probe.double() for probe in probes])
    gradients_near(quick, exact)
