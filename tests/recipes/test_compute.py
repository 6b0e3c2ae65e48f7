"""Variants of IntBMoE's compute, counted by running whole batches."""

from dataclasses import replace

import pytest
import torch

from intbmoe.counting import count_flops
from intbmoe.recipes import load_recipe
from intbmoe.recipes.compute import TOLERANCE, training_flops
from intbmoe.recipes.sets import find_variants
from intbmoe.tasks import make_task
from intbmoe.tasks.recipe import MoESettings
from thinned import thinned

RECIPES = {
    "digits": {"dim": 24, "hidden": 96, "heads": 2},
    "stdlib": {"dim": 24, "hidden": 48, "heads": 2},
    "foursquare": {"dim": 16, "hidden": 64, "items": 50, "length": 32},
    "journeys": {"dim": 16, "hidden": 64, "sessions": 6},
}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(name, batch=16):
    recipe = load_recipe(name)
    model = replace(recipe.model, **RECIPES[name])
    train = replace(recipe.train, batch=batch, device_batch=None)
    return replace(recipe, model=model, train=train, moe=replace(recipe.moe, name="intbmoe", experts=6))


def flops_of_a_batch(recipe, moe):
    """FLOPs of the forward of a whole training batch, divided by its size."""
    task = make_task(replace(recipe, moe=moe))
    torch.manual_seed(0)
    model = task.make_model().eval()
    (example,) = task.example_inputs()
    size = recipe.train.batch
    whole = {name: torch.cat([part] * size) for name, part in example.items()} if isinstance(example, dict) else None
    active = moe.options["top_k"] if moe.name == "remoe" else None
    counted = count_flops(model, torch.cat([example] * size) if whole is None else whole, active=active)
    return (counted.executed + counted.formulation) / size


@pytest.mark.parametrize("name", thinned(RECIPES, lambda name: name in ("digits", "journeys")))
def test_every_variant_has_intbmoes_flops(name):
    recipe = small(name)
    intbmoe, *variants = find_variants(recipe, "compute")
    target = flops_of_a_batch(recipe, intbmoe.moe)
    flops = {variant.label: flops_of_a_batch(recipe, variant.moe) for variant in variants}
    expected = ["dense-wide", "swiglu-wide", "vmoe-more", "deepseek-more", "remoe-more"]
    assert list(flops) == ([*expected, "expert_choice-more"] if name == "digits" else expected)
    for label in ("dense-wide", "swiglu-wide"):
        assert flops[label] == pytest.approx(target, rel=TOLERANCE)
    for variant in variants:
        if "top_k" in variant.moe.options:
            k = variant.moe.options["top_k"]
            most = 6 if variant.moe.name == "deepseek" else 7
            for other in {max(1, k - 1), min(most, k + 1)} - {k}:
                beside = replace(variant.moe, options={"top_k": other})
                assert abs(flops[variant.label] - target) <= abs(flops_of_a_batch(recipe, beside) - target)
    assert flops_of_a_batch(recipe, MoESettings("dense")) < 0.6 * target, "else there would be nothing to match"


def test_composition_is_shared_by_the_batch():
    """The cost of a batch is counted from batches of one and two."""
    recipe = small("digits", batch=12)
    task = make_task(recipe)
    model, inputs = task.make_model().eval(), task.example_inputs()
    at_12 = training_flops(model, inputs, 12)
    assert at_12 == pytest.approx(flops_of_a_batch(recipe, recipe.moe), rel=1e-9)
    assert training_flops(model, inputs, 1) > at_12 > training_flops(model, inputs, 10_000)


def test_a_wide_dense_layer_stands_where_the_mixtures_are():
    recipe = small("digits")
    wide = make_task(replace(recipe, moe=MoESettings("dense", 6, {"hidden": 160}))).make_model()
    assert [block.moe is not None for block in wide.blocks] == [True, False, True, False]
    assert wide.blocks[0].moe.config.hidden == 160
