import math
from dataclasses import replace

import pytest
import torch
from layer_task import LayerTask, OneLayer, sample_of

from intbmoe import IntBMoE
from intbmoe.analysis.bases import collect_coefficients, mean_cosine, measure_participation, without_base
from small_intbmoe import SWITCHES, make, tokens

SEVERAL = {name: options for name, options in SWITCHES.items() if name != "one_expert"}
several = pytest.mark.parametrize("options", SEVERAL.values(), ids=SEVERAL.keys())


def rebuilt(layer, base):
    """The layer that the E−1 other bases make, parameter by parameter."""
    smaller = IntBMoE(replace(layer.config, experts=layer.config.experts - 1)).double()
    kept = [index for index in range(layer.config.experts) if index != base]
    bases = ("pools.", "hypernetwork.value.", "hypernetwork.gate.")
    state = {name: value[kept] if name.startswith(bases) else value for name, value in layer.state_dict().items()}
    smaller.load_state_dict(state)
    return smaller


def zero_base(layer, base):
    """Make the coefficients of a base zero in every block and path."""
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
def test_a_base_with_zero_coefficients_costs_nothing(coefficients):
    """The factor scales all outputs alike, which leaves the largest where it is."""
    layer = zero_base(make(coefficients=coefficients, shared=False), base=1)
    task = LayerTask(tokens(23, 4))
    with torch.no_grad():
        task.examples.arrays["labels"] = layer(tokens(23, 4))[:, 0].argmax(
            -1
        )  # so that the whole layer is always right
    found = measure_participation(OneLayer(layer), sample_of(task))
    assert found.full == 1.0
    assert found.layers[0].drops[1] == 0
    assert found.layers[0].drops[0] > 0, "the others do cost something"


def test_the_effect_of_the_factor_is_told_apart():
    layer = zero_base(make(), base=2)
    found = measure_participation(OneLayer(layer), sample_of(LayerTask(tokens(9, 4), metric="loss")))
    assert found.layers[0].factor_alone == found.layers[0].drops[2] != 0
    softmax = measure_participation(
        OneLayer(make(coefficients="softmax")), sample_of(LayerTask(tokens(9, 4), metric="loss"))
    )
    assert softmax.layers[0].factor_alone == 0


def test_drops_means_and_signs_by_hand():
    layer, x = make(), tokens(9, 4)
    found = measure_participation(OneLayer(layer), sample_of(LayerTask(x, metric="loss")))
    with torch.no_grad():
        full = float(layer(x).square().mean())
        without = [float(rebuilt(layer, base)(x).square().mean()) for base in range(3)]
    assert found.full == pytest.approx(full, abs=1e-12)
    drops = [loss - full for loss in without]  # a higher loss is a worse model
    assert found.layers[0].drops == pytest.approx(drops, abs=1e-12)
    assert found.layers[0].mean == pytest.approx(sum(drops) / 3, abs=1e-12)
    assert found.layers[0].smallest == pytest.approx(min(drops), abs=1e-12)
    assert [row["drop"] for row in found.rows()] == found.layers[0].drops
    task = LayerTask(x, metric="loss")
    task.higher_is_better = True
    turned = measure_participation(OneLayer(layer), sample_of(task))
    assert turned.layers[0].drops == [-drop for drop in found.layers[0].drops]


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
    with pytest.raises(ValueError, match="without its only base"):
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
