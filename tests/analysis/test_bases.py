import math
import statistics
from dataclasses import replace

import pytest
import torch
from layer_task import LayerTask, OneLayer, sample_of

from intbmoe import IntBMoE
from intbmoe.analysis.bases import (
    collect_coefficients,
    count_sure,
    mean_cosine,
    measure_participation,
    paired_rise,
    without_base,
)
from small_intbmoe import SWITCHES, make, tokens

SEVERAL = {name: options for name, options in SWITCHES.items() if name != "one_expert"}
several = pytest.mark.parametrize("options", SEVERAL.values(), ids=SEVERAL.keys())


def rebuilt(layer, base):
    """The layer made of the other E−1 bases, parameter by parameter."""
    smaller = IntBMoE(replace(layer.config, experts=layer.config.experts - 1)).double()
    kept = [index for index in range(layer.config.experts) if index != base]
    bases = ("pools.", "hypernetwork.value.", "hypernetwork.gate.")
    state = {name: value[kept] if name.startswith(bases) else value for name, value in layer.state_dict().items()}
    smaller.load_state_dict(state)
    return smaller


def zero_base(layer, base):
    """Set the coefficients of a base to zero in every block and path."""
    with torch.no_grad():
        for path in (layer.hypernetwork.value, layer.hypernetwork.gate):
            path.weight[base] = 0
            path.bias[base] = 0 if layer.config.coefficients == "linear" else -1e4
    assert all(bool((path[:, base] == 0).all()) for path in layer.coefficients())
    return layer


@several
def test_without_a_base_a_layer_is_that_of_the_others(options):
    layer, x = make(**options), tokens(3, 5)
    for base in range(layer.config.experts):
        with torch.no_grad():
            expected, full = rebuilt(layer, base)(x), layer(x)
            found = without_base(layer, base)(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert (found - full).abs().max() > 1e-6, "a base that does nothing would show nothing"


@pytest.mark.parametrize("coefficients", ["linear", "softmax"])
def test_a_base_with_zero_coefficients_costs_no_accuracy(coefficients):
    """The factor scales all outputs alike, so the largest one stays the largest."""
    layer, x = zero_base(make(coefficients=coefficients, shared=False), base=1), tokens(23, 4)
    task = LayerTask(x)
    with torch.no_grad():
        task.examples.arrays["labels"] = layer(x)[:, 0].argmax(-1)  # so that the full layer is always right
    found = measure_participation(OneLayer(layer), sample_of(task))
    assert found.full == 1.0
    assert found.layers[0].drops[1] == 0
    assert found.layers[0].drops[0] > 0, "the others do cost something"
    if coefficients == "softmax":
        assert found.layers[0].rises[1] == pytest.approx(0, abs=1e-14)
        assert found.hurting + found.helping <= 2, "rounding is not taken for an effect"


def test_the_effect_of_the_factor_is_told_apart():
    layer = zero_base(make(), base=2)
    found = measure_participation(OneLayer(layer), sample_of(LayerTask(tokens(9, 4))))
    assert found.layers[0].factor_alone == found.layers[0].rises[2] != 0
    softmax = measure_participation(OneLayer(make(coefficients="softmax")), sample_of(LayerTask(tokens(9, 4))))
    assert softmax.layers[0].factor_alone == 0


def test_rises_errors_and_drops_by_hand():
    layer, x = make(), tokens(9, 4)
    task = LayerTask(x)
    found = measure_participation(OneLayer(layer), sample_of(task))
    (of_layer,) = found.layers
    with torch.no_grad():
        whole = layer(x)
        without = [rebuilt(layer, base)(x) for base in range(3)]
    differences = [(y.square() - whole.square()).mean((1, 2)).tolist() for y in without]
    assert found.full_loss == pytest.approx(float(whole.square().mean()), abs=1e-12)
    assert of_layer.rises == pytest.approx([statistics.fmean(of) for of in differences], abs=1e-12)
    assert of_layer.errors == pytest.approx([statistics.stdev(of) / 3 for of in differences], abs=1e-12)
    right = [float((y[:, 0].argmax(-1) == task.examples.arrays["labels"]).double().mean()) for y in (whole, *without)]
    assert found.full == pytest.approx(right[0], abs=1e-12)
    assert of_layer.drops == pytest.approx([right[0] - other for other in right[1:]], abs=1e-12)
    assert of_layer.mean == pytest.approx(sum(of_layer.rises) / 3, abs=1e-12)
    assert of_layer.smallest == min(of_layer.rises)
    pairs = list(zip(of_layer.rises, of_layer.errors, strict=True))
    assert found.hurting == sum(rise > 2 * error for rise, error in pairs)
    assert found.helping == sum(rise < -2 * error for rise, error in pairs)
    assert [row["loss_rise"] for row in found.rows()] == of_layer.rises
    assert [row["accuracy_drop_points"] for row in found.rows()] == [100 * drop for drop in of_layer.drops]


def test_the_loss_sees_what_the_accuracy_of_few_examples_cannot():
    """Every loss rises a little and no answer changes: the loss shows a certain rise, the accuracy shows none."""
    noise = torch.rand(143, generator=torch.Generator().manual_seed(0)).double()
    whole = {"count": torch.ones(143), "loss": 3 * noise, "accuracy": torch.ones(143)}
    other = {**whole, "loss": 3 * noise + 0.001 + 0.001 * noise}
    rise, error = paired_rise(whole, other)
    assert rise == pytest.approx(0.001 + 0.001 * float(noise.mean()), abs=1e-12)
    assert rise > 10 * error
    assert rise < float(3 * noise.std()) / 143**0.5, "far below the error of the loss itself: pairing shows it"


def test_examples_of_several_units_are_one_observation_each():
    """Repeating the tokens of an example does not make its mean more certain."""
    units, rises = torch.tensor([1.0, 2.0, 3.0, 2.0]), torch.tensor([0.1, 0.5, 0.2, -0.1]).double()
    whole = {"count": units, "loss": torch.zeros(4).double()}
    rise, error = paired_rise(whole, {"count": units, "loss": units * rises})
    assert rise == pytest.approx(float((units * rises).sum()) / 8, abs=1e-12)
    longer = paired_rise({**whole, "count": 50 * units}, {"count": 50 * units, "loss": 50 * units * rises})
    assert longer == pytest.approx((rise, error), abs=1e-12)
    assert paired_rise({"count": units[:1], "loss": rises[:1]}, {"count": units[:1], "loss": rises[1:2]})[1] is None


def test_sure_rises_are_corrected_for_their_number():
    """With 1,000 examples t is nearly normal: 1.7 standard errors suffice for one claim, but 2.4 not for sixteen."""
    assert count_sure([1.7], [1.0], 1000) == 1
    assert count_sure([1.6], [1.0], 1000) == 0
    assert count_sure([2.4] * 16, [1.0] * 16, 1000) == 0
    assert count_sure([3.0, 2.8, *[0.0] * 14], [1.0] * 16, 1000) == 2, "the second has fifteen others to beat"
    assert count_sure([1.0, 0.0, -9.0], [0.0, 0.0, 1.0], 1000) == 1, "a rise without any error is sure"
    assert count_sure([9.0], [None], 1) == 0


def test_by_chance_alone_hardly_anything_is_sure():
    drawn = torch.randn(200, 16, 30, generator=torch.Generator().manual_seed(3)).double()
    wrong = 0
    for experiment in drawn:
        pairs = [
            paired_rise({"count": torch.ones(30), "loss": torch.zeros(30)}, {"loss": values}) for values in experiment
        ]
        wrong += count_sure(*zip(*pairs, strict=True), 30) > 0
    assert wrong <= 20, "5 % of 200 experiments, and some luck"


def test_the_model_is_left_as_it_was():
    model = OneLayer(make())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hypernetwork, layer = model.moe.hypernetwork, model.moe
    measure_participation(model, sample_of(LayerTask(tokens(4, 4))))
    assert model.moe is layer
    assert layer.hypernetwork is hypernetwork
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match=r"base=3 is not allowed"):
        without_base(layer, 3)
    layer.precompose = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        without_base(layer, 0)
    assert layer.hypernetwork is hypernetwork


def test_nothing_to_remove_is_an_error():
    with pytest.raises(ValueError, match="cannot lose its only base"):
        without_base(make(experts=1), 0)
    with pytest.raises(ValueError, match="only those have bases"):
        measure_participation(OneLayer(torch.nn.Identity()), sample_of(LayerTask(tokens(4, 4))))


def test_a_sample_is_spread_over_the_split_and_each_example_counts_once():
    task = LayerTask(tokens(10, 2))
    task.examples.arrays["labels"] = torch.arange(10)
    sample = sample_of(task, examples=4, batch_size=3)
    assert [batch["labels"].tolist() for batch in sample.batches()] == [[0, 2, 5], [7]]
    assert sample_of(task, examples=99).examples == 10
    with pytest.raises(ValueError, match="examples=0 is not allowed"):
        sample_of(task, examples=0)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1.0, 2.0], [2.0, 4.0]], 1.0),
        ([[1.0, 0.0], [0.0, 3.0]], 0.0),
        ([[1.0, -1.0], [-2.0, 2.0]], -1.0),
        ([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], 1 / 3),  # one of three pairs is alike
        ([[0.0, 0.0], [1.0, 1.0]], 0.0),
    ],
)
def test_cosines_by_hand(rows, expected):
    assert mean_cosine(torch.tensor(rows)) == pytest.approx(expected, abs=1e-15)


def test_a_single_block_has_no_pair():
    assert mean_cosine(torch.ones(1, 3)) is None


def test_blocks_with_the_same_code_have_the_same_coefficients():
    layer = make()
    with torch.no_grad():
        layer.codebook.copy_(layer.codebook[:1].expand_as(layer.codebook))
    value, gate = collect_coefficients(OneLayer(layer)).layers
    assert (value.path, gate.path, value.layer) == ("value", "gate", "moe")
    assert value.mean_cosine == pytest.approx(1, abs=1e-12)
    assert gate.mean_cosine == pytest.approx(1, abs=1e-12)


def test_rows_have_length_one_and_keep_their_direction():
    layer = make()
    found = collect_coefficients(OneLayer(layer))
    for path, recipe in zip(found.layers, layer.coefficients(), strict=True):
        assert torch.equal(torch.tensor(path.coefficients, dtype=torch.float64), recipe)
        for raw, row in zip(path.coefficients, path.normalised, strict=True):
            length = math.hypot(*raw)
            assert row == pytest.approx([value / length for value in raw], abs=1e-15)
    assert len(found.rows()) == 2 * 4 * 3


def test_without_a_gate_there_is_one_path():
    assert [path.path for path in collect_coefficients(OneLayer(make(gate=False))).layers] == ["value"]
