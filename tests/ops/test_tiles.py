"""Sums of programs' partial sums, per group and over all groups (``tests/interpreter.py``)."""

import pytest
import torch

from intbmoe.ops.backend import TRITON
from interpreter import on_device

if not TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from intbmoe.ops import tiles

ROWS = 4


@on_device
@pytest.mark.parametrize("most_narrow", [0, 512], ids=["wide", "narrow"])
@pytest.mark.parametrize(("own", "others"), [(37, 0), (130, 75), (3, 1)])
@pytest.mark.parametrize("sizes", [[1200, 0, 5, 4], [0, 0, 0], [1]], ids=str)
def test_partial_sums_of_each_group_and_of_all(device, sizes, own, others, most_narrow, monkeypatch):
    monkeypatch.setattr(tiles, "MOST_NARROW", most_narrow)
    ends = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    numbers = [-(-size // ROWS) for size in sizes]
    partials = torch.randn(tiles.programs(sum(sizes), len(sizes), ROWS), own + others, device=device)
    partials[sum(numbers) :] = float("nan")  # of programs without rows, which write nothing
    sums, totals = tiles.sum_partials(partials, ends, ROWS, own)
    parts = partials[: sum(numbers)].double().split(numbers)
    expected = torch.stack([part.sum(0) for part in parts])
    torch.testing.assert_close(sums.double(), expected[:, :own], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(totals.double(), expected[:, own:].sum(0), rtol=1e-5, atol=1e-4)


@on_device
@pytest.mark.parametrize("most_narrow", [0, 512])
def test_sums_over_programs(device, most_narrow, monkeypatch):
    monkeypatch.setattr(tiles, "MOST_NARROW", most_narrow)
    partials = torch.randn(600, 3, 11, device=device)
    torch.testing.assert_close(tiles.sum_programs(partials).double(), partials.double().sum(0), rtol=1e-5, atol=1e-4)
