"""Every backend of the grouped product against the loop, outputs and gradients, for any group sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intbmoe.ops.grouped_mm import grouped, grouped_mm, naive, tiled


def case(counts, tail, inputs, outputs, dtype):
    rows = sum(counts) + tail
    x = torch.randn(rows, inputs, dtype=dtype)
    weight = torch.randn(len(counts), inputs, outputs, dtype=dtype)
    return x, weight, torch.tensor(counts).cumsum(0).to(torch.int32)


def outputs_and_gradients(function, x, weight, offsets, probe):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = function(x, weight, offsets)
    (out * probe).sum().backward()
    return out.detach(), x.grad, weight.grad


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    tail=st.integers(0, 5),
    inputs=st.integers(1, 9),
    outputs=st.integers(1, 9),
)
def test_tiles_are_the_loop(counts, tail, inputs, outputs):
    x, weight, offsets = case(counts, tail, inputs, outputs, torch.float64)
    probe = torch.randn(x.shape[0], outputs, dtype=torch.float64)
    expected = outputs_and_gradients(naive.grouped_mm, x, weight, offsets, probe)
    torch.testing.assert_close(outputs_and_gradients(tiled.grouped_mm, x, weight, offsets, probe), expected)


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    tail=st.integers(0, 5),
    inputs=st.integers(1, 9),
    outputs=st.integers(1, 9),
)
def test_the_custom_op_is_the_loop_at_any_width_and_zero_after_the_last_group(counts, tail, inputs, outputs):
    x, weight, offsets = case(counts, tail, inputs, outputs, torch.float32)
    probe = torch.randn(x.shape[0], outputs)
    exact = outputs_and_gradients(naive.grouped_mm, x.double(), weight.double(), offsets, probe.double())

    def run(x, weight, offsets):
        return grouped.grouped_mm(x, weight, offsets, False)

    for found, expected in zip(outputs_and_gradients(run, x, weight, offsets, probe), exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert (run(x, weight, offsets)[sum(counts) :] == 0).all()


@pytest.mark.parametrize("counts", [[4, 0, 3], [0, 0, 7], [7, 0, 0]])
def test_bfloat16_within_its_rounding(counts):
    x, weight, offsets = case(counts, 0, 16, 24, torch.bfloat16)
    exact = naive.grouped_mm(x.double(), weight.double(), offsets)
    found = grouped_mm(x, weight, offsets, "grouped", complete=True)
    assert (found.double() - exact).norm() <= 2**-8 * exact.norm()


def test_second_derivatives_of_the_custom_op():
    """Double backward against the tiled backend, which autograd differentiates by itself."""
    x, weight, offsets = case([2, 0, 3], 1, 4, 4, torch.float32)
    results = []
    for backend in ("grouped", "tiled"):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        first = torch.autograd.grad(grouped_mm(a, b, offsets, backend).square().sum(), (a, b), create_graph=True)
        sum(grad.square().sum() for grad in first).backward()
        results.append((a.grad, b.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-3)


def test_the_custom_op_passes_torchs_own_checks():
    x, weight, offsets = case([2, 0, 3], 1, 4, 8, torch.float32)
    torch.library.opcheck(
        torch.ops.intbmoe.grouped_mm.default, (x.requires_grad_(), weight.requires_grad_(), offsets, False)
    )
    rows = torch.randn(6, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.intbmoe.grouped_outer.default, (x, rows, offsets))


def test_an_unknown_backend_is_named():
    x, weight, offsets = case([1], 0, 4, 4, torch.float32)
    with pytest.raises(ValueError, match=r"backend='quick'.*grouped, tiled, naive"):
        grouped_mm(x, weight, offsets, "quick")


def test_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    x, weight, offsets = case([2, 3], 0, 4, 8, torch.float32)
    with FlopCounterMode(display=False) as counter:
        grouped_mm(x.requires_grad_(), weight.requires_grad_(), offsets, "grouped").square().sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 5 * 4 * 8
