"""The loop tells methods how long the run is, and the plan they derive is saved with the run."""

from dataclasses import replace

import pytest
from tiny_task import tiny_recipe

from intbmoe.layer import moe_layers
from intbmoe.tasks import make_task
from intbmoe.train import load, train
from intbmoe.train.build import build
from intbmoe.train.distribution import Ranks


def with_options(recipe, **options):
    return replace(recipe, moe=replace(recipe.moe, options={**recipe.moe.options, **options}))


@pytest.mark.filterwarnings("ignore:MASS can never add")
@pytest.mark.parametrize("epochs", [2.0, 4.0])
def test_the_phases_of_mass_follow_the_number_of_steps(epochs):
    recipe = with_options(tiny_recipe("mass", epochs=epochs), window=None, warmup=None, expansion=0.3)
    built = build(make_task(recipe), Ranks())
    assert built.plan.steps == 5 * epochs
    for _, layer in moe_layers(built.model):
        assert layer.plan.tolist() == [100, 200, int(0.3 * built.plan.steps)]


def test_the_pool_of_dynmoe_is_final_after_its_share():
    recipe = with_options(tiny_recipe("dynmoe"), adaptation=0.4)
    built = build(make_task(recipe), Ranks())
    assert [int(layer.end) for _, layer in moe_layers(built.model)] == [4, 4]


def test_a_finished_run_has_dropped_its_windows_and_loads(tmp_path):
    run = train(with_options(tiny_recipe("mass"), expansion=0.5), tmp_path, quiet=True)
    layers = [layer for _, layer in moe_layers(load(run))]
    assert [layer.plan.tolist() for layer in layers] == [[1, 3, 5]] * 2
    assert [layer.norms.shape[1] for layer in layers] == [0, 0]
    assert any(int(layer.active.sum()) > layer.config.start for layer in layers)  # it has grown
