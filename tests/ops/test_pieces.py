"""float32 numbers in three bfloat16 pieces, which add up to them exactly.

The interpreter runs the kernels where there is no GPU (``tests/interpreter.py``).
"""

import pytest
import torch

from intbmoe.ops.backend import TRITON
from interpreter import on_device

if not TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
import triton.language as tl

from intbmoe.ops.pieces import multiply_pieces, multiply_short, split

SIZE = 64


@triton.jit
def _split(x, pieces, size: tl.constexpr):
    place = tl.arange(0, size)
    high, middle, low = split(tl.load(x + place))
    tl.store(pieces + place, high.to(tl.float32))
    tl.store(pieces + size + place, middle.to(tl.float32))
    tl.store(pieces + 2 * size + place, low.to(tl.float32))


@triton.jit
def _products(a, b, short, exact, left, right, both, size: tl.constexpr):
    place = tl.arange(0, size)[:, None] * size + tl.arange(0, size)[None, :]
    x, y, z = tl.load(a + place), tl.load(b + place), tl.load(short + place)
    none = tl.zeros([size, size], dtype=tl.float32)
    tl.store(exact + place, multiply_pieces(split(x), split(y)))
    tl.store(left + place, multiply_short(z, y, none))
    tl.store(right + place, multiply_short(x, z, none))
    tl.store(both + place, multiply_short(z, z, none))


@on_device
@pytest.mark.parametrize("exponent", [-100, -20, 0, 20, 100])
def test_pieces_are_short_and_add_up_exactly(device, exponent):
    x = (torch.randn(SIZE) * 2.0**exponent).to(device)
    x[:4] = torch.tensor([0.0, -0.0, 2.0**exponent, -(2.0**exponent)])
    pieces = torch.full((3, SIZE), float("nan"), device=device)
    _split[1,](x, pieces, size=SIZE)
    assert torch.equal(pieces, pieces.bfloat16().float())
    assert torch.equal(pieces.double().sum(0), x.double())


@on_device
def test_products_are_as_exact_as_in_float32(device):
    a, b = torch.randn(2, SIZE, SIZE, device=device)
    short = torch.randn(SIZE, SIZE, device=device).bfloat16()
    results = torch.full((4, SIZE, SIZE), float("nan"), device=device)
    _products[1,](a, b, short, *results, size=SIZE)
    for found, (x, y) in zip(results, ((a, b), (short, b), (a, short), (short, short)), strict=True):
        wanted = x.double() @ y.double()
        assert (found.double() - wanted).norm() <= 2**-21 * wanted.norm()
