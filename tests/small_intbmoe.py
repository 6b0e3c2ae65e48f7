"""Small IntBMoE layers with every switch set, for the tests of the layer and of its precomposed form."""

import pytest
import torch

from intbmoe import IntBMoE

SIZES = {"experts": 3, "blocks": 4, "top_k": 2, "code_dim": 3, "router_dim": 5, "hyper_dim": 4}
SWITCHES = {
    "default": {},
    "one_layer": {"hidden": ()},
    "three_layers": {"hidden": (7, 5)},
    "fixed_scale": {"learn_scale": False},
    "no_gate": {"gate": False},
    "no_shared": {"shared": False},
    "no_filter": {"filter": False},
    "softmax": {"coefficients": "softmax"},
    "one_block": {"blocks": 1, "top_k": 1},
    "all_blocks": {"top_k": 4},
    "one_expert": {"experts": 1},
    "everything_off": {"gate": False, "shared": False, "filter": False, "hidden": ()},
    "linear_hypernetwork": {"hypernetwork": "linear"},
    "gate_layer_norm": {"gate_norm": "layer", "hidden": (7, 5)},
    "gate_without_norm": {"gate_norm": "none"},
    "no_layer_norm": {"layer_norm": False, "hidden": (7, 5)},
    "no_bias": {"bias": False},
    "shared_mlp": {"shared_kind": "mlp"},
    "shared_linear": {"shared_kind": "linear"},
    "three_shared": {"shared_experts": 3},
}
switches = pytest.mark.parametrize("options", SWITCHES.values(), ids=SWITCHES.keys())


def make(seed=1, **options):
    """A small layer in which every parameter differs from its trivial initial value."""
    torch.manual_seed(seed)
    layer = IntBMoE(8, **{"hidden": 12, **SIZES, **options}).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def tokens(*shape, seed=2):
    return torch.randn(*shape, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
