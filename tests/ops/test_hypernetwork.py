"""The hypernetwork's kernel against plain torch (``tests/interpreter.py``)."""

import pytest
import torch

from intbmoe.ops.backend import TRITON
from intbmoe.ops.hypernetwork import MOST_CODES, MOST_CODES_IF_NARROW, _fits, coefficients, naive
from interpreter import on_device

if not TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

SIZES = [  # codes, their width, hidden units, bases
    (8, 32, 16, 8),
    (1, 5, 3, 1),
    (17, 33, 20, 70),
    (MOST_CODES, 32, 20, 100),
    (MOST_CODES + 1, 8, 20, 6),
    (MOST_CODES_IF_NARROW, 32, 16, 1),
    (MOST_CODES_IF_NARROW + 1, 8, 4, 6),
]


def make(size, gate, dtype, device):
    codes, width, hidden, bases = size
    torch.manual_seed(0)
    shapes = [(codes, width), (hidden, width), (hidden,), (hidden,), (hidden,), (bases, hidden), (bases,)]
    shapes += [(bases, hidden), (bases,)] if gate else []
    x, *parameters = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    tensors = [x.to(device, torch.float32), *(parameter.to(device, dtype) for parameter in parameters)]
    return [tensor.requires_grad_() for tensor in tensors]


def run(tensors, backend):
    codes, *rest = tensors
    trunk, norm, value, *gate = zip(rest[::2], rest[1::2], strict=True)
    paths = coefficients(codes, trunk, norm, 1e-5, value, *(gate or [None]), backend)
    found = [path for path in paths if path is not None]
    loss = sum((path * torch.linspace(-1, 1, path.numel()).view(path.shape).to(path)).sum() for path in found)
    return [*found, *torch.autograd.grad(loss, tensors)]


@on_device
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_outputs_and_gradients_are_torchs(size, gate, device):
    tensors = make(size, gate, torch.float32, device)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    for found, expected in zip(run(tensors, "fused"), run(exact, "tiled"), strict=True):
        torch.testing.assert_close(
            found.double(), expected, rtol=1e-5, atol=1e-5 * (1 + expected.detach().abs().max().item())
        )


def test_wide_codes_and_many_units_are_left_to_torch():
    assert _fits(8, 16, 32)
    assert _fits(64, 64, 32)
    assert _fits(16, 16, 512)
    assert not _fits(64, 64, 64)  # more shared memory than an RTX 4090 has
    assert not _fits(8, 16, 1056)  # conditioning of width 1024: more than an H200 has
    assert not _fits(8, 128, 32)


@on_device
def test_half_precision_parameters_get_gradients_of_their_type(device):
    tensors = make(SIZES[0], True, torch.bfloat16, device)
    found, expected = run(tensors, "fused"), run(tensors, "tiled")
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * other.detach().abs().max().item())


@on_device
def test_one_path_alone_can_be_differentiated(device):
    codes, *rest = tensors = make(SIZES[0], True, torch.float32, device)
    maps = list(zip(rest[::2], rest[1::2], strict=True))
    arguments = codes, *maps[:2], 1e-5, *maps[2:]
    found, expected = coefficients(*arguments, "fused"), naive.coefficients(*arguments)
    for path in (0, 1):
        one, other = (
            torch.autograd.grad(each[path].sum(), tensors[:3], retain_graph=True) for each in (found, expected)
        )
        for left, right in zip(one, other, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
