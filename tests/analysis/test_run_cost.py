from dataclasses import replace

import pytest

from intbmoe.analysis import run_cost
from intbmoe.analysis.cost import SWEEP
from intbmoe.analysis.drawing import draw_cost
from intbmoe.analysis.run_cost import measure_run_cost, own_experts
from intbmoe.counting import count
from intbmoe.precomposition import precompose
from intbmoe.recipes import load_recipe
from intbmoe.tasks import make_task

DIM, HIDDEN, LAYERS, BLOCKS, PATHS = 24, 24, 2, 8, 2


def small(**options):
    recipe = load_recipe("digits")
    moe = replace(recipe.moe, experts=3, options={**recipe.moe.options, **options})
    return replace(recipe, model=replace(recipe.model, dim=DIM, hidden=HIDDEN), moe=moe)


@pytest.fixture(scope="module")
def measured():
    return measure_run_cost(small())


def test_a_base_costs_its_composition_and_nothing_precomposed(measured):
    hyper = 16
    base = 2 * DIM * HIDDEN + DIM + HIDDEN  # weights and biases of both internal layers
    rows = {row.experts: row for row in measured.sweep}
    assert sorted(rows) == sorted({*SWEEP, 3})
    per_base = LAYERS * PATHS * 2 * BLOCKS * (base + hyper)
    for row in measured.sweep:
        assert row.flops - rows[1].flops == (row.experts - 1) * per_base
    assert len({(row.flops_precomposed, row.memory_precomposed) for row in measured.sweep}) == 1
    parameters = 4 * LAYERS * (base + PATHS * (hyper + 1))  # float32; the heads of the hypernetwork grow too
    assert rows[128].memory - rows[64].memory >= 64 * parameters
    assert rows[128].memory - rows[64].memory < 66 * parameters


def test_at_its_own_number_it_is_the_run(measured):
    task = make_task(small())
    model = task.make_model().eval()
    own = next(row for row in measured.sweep if row.experts == measured.experts == 3)
    assert own.flops == count(model, task.example_inputs()).flops
    assert own.flops_precomposed == count(precompose(model), task.example_inputs()).flops
    assert (measured.device, own.allocated, measured.too_large) == ("cpu", None, [])


def test_a_literal_option_is_the_recipe_s_number():
    recipe = small(experts=5)
    assert own_experts(recipe) == 5
    assert run_cost._build(recipe, 2).blocks[0].moe.config.experts == 2


def test_what_is_too_large_is_named_not_built(monkeypatch, measured):
    sizes = {experts: run_cost._parameter_bytes(small(), experts) for experts in (3, 4)}
    monkeypatch.setattr(run_cost, "MOST_BYTES", sizes[3])
    found = measure_run_cost(small())
    assert [row.experts for row in found.sweep] == [1, 2, 3]
    assert found.too_large == [4, 8, 16, 32, 64, 128]
    assert found.sweep == measured.sweep[:3]
    (picture,) = draw_cost({**found.__dict__, "sweep": found.rows()})
    assert "E=4, 8, 16, 32, 64, 128" in picture.how


def test_what_a_gpu_allocated_has_a_panel_of_its_own(measured):
    rows = [{**row, "allocated": 2 * row["memory"], "allocated_precomposed": 5} for row in measured.rows()]
    (picture,) = draw_cost({"experts": 3, "device": "cuda", "sweep": rows, "too_large": []})
    assert [axes.get_title("left") for axes in picture.figure.axes][2] == "peak allocated on cuda (MiB)"
    (picture,) = draw_cost({"experts": 3, "device": "cpu", "sweep": measured.rows(), "too_large": []})
    assert len(picture.figure.axes) == 2
