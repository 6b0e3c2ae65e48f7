import math

import pytest
import torch
from layer_task import OneLayer

from intbmoe.analysis.bases import collect_coefficients, mean_cosine
from small_intbmoe import make


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
