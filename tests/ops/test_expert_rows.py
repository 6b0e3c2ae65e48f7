"""Kernels between the experts' products against the specification; rows without an expert are never read.

Memory that has not been written holds NaN here, so that reading it shows.
"""

import pytest
import torch

from intbmoe.ops.backend import TRITON
from intbmoe.parts import dispatch, experts
from interpreter import on_device

if not TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from intbmoe.ops.expert_rows import fused, naive
from intbmoe.ops.permute import permute

GROUPS, WIDTH = 3, 21
IDS = {
    "some": [[0, -1, 2], [-1, -1, -1], [2, 1, -1], [-1, 2, -1], [2, -1, -1]],
    "none": [[-1, -1, -1]] * 3,
    "all": [[0, 1, 2]] * 4,
}


@pytest.fixture(autouse=True)
def nan_memory(monkeypatch):
    monkeypatch.setattr(dispatch, "readable", lambda _: False)  # so that all rows are kept, as on a GPU
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.ones(1).new_empty_strided((2, 2), (4, 1)).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def leaves(device, *tensors):
    """Each tensor twice: in float32 on the device, and in float64."""
    quick = [tensor.clone().to(device).requires_grad_() for tensor in tensors]
    return quick, [tensor.double().requires_grad_() for tensor in tensors]


def near(found, expected):
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def rows_near(quick, exact, found, expected):
    """Compare the rows that have an expert, and all their gradients."""
    last = len(expected)
    near(found[:last], expected)
    probe = torch.randn(len(found), found.shape[1])
    probe[last:] = torch.nan  # the gradient of rows that nothing reads
    found.backward(probe.to(found.device))
    expected.backward(probe[:last].double())
    for one, other in zip(quick, exact, strict=True):
        rows = last if one.shape[0] == len(found) else len(one)
        near(one.grad[:rows], other.grad[:rows])


@on_device
@pytest.mark.parametrize("routing", IDS)
def test_rows_of_open_experts(device, routing):
    ids = torch.tensor(IDS[routing])
    plan = permute(ids.to(device), GROUPS, "fused")
    last, token, group = int(plan.ends[-1]), plan.token.cpu(), plan.group.cpu()
    rows = torch.randn(ids.numel(), WIDTH), torch.randn(ids.numel(), WIDTH)
    (x,), (exact,) = leaves(device, torch.randn(len(ids), WIDTH))
    gathered = fused.gather(x, plan.token, plan.inverse, plan.ends)
    rows_near([x], [exact], gathered, naive.gather(exact, token, last))
    for gelu in (True, False):
        quick, wide = leaves(device, rows[0], torch.randn(GROUPS, WIDTH))
        found = fused.activate(*quick, plan.ends, gelu)
        rows_near(quick, wide, found, naive.activate(*wide, group, last, gelu))
    quick, wide = leaves(device, *rows)
    rows_near(quick, wide, fused.gate(*quick, plan.ends), naive.gate(*wide, last))
    (z,), (exact,) = leaves(device, rows[0])
    first, second = fused.twice(z, plan.ends)
    wide = naive.add(exact, 2 * exact, last)
    torch.autograd.backward((first, second), (torch.ones_like(z), 2 * torch.ones_like(z)))
    wide.sum().backward()
    near(z.grad[:last], exact.grad[:last])


@on_device
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("routing", IDS)
def test_experts_of_open_gates(device, kind, routing, monkeypatch):
    made = experts.ExpertsConfig(dim=6, hidden=11, experts=GROUPS, expert=kind).make_experts()
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    quick = experts.ExpertsConfig(dim=6, hidden=11, experts=GROUPS, expert=kind).make_experts()
    quick.load_state_dict(made.state_dict())
    made.double(), quick.to(device)
    ids = torch.tensor(IDS[routing])
    inputs, exact = leaves(device, torch.randn(len(ids), 6), torch.rand(ids.shape))
    used = []
    route = experts.StackedExperts._route_open
    monkeypatch.setattr(experts.StackedExperts, "_route_open", lambda *given: used.append(1) or route(*given))
    y, load = quick.route(inputs[0], ids.to(device), inputs[1])
    assert used == [1]
    expected, counts = made.route(exact[0], ids, exact[1])
    near(y, expected)
    assert torch.equal(load.cpu(), counts)
    probe = torch.randn_like(y)
    y.backward(probe)
    expected.backward(probe.cpu().double())
    for one, other in zip([*inputs, *quick.parameters()], [*exact, *made.parameters()], strict=True):
        near(one.grad, other.grad)
    assert not inputs[1].grad[ids < 0].any()  # a closed gate has no gradient
