"""8-bit weights: what is stored, what is kept, the outputs, and that nothing is silently left out."""

import copy

import pytest
import torch
from torch import nn

import intbmoe
from intbmoe.parts.quantized import Quantized
from intbmoe.precomposition import precompose
from intbmoe.quantization import EMBEDDING, OTHER, ROUTING, SHARED, SMALL, quantize
from small_intbmoe import make, switches, tokens

STORAGES = ("int8", "fp8")
LARGEST_ERROR = {"int8": 0.5 / 127, "fp8": 2**-4}  # of a column's largest weight; of the weight itself


def written_out(layer, storage):
    """``layer`` with the same rounded weights, stored in full."""
    twin = copy.deepcopy(layer)
    rounding = Quantized(storage)
    for weight in (*twin.block_weights, *([] if twin.token_filter is None else [twin.token_filter])):
        weight.copy_(rounding(*rounding.right_inverse(weight)))
    for linear in [] if twin.shared is None else twin.shared.modules():
        if hasattr(linear, "weight"):
            linear.weight.copy_(rounding(*rounding.right_inverse(linear.weight)))
    return twin


@switches
@pytest.mark.parametrize("storage", STORAGES)
def test_a_layer_computes_with_the_rounded_weights(options, storage):
    layer = make(**options).eval().precompose()
    expected, x = written_out(layer, storage), tokens(3, 9)
    quantize(layer, storage)
    assert layer.block_weights.parametrizations["0"].original0.element_size() == 1
    assert layer.weight_dtype == torch.float64
    for backend in ("naive", "tiled", None):
        layer.backend = expected.backend = backend
        torch.testing.assert_close(layer(x), expected(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_off_by_no_more_than_half_a_step(storage, dtype):
    torch.manual_seed(0)
    weight = torch.randn(5, 64, 7).to(dtype)
    rounding = Quantized(storage)
    numbers, scales = rounding.right_inverse(weight)
    assert numbers.element_size() == 1
    assert scales.shape == (5, 1, 7)
    back = numbers.view(torch.float8_e4m3fn).double() if storage == "fp8" else numbers.double()
    back, exact = back * scales.double(), weight.double()
    largest = exact.abs().amax(1, keepdim=True)
    size = largest if storage == "int8" else exact.abs().clamp(min=largest * 2**-6 / 448)  # below: no full mantissa
    slack = 1 + 4 * torch.finfo(dtype).eps
    assert ((back - exact).abs() <= slack * LARGEST_ERROR[storage] * size).all()
    assert torch.equal(rounding(numbers, scales), back.to(dtype))


def test_columns_of_zeros_stay_zeros():
    weight = torch.zeros(2, 8, 3)
    weight[0, :, 1] = torch.arange(8.0)
    for storage in STORAGES:
        rounding = Quantized(storage)
        back = rounding(*rounding.right_inverse(weight))
        assert back.isfinite().all()
        assert (back[weight.amax(1, keepdim=True).expand_as(back) == 0] == 0).all()


def language_model(name="intbmoe", **options):
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(50, 32),
            "mlp": intbmoe.create(name, 32, 48, **options),
            "norm": nn.LayerNorm(32),
            "patches": nn.Conv1d(32, 32, 3),
            "gate": nn.Linear(32, 1),
            "head": nn.Linear(32, 50, bias=False),
        }
    ).eval()


@pytest.mark.parametrize("storage", STORAGES)
def test_everything_is_either_quantised_or_named_with_a_reason(storage):
    model = precompose(language_model())
    model.head.weight = model.embed.weight
    before = {name: tensor.nbytes for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    router = copy.deepcopy(model.mlp.router.state_dict())
    report = quantize(model, storage)
    assert report.quantized.keys() | report.kept.keys() == before.keys()
    assert not report.quantized.keys() & report.kept.keys()
    assert {
        "mlp.block_weights.0",
        "mlp.block_weights.1",
        "mlp.token_filter",
        "mlp.shared.up.weight",
        "gate.weight",
    } < set(report.quantized)
    reasons = {name: reason for name, (reason, _) in report.kept.items()}
    assert {reasons[name] for name in reasons if "router" in name} == {ROUTING}
    assert reasons["embed.weight"] == EMBEDDING
    assert reasons["patches.weight"] == OTHER
    assert reasons["norm.weight"] == SMALL
    for name, tensor in model.mlp.router.state_dict().items():
        assert torch.equal(tensor, router[name])
    assert report.bytes_before == sum(before.values())
    assert report.bytes_after == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert "embedding, or tied to one (embed.weight)" in str(report)


@pytest.mark.parametrize("name", sorted(set(intbmoe.list_methods()) - {"intbmoe"}))
def test_other_methods_run_quantised_and_route_alike(name):
    experts = {} if name in ("dense", "swiglu") else {"experts": 8 if name == "deepseek_v1" else 4}
    model = language_model(name, **experts)
    x, exact = torch.randn(2, 8, 32), copy.deepcopy(model)
    report = quantize(model)
    with torch.no_grad(), intbmoe.record_routing(model) as log, intbmoe.record_routing(exact) as exact_log:
        y, expected = model.mlp(x), exact.mlp(x)
    assert (y - expected).norm() <= 4 / 127 * expected.norm()
    assert all(log[key].ids is None or torch.equal(log[key].ids, exact_log[key].ids) for key in log)
    if hasattr(model.mlp, "experts") and "experts.up.weight" in dict(exact.mlp.named_parameters()):
        assert "mlp.experts.up.weight" in report.quantized


def test_the_blocks_take_a_quarter_of_the_memory():
    layer = intbmoe.IntBMoE(256, 512, experts=2, blocks=4).eval().precompose()
    report = quantize(layer)
    assert report.bytes_after < 0.27 * report.bytes_before


def test_a_weight_of_several_owners_is_kept_and_stays_shared():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    report = quantize(model)
    assert report.kept["0.weight"][0] == SHARED
    assert model[2].weight is model[0].weight
    assert list(report.quantized) == ["1.weight"]


@pytest.mark.parametrize("storage", STORAGES)
def test_casting_moving_copying_and_saving_keep_the_storage(storage):
    model = precompose(language_model())
    quantize(model, storage)
    x = torch.randn(2, 5, 32)
    twin = copy.deepcopy(model)
    assert torch.equal(twin.mlp(x), model.mlp(x))
    other = precompose(language_model())
    quantize(other, storage)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.mlp(x), model.mlp(x))
    half = twin.bfloat16()
    stored = half.mlp.block_weights.parametrizations["0"].original0
    assert stored.element_size() == 1
    assert half.mlp(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("storage", STORAGES)
def test_it_compiles_and_exports_with_8_bit_weights(storage):
    layer = intbmoe.IntBMoE(32, 48, experts=4).eval().precompose()
    quantize(layer, storage)
    x = torch.randn(2, 5, 32)
    program = torch.export.export(layer, (x,))
    stored = [tensor for name, tensor in program.state_dict.items() if name.endswith("original0")]
    assert len(stored) == 6
    assert all(tensor.element_size() == 1 for tensor in stored)
    torch.testing.assert_close(program.module()(x), layer(x))
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), layer(x))


def test_what_cannot_be_quantised_says_why():
    with pytest.raises(ValueError, match=r"mlp composes blocks at every call: use quantize\(precompose"):
        quantize(language_model())
    model = precompose(language_model())
    with pytest.raises(ValueError, match="storage='int4' is not allowed: storage must be one of int8, fp8"):
        quantize(model, "int4")
    model.head.weight.data[3, 3] = float("nan")
    with pytest.raises(ValueError, match=r"head\.weight holds values that are not finite"):
        quantize(model)
    assert not any(isinstance(module, Quantized) for module in model.modules())  # nothing was changed
    model.head.weight.data[3, 3] = 0
    quantize(model)
    with pytest.raises(ValueError, match="is already quantised"):
        quantize(model)
    with pytest.raises(ValueError, match="LayerNorm has no linear map whose weight"):
        quantize(nn.LayerNorm(3))


def test_blocks_of_width_one():
    layer, x = intbmoe.IntBMoE(1, 5).eval().precompose(), torch.randn(3, 1)
    y = layer(x)
    quantize(layer)
    torch.testing.assert_close(layer(x), y, atol=0.1, rtol=0.1)
