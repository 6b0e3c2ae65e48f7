import torch

from intbmoe.ops.blocks import naive
from intbmoe.parts.blocks import dprg


def test_fused_is_the_equation_with_gradients():
    vg = torch.randn(6, 10, dtype=torch.float64, requires_grad=True)
    gain = torch.randn(5, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(dprg(vg, gain, scale), naive.dprg(vg[:, :5], vg[:, 5:], gain, scale), rtol=0, atol=1e-13)
    assert torch.autograd.gradcheck(dprg, (vg, gain, scale))


def test_zero_scale_leaves_the_value_path():
    vg = torch.randn(6, 10)
    assert torch.equal(dprg(vg, torch.ones(5), torch.zeros(1)), vg[:, :5])


def test_a_zero_gate_row_is_finite():
    vg = torch.cat([torch.ones(2, 3), torch.zeros(2, 3)], dim=1).requires_grad_()
    out = dprg(vg, torch.ones(3), torch.ones(1))
    out.sum().backward()
    assert torch.equal(out, torch.ones(2, 3))
    assert vg.grad.isfinite().all()
