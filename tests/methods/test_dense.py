import pytest
import torch
from torch import nn

import intbmoe


def test_dense_is_torchs_own_ffn():
    layer = intbmoe.create("dense", 6, 10).double()
    reference = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)).double()
    with torch.no_grad():
        for linear, stacked in ((reference[0], layer.experts.up), (reference[2], layer.experts.down)):
            nn.init.normal_(stacked.bias)
            linear.weight.copy_(stacked.weight[0].T)
            linear.bias.copy_(stacked.bias[0])
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), reference(x))
    assert layer.quantities() == (1, 1, 0)


def test_swiglu_is_the_equation():
    layer = intbmoe.create("swiglu", 6, 10).double()
    gate, up, down = (m.weight[0] for m in (layer.experts.gate, layer.experts.up, layer.experts.down))
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), (nn.functional.silu(x @ gate) * (x @ up)) @ down)


def test_a_dense_layer_has_one_expert():
    with pytest.raises(ValueError, match=r"experts=2.*1 in a dense layer"):
        intbmoe.create("dense", 6, 10, experts=2)


def test_std_starts_the_weights_as_a_backbones_ffn_starts():
    layer = intbmoe.create("dense", 64, 256, std=0.02)
    for linear in layer.experts.children():
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert (linear.bias == 0).all()
    with pytest.raises(ValueError, match="std"):
        intbmoe.create("dense", 64, 256, std=-1.0)
