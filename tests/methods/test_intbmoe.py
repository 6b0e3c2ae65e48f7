"""IntBMoE: the reference vectors, every switch against finite differences, and properties of the equations."""

import copy
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import intbmoe
from intbmoe import IntBMoE, IntBMoEConfig
from intbmoe.ops.blocks import naive as blocks_naive
from intbmoe.parts.reference import reference_names
from small_intbmoe import SIZES, SWITCHES, make, switches, tokens

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.safetensors"))


def load_golden(path):
    with safe_open(path, "pt") as file:
        sizes = json.loads(file.metadata()["config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    hidden = tuple(sizes.pop("layer_dims")[:-1])
    layer = IntBMoE(sizes.pop("dim"), hidden, **sizes).double()
    layer.load_reference_state_dict({k.removeprefix("param."): v for k, v in tensors.items() if k.startswith("param.")})
    return layer, tensors


@pytest.mark.parametrize("backend", [None, "tiled", "naive"])
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_agrees_with_the_reference_vectors(path, backend):
    layer, golden = load_golden(path)
    layer.backend = backend
    x, mask = golden["x"].requires_grad_(), golden["mask"].bool()
    y = layer(x, mask)
    (y * golden["probe"]).sum().backward()
    torch.testing.assert_close(y, golden["y"], rtol=0, atol=1e-10)
    torch.testing.assert_close(x.grad, golden["grad.x"], rtol=0, atol=1e-10)
    expected = {key.removeprefix("grad."): value for key, value in golden.items() if key.startswith("grad.")}
    expected.pop("x")
    names = reference_names(layer)
    found = {names[name][0]: parameter.grad for name, parameter in layer.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(layer.precompose()(x, mask), golden["y"], rtol=0, atol=1e-10)


def test_all_three_reference_files_are_here():
    assert len(GOLDEN) == 3


@switches
def test_gradcheck(options):
    layer = make(**options)
    x, mask = tokens(1, 3).requires_grad_(), torch.tensor([[True, True, False]])
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x, mask))

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


def test_gradcheck_of_every_single_entry():
    """The slow, entry-by-entry check, once, on the default switches."""
    layer = IntBMoE(3, 4, experts=2, blocks=3, top_k=2, code_dim=2, router_dim=2, hyper_dim=3).double()
    x = torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *parameters))


@switches
def test_fast_forms_are_the_specification(options):
    """Outputs and all gradients; the grouped backend in float32 within its rounding of the float64 loop."""
    x, mask = tokens(3, 7), torch.rand(3, 7) > 0.3
    probe = tokens(3, 7, seed=5)
    results = {}
    for backend, dtype in (("naive", torch.float64), ("tiled", torch.float64), ("grouped", torch.float32)):
        layer = make(**options).to(dtype)
        layer.backend = backend
        inputs = x.to(dtype, copy=True).requires_grad_()
        y = layer(inputs, mask)
        (y * probe.to(dtype)).sum().backward()
        results[backend] = [y, inputs.grad, *(parameter.grad for parameter in layer.parameters())]
    torch.testing.assert_close(results["tiled"], results["naive"], rtol=1e-10, atol=1e-12)
    for found, exact in zip(results["grouped"], results["naive"], strict=True):
        assert (found.double() - exact).norm() <= 1e-4 * (1 + exact.norm())


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(6)), st.sampled_from(list(SWITCHES)))
def test_permuting_tokens_permutes_outputs(order, switch):
    layer, x = make(**SWITCHES[switch]), tokens(1, 6)
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order], rtol=0, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.sampled_from(list(SWITCHES)))
def test_masking_is_leaving_out(valid, switch):
    layer, x, mask = make(**SWITCHES[switch]), tokens(1, len(valid)), torch.tensor([valid])
    torch.testing.assert_close(layer(x, mask)[mask], layer(x[mask].unsqueeze(0))[0], rtol=0, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(0, 10**6))
def test_a_token_does_not_depend_on_its_batch(neighbours, seed):
    layer, x = make(), tokens(1, 1)
    crowd = torch.cat([x, 3 * tokens(1, neighbours, seed=seed)], dim=1)
    with intbmoe.record_routing(layer) as log:
        alone, together = layer(x), layer(crowd)
    torch.testing.assert_close(together[:, :1], alone, rtol=0, atol=1e-12)
    assert torch.equal(log[""].ids[0], log[""].ids[1])


def test_ties_go_to_the_lower_block():
    layer = make()
    with torch.no_grad():
        layer.router.scores.weight.zero_()
        layer.router.scores.bias.copy_(torch.tensor([0.0, 1.0, 1.0, 1.0]))
    with intbmoe.record_routing(layer) as log:
        layer(tokens(1, 5))
    assert log[""].ids.tolist() == [[1, 2]] * 5


def test_choosing_all_blocks_is_the_dense_mixture():
    layer, x = make(top_k=4), tokens(1, 6)
    blocks = layer.blocks(torch.float64, "tiled")
    probabilities = layer.router(x[0]).softmax(-1)
    mixture = sum(probabilities[:, b : b + 1] * blocks_naive.run_block(x[0], blocks, b) for b in range(4))
    torch.testing.assert_close(layer(x)[0], mixture + layer.shared(x[0]), rtol=0, atol=1e-12)


def test_weights_are_the_softmax_over_all_blocks_not_renormalised():
    layer = make()
    x = tokens(1, 5)
    with intbmoe.record_routing(layer) as log:
        layer(x)
    expected = layer.router(x[0]).softmax(-1).gather(1, log[""].ids)
    torch.testing.assert_close(log[""].weights, expected)
    assert (log[""].weights.sum(1) < 1).all()


def test_all_tokens_in_one_block():
    layer = make(top_k=1)
    with torch.no_grad():
        layer.router.scores.bias[2] += 100
    x = tokens(2, 5)
    with intbmoe.record_routing(layer) as log:
        y = layer(x)
    assert log[""].load_statistics().counts == (0, 0, 10, 0)
    y.sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("backend", ["grouped", "tiled"])
def test_two_runs_are_bit_identical(backend):
    runs = []
    for _ in range(2):
        layer = make().float()
        layer.backend = backend
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        for step in range(3):
            optimizer.zero_grad()
            layer(tokens(4, 9, seed=step).float()).square().mean().backward()
            optimizer.step()
        runs.append(layer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(runs[0].values(), runs[1].values(), strict=True))


def test_bf16_autocast_within_a_bound_from_the_type():
    """Two GEMMs, each with inputs and output rounded to 8 bits (2⁻⁹ relative each, half an ulp): 6 roundings of the
    routed path and the two norms keep their size, so 8·2⁻⁹ = 2⁻⁶ of the output's norm bounds the error generously
    but would not hide a quantity computed in the wrong type, such as routing (which must not change at all)."""
    layer, x = make(hidden=64).float(), tokens(8, 32).float()
    with intbmoe.record_routing(layer) as log:
        exact = layer(x)
    with intbmoe.record_routing(layer) as rounded_log, torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = layer(x)
    assert torch.equal(log[""].ids, rounded_log[""].ids)
    assert torch.equal(log[""].weights, rounded_log[""].weights)
    assert 0 < (rounded - exact).norm() <= 2**-6 * exact.norm()


def test_safetensors_round_trip_is_exact(tmp_path):
    layer, other = make().float(), make(seed=7).float()
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    x = tokens(2, 5).float()
    assert torch.equal(layer(x), other(x))


def test_parameters_of_the_imagenet_configuration():
    layer = IntBMoE(192, 768, experts=16)
    assert sum(parameter.numel() for parameter in layer.parameters()) == 5_088_793
    assert layer.active_parameters() == 5_088_793
    assert layer.quantities() == (16, 2, 8)
    assert layer.config.shared_width == 512


def test_initial_values():
    layer = IntBMoE(64, 256, experts=8, residual_scale=0.0)
    assert layer.scale.item() == 0
    assert (layer.pools[0].bias == 0).all()
    assert layer.pools[0].weight.abs().max() <= 1 / 8
    assert layer.pools[1].weight.abs().max() <= 1 / 16
    assert 0.8 < layer.codebook.std() < 1.2


def test_six_ablations():
    config = IntBMoEConfig(192, 768)
    ablations = config.ablations()
    assert list(ablations) == ["one_layer", "fixed_scale", "no_gate", "no_shared", "no_filter", "softmax"]
    one_layer = ablations["one_layer"]
    assert one_layer.experts * one_layer.expert_weights == config.experts * config.expert_weights
    assert one_layer.shared_width == config.shared_width == 512
    for ablation in ablations.values():
        y = IntBMoE(ablation)(torch.randn(1, 3, 192))
        assert y.isfinite().all()
    fixed = IntBMoE(ablations["fixed_scale"])
    assert "scale" not in dict(fixed.named_parameters())
    assert fixed.scale.item() == 1


def test_softmax_coefficients_are_convex_and_linear_ones_are_scaled():
    softmax = make(coefficients="softmax").coefficients()
    assert len(softmax) == 2
    for recipe in softmax:
        torch.testing.assert_close(recipe.sum(-1), torch.ones(4, dtype=torch.float64))
        assert (recipe > 0).all()
    linear, unscaled = make(experts=4), make(experts=4)
    heads = unscaled.hypernetwork
    trunk = heads.norm(heads.trunk(unscaled.codebook)).relu()
    torch.testing.assert_close(linear.coefficients()[0], heads.value(trunk) / 2)
    torch.testing.assert_close(linear.coefficients()[1], heads.gate(trunk) / 2)


def test_from_config_equals_from_arguments():
    config = IntBMoEConfig(8, 12, **SIZES)
    torch.manual_seed(0)
    first = IntBMoE(config)
    torch.manual_seed(0)
    second = IntBMoE(8, 12, **SIZES)
    assert first.config == second.config
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    with pytest.raises(AttributeError):
        config.experts = 4


def test_works_on_the_meta_device():
    with torch.device("meta"):
        layer = IntBMoE(192, 768)
        assert layer(torch.empty(2, 5, 192)).shape == (2, 5, 192)


def test_inputs_may_be_strided_views():
    layer, x = make(), tokens(5, 4)
    torch.testing.assert_close(layer(x.transpose(0, 1)), layer(x.transpose(0, 1).contiguous()), rtol=0, atol=0)


BAD = [
    ({"top_k": 5}, r"top_k=5.*at most blocks \(4\)"),
    ({"top_k": 0}, "top_k=0"),
    ({"experts": 0}, "experts=0.*at least 1"),
    ({"experts": 2.5}, "experts=2.5"),
    ({"blocks": -1}, "blocks=-1"),
    ({"hidden": 0}, "hidden=0"),
    ({"hidden": (4, -2)}, r"hidden=\(4, -2\)"),
    ({"hidden": None}, "hidden=None.*tuple"),
    ({"shared_hidden": 0}, "shared_hidden=0"),
    ({"code_dim": 0}, "code_dim=0"),
    ({"residual_scale": float("nan")}, "residual_scale=nan.*finite"),
    ({"residual_scale": float("inf")}, "residual_scale=inf"),
    ({"gate": 1}, "gate=1.*True or False"),
    ({"coefficients": "tanh"}, "coefficients='tanh'.*'linear' or 'softmax'"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda value: str(value))
def test_bad_configurations_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        IntBMoE(8, **{"hidden": 12, **SIZES, **options})


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="backend='fast'"):
        make().backend = "fast"


def test_reference_state_round_trip_and_strictness():
    layer, other = make(), make(seed=9)
    state = layer.to_reference_state_dict()
    assert (state["layer_norms.1.weight"] == 1).all()
    assert (state["layer_norms.1.bias"] == 0).all()
    assert other.load_reference_state_dict(state) == ["layer_norms.1.weight", "layer_norms.1.bias"]
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), other.parameters(), strict=True))

    before = copy.deepcopy(other.state_dict())
    broken = {
        "has unknown 'surprise'": {**state, "surprise": torch.zeros(1)},
        "lacks 'composition_alpha'": {k: v for k, v in state.items() if k != "composition_alpha"},
        "composition_alpha.*shape \\(2,\\), expected \\(1,\\)": {**state, "composition_alpha": torch.zeros(2)},
        "layer_norms.1.bias.*shape \\(3,\\)": {**state, "layer_norms.1.bias": torch.zeros(3)},
    }
    for message, bad in broken.items():
        with pytest.raises((KeyError, ValueError), match=message):
            other.load_reference_state_dict(bad)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


@switches
def test_every_switch_has_reference_names(options):
    layer = make(**options)
    state = layer.to_reference_state_dict()
    names, unused = reference_names(layer), layer.load_reference_state_dict(state)
    assert sorted(state) == sorted([*sum(names.values(), ()), *unused])
    assert len(set(sum(names.values(), ()))) >= len(layer.state_dict())
