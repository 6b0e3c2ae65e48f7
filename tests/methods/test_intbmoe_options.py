"""IntBMoE's forms that only the authors' released module has: against stored vectors, and in all other uses.

``golden/options/released.safetensors`` was made in float64 with a separate transcription of that module, written from
its source: a small layer for each option, with input, mask, output, parameters under the authors' names, and the
gradients of ``(y * probe).sum()``.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import intbmoe
from intbmoe import ComposedMoE, IntBMoE
from intbmoe.counting import count_flops
from intbmoe.export.parity import LayerError, _compare_blocks
from intbmoe.ops import native
from intbmoe.parts.reference import reference_names
from small_intbmoe import make, tokens

GOLDEN = Path(__file__).parents[1] / "golden" / "options" / "released.safetensors"
with safe_open(GOLDEN, "pt") as file:
    CONFIGS = json.loads(file.metadata()["configs"])
CASES = ("conditioning", "linear_hypernetwork", "gate_layer_norm", "gate_without_norm", "no_bias", "no_layer_norm",
         "shared_mlp", "shared_linear", "two_shared", "everything")  # fmt: skip
without_kernels = pytest.mark.parametrize(
    "options", [{"gate_norm": "layer"}, {"gate_norm": "none"}, {"layer_norm": False}]
)


def load_case(case):
    with safe_open(GOLDEN, "pt") as file:
        keys = [key for key in file.keys() if key.startswith(f"{case}/")]  # noqa: SIM118 (not a dict)
        golden = {key.removeprefix(f"{case}/"): file.get_tensor(key) for key in keys}
    layer = IntBMoE(**CONFIGS[case]).double()
    state = {key.removeprefix("param."): value for key, value in golden.items() if key.startswith("param.")}
    return layer, golden, state, layer.load_reference_state_dict(state)


def test_every_option_has_its_vectors():
    assert set(CONFIGS) == set(CASES)


@pytest.mark.parametrize("backend", [None, "tiled", "naive"])
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_released_module(case, backend):
    layer, golden, _, _ = load_case(case)
    layer.backend = backend
    inputs = {"x": golden["x"].requires_grad_(), "mask": golden["mask"]}
    if "conditioning" in golden:
        inputs["conditioning"] = golden["conditioning"].requires_grad_()
    y = layer(**inputs)
    (y * golden["probe"]).sum().backward()
    torch.testing.assert_close(y, golden["y"], rtol=0, atol=1e-10)
    names = reference_names(layer)
    found = {
        theirs: p.grad for name, p in layer.named_parameters() for theirs in names[name] if f"grad.{theirs}" in golden
    }
    found |= {name: value.grad for name, value in inputs.items() if name != "mask"}
    expected = {key.removeprefix("grad."): value for key, value in golden.items() if key.startswith("grad.")}
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert sum(1 for _ in layer.parameters()) + len(inputs) - 1 == len(expected)
    composed = layer.precompose(conditioning=inputs.get("conditioning"))
    torch.testing.assert_close(composed(golden["x"], golden["mask"]), golden["y"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_reference_states_go_there_and_back(case):
    layer, _, state, unused = load_case(case)
    back = layer.to_reference_state_dict()
    assert sorted(back) == sorted(state)
    assert all(torch.equal(back[key], state[key]) for key in state if key not in unused)
    layer.load_reference_state_dict({key: value for key, value in state.items() if key not in unused})
    missing = next(key for key in state if key not in unused)
    with pytest.raises(KeyError, match=f"lacks '{missing}'"):
        layer.load_reference_state_dict({key: value for key, value in state.items() if key != missing})


def test_what_the_released_module_holds_and_never_uses_is_named():
    assert load_case("no_bias")[3] == [
        "layer_norms.1.weight", "layer_norms.1.bias", "basis_layers.0.bias", "basis_layers.1.bias",
    ]  # fmt: skip
    assert load_case("no_layer_norm")[3] == []


def test_a_linear_hypernetworks_two_names_must_agree():
    layer, _, state, _ = load_case("linear_hypernetwork")
    state["value_basis_projection.bias"] = state["value_basis_projection.bias"] + 1
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=r"value_basis_projection.bias' and 'basis_weight_projection.bias' differ"):
        layer.load_reference_state_dict(state)
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


# ---- conditioning ---------------------------------------------------------------------------------------------------


def vector(seed=4):
    return torch.randn(2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("options", [{}, {"filter": False}, {"hypernetwork": "linear"}, {"coefficients": "softmax"}])
def test_gradcheck_of_conditioning(options):
    layer, x, mask = (
        make(conditioning_dim=2, **options),
        tokens(1, 3).requires_grad_(),
        torch.tensor([[True, True, False]]),
    )
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x, conditioning, *values):
        state = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, state, (x, mask), {"conditioning": conditioning})

    assert torch.autograd.gradcheck(run, (x, vector().requires_grad_(), *parameters), fast_mode=True)


def test_conditioning_is_a_longer_code_of_every_block():
    """The same layer, with the vector written into its codebook, is a layer without conditioning."""
    layer, x = make(conditioning_dim=2), tokens(2, 5)
    longer = make(code_dim=5)
    state = {**layer.state_dict(), "codebook": torch.cat([layer.codebook, vector().expand(4, 2)], dim=1)}
    longer.load_state_dict(state)
    torch.testing.assert_close(layer(x, conditioning=vector()), longer(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.coefficients(vector()), longer.coefficients(), rtol=0, atol=1e-12)
    assert (layer(x, conditioning=vector(5)) - longer(x)).abs().max() > 1e-3


def test_conditioning_works_in_float32_and_under_autocast():
    layer, x = make(conditioning_dim=2, hidden=64).float(), tokens(2, 5).float()
    exact = layer(x, conditioning=vector().float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = layer(x, conditioning=vector().bfloat16().float())
        assert torch.equal(layer(x, conditioning=vector().bfloat16()), rounded)  # such as the output of a linear map
    assert (rounded - exact).norm() <= 2**-5 * exact.norm()
    with torch.no_grad():
        torch.testing.assert_close(layer(x, conditioning=vector().float()), exact)


def test_a_precomposed_layer_has_its_conditioning_inside():
    layer, x = make(conditioning_dim=2).eval(), tokens(2, 5)
    composed = layer.precompose(conditioning=vector())
    assert torch.equal(composed(x), layer(x, conditioning=vector()))
    served = intbmoe.precompose(nn.Sequential(layer), conditioning=vector())
    assert torch.equal(served(x), composed(x))
    with pytest.raises(ValueError, match=r"a precomposed layer takes no conditioning.*precompose again"):
        composed(x, conditioning=vector())
    both = intbmoe.precompose(nn.ModuleList([layer, make()]), conditioning=vector())
    assert all(isinstance(part, ComposedMoE) for part in both)


def test_a_wrong_conditioning_is_named():
    layer, x = make(conditioning_dim=2), tokens(1, 3)
    for call in (lambda: layer(x), layer.precompose, layer.coefficients):
        with pytest.raises(ValueError, match=r"conditioning=None is not allowed.*conditioning_dim=2 numbers"):
            call()
    with pytest.raises(ValueError, match=r"shape \(1, 2\).*one for the whole call"):
        layer(x, conditioning=vector().unsqueeze(0))
    with pytest.raises(ValueError, match=r"shape \(2,\).*None if conditioning_dim is 0"):
        make()(x, conditioning=vector())
    with pytest.raises(TypeError, match="conditioning"):
        intbmoe.create("switch", 8, 12)(x.float(), conditioning=vector())
    with pytest.raises(ValueError, match="conditioning_dim=-1"):
        make(conditioning_dim=-1)


def test_conditioning_compiles_into_one_graph():
    layer, x = make(conditioning_dim=2), tokens(2, 5)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")  # gradients: test_contract.py
    torch.testing.assert_close(compiled(x, conditioning=vector()), layer(x, conditioning=vector()), rtol=0, atol=1e-12)


# ---- backends -------------------------------------------------------------------------------------------------------


@without_kernels
def test_without_compiled_code_another_backend_runs(options):
    layer, x = make(**options).float().eval(), tokens(2, 5).float()
    with torch.no_grad():
        found = layer(x)
    layer.backend = "naive"
    torch.testing.assert_close(found, layer(x))
    layer.backend = "native"
    with pytest.raises(RuntimeError, match=r"'native' has no code for this layer's options.*leave layer.backend None"):
        layer(x)
    assert f"{next(iter(options))}={next(iter(options.values()))}" in repr(layer)


@pytest.mark.skipif(native.LIBRARY is None, reason=f"the compiled library is {native.STATUS}")
@pytest.mark.parametrize(
    "options", [{"bias": False}, {"hypernetwork": "linear"}, {"shared_kind": "mlp"}, {"shared_experts": 3}]
)
def test_compiled_code_runs_what_leaves_the_blocks_as_they_are(options):
    layer, x = make(**options).eval(), tokens(2, 5)
    exact = layer(x)
    layer.backend = "native"
    with torch.no_grad():
        torch.testing.assert_close(layer(x), exact, rtol=0, atol=1e-11)


@pytest.mark.parametrize("options", [{}, {"gate_norm": "layer"}, {"gate_norm": "none"}, {"layer_norm": False}])
def test_an_exports_check_of_single_blocks_runs_the_blocks_as_they_are(options):
    """The compiled code would treat these blocks as the paper's, and the check would reject a half-precision copy."""
    layer = make(hidden=64, **options).float().eval()
    error = LayerError("layer", layer)
    with torch.no_grad():
        _compare_blocks(error, layer, layer.precompose(torch.bfloat16), tokens(1, 40)[0].float(), torch.bfloat16)
    assert max(error.errors()) <= 2**-5


# ---- shared experts -------------------------------------------------------------------------------------------------


def test_widths_of_shared_experts_match_one_experts_weights():
    config = {"experts": 2, "blocks": 2}
    assert IntBMoE(8, 12, **config).config.shared_width == 8  # 3 · 8 · 8 = 2 · 8 · 12
    assert IntBMoE(8, 12, shared_kind="mlp", **config).config.shared_width == 12
    assert IntBMoE(8, 12, shared_kind="mlp", shared_hidden=5, **config).shared.up.weight.shape == (5, 8)


class Own(nn.Module):
    def __init__(self, outputs=8):
        super().__init__()
        self.map, self.norm = nn.Linear(8, outputs), nn.LayerNorm(outputs)

    def forward(self, x):
        return self.norm(self.map(x))


def test_a_shared_expert_of_the_users_own():
    layer, x = make(shared=False), tokens(2, 5)
    own = Own().double()
    without = layer(x)
    layer.shared = own
    torch.testing.assert_close(layer(x), without + own(x), rtol=0, atol=1e-12)
    mask = torch.rand(2, 5) > 0.4
    assert (layer(x, mask)[~mask] == 0).all()
    composed = layer.eval().precompose()
    assert torch.equal(composed(x), layer(x))
    assert composed.shared is not own
    layer(x).sum().backward()
    assert own.map.weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match=r"shared=.*Own.*one of the authors' kinds"):
        layer.to_reference_state_dict()
    layer.shared = Own(7).double()
    with pytest.raises(ValueError, match=r"layer.shared \(Own\) returned shape \(10, 7\) for tokens \(10, 8\)"):
        layer(x)


def test_a_shared_expert_of_the_users_own_under_autocast_and_in_half_precision():
    layer, x = make(shared=False, hidden=64).float().eval(), tokens(2, 5).float()
    layer.shared = Own()
    exact = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (layer(x) - exact).norm() <= 2**-5 * exact.norm()
    half = layer.precompose(torch.bfloat16)
    assert (half(x.bfloat16()).float() - exact).norm() <= 2**-5 * exact.norm()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")  # gradients: test_contract.py
    torch.testing.assert_close(compiled(x), exact)


# ---- what a layer costs ---------------------------------------------------------------------------------------------


def flops(layer, tokens=10, **named):
    return count_flops(layer.float(), torch.randn(1, tokens, 8), **named)


def test_flops_follow_the_options():
    plain, width = flops(make()), make().config.shared_width
    assert plain.executed - flops(make(shared_kind="mlp", shared_hidden=width)).executed == 2 * 10 * 8 * width
    assert plain.executed - flops(make(shared_kind="linear")).executed == 2 * 10 * 8 * (3 * width - 8)
    assert flops(make(shared_experts=3)).executed - plain.executed == 2 * 2 * 10 * 3 * 8 * width
    paths = 2 * 2 * 4 * 3  # both paths' heads: K codes, E bases
    two_layer, linear = 2 * 4 * 3 * 4 + paths * 4, paths * 3
    assert plain.executed - flops(make(hypernetwork="linear")).executed == two_layer - linear
    assert plain.executed - flops(make(bias=False)).executed == 2 * 2 * 4 * 3 * (12 + 8)
    conditioned = flops(make(conditioning_dim=2), conditioning=torch.randn(2))
    assert conditioned.executed - plain.executed == 2 * 4 * 2 * (4 + 8)  # of the trunk and the filter, once per block
    assert conditioned.total() - plain.total() == 2 * 4 * 2 * 4 + 2 * 10 * 2 * 2 * 8  # per chosen block


@pytest.mark.parametrize(
    "options", [{"bias": False}, {"gate_norm": "layer"}, {"shared_experts": 2, "shared_kind": "mlp"}]
)
def test_active_parameters_of_the_precomposed_form_follow_the_options(options):
    composed = make(**options).precompose()
    paths_of_block = 2 * (8 * 12 + 12 * 8)
    block = paths_of_block + (0 if options.get("bias") is False else 2 * (12 + 8)) + 8
    total = sum(parameter.numel() for parameter in composed.parameters())
    assert composed.active_parameters() == total - 2 * block
    loaded = ComposedMoE(composed.config).double()
    loaded.load_state_dict(composed.state_dict())
    assert torch.equal(loaded(tokens(1, 5)), composed(tokens(1, 5)))
