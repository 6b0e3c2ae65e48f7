from dataclasses import fields, replace

import pytest
import torch

from intbmoe import list_methods
from intbmoe.budget import NAMED
from intbmoe.layer import moe_layers
from intbmoe.recipes import check_options, load_recipe
from intbmoe.recipes.sets import SETS, TABLE_1, find_variants
from intbmoe.tasks import make_task
from intbmoe.tasks.recipe import MoESettings


@pytest.fixture(scope="module")
def recipe():
    """ImageNet's proportions (blocks d → 4d → d) on a small model."""
    recipe = load_recipe("digits")
    return replace(recipe, model=replace(recipe.model, dim=24, hidden=96, heads=2), moe=MoESettings("intbmoe", 16))


def config_of(recipe, variant):
    """The layer's actual configuration, after the budget."""
    model = make_task(replace(recipe, moe=variant.moe)).make_model()
    return next(layer.config for _, layer in moe_layers(model))


def test_the_methods_are_the_papers_table(recipe):
    variants = find_variants(recipe, "all")
    assert [variant.moe.name for variant in variants] == list(TABLE_1)
    assert len(TABLE_1) == 14
    assert [variant.label for variant in variants] == list(TABLE_1)


def test_everything_adds_the_methods_that_the_paper_only_names(recipe):
    names = [variant.moe.name for variant in find_variants(recipe, "everything")]
    assert names == [*TABLE_1, *NAMED]
    assert {*names, "soft_causal", "smear_token", "swiglu"} >= set(list_methods())


def test_no_set_is_listed_twice():
    summaries = [found.summary for found in SETS.values()]
    assert len(set(summaries)) == len(summaries)


def test_ablations_are_those_of_the_configuration(recipe):
    full, *ablations = find_variants(recipe, "ablations")
    config = config_of(recipe, full)
    expected = config.ablations()
    assert full.moe == recipe.moe
    assert [variant.label for variant in ablations] == [f"intbmoe-{name}" for name in expected]
    for variant in ablations:
        assert config_of(recipe, variant) == expected[variant.label.removeprefix("intbmoe-")], variant


def test_one_layer_has_the_enlarged_pool_and_the_shared_expert_it_had(recipe):
    full, one_layer, *_ = find_variants(recipe, "ablations")
    config, changed = config_of(recipe, full), config_of(recipe, one_layer)
    assert changed.hidden == ()
    assert changed.experts == 16 * 8, "8 d² weights in d → 4d → d, d² in a single layer"
    assert changed.shared_width == config.shared_width == 64
    pools = config.experts * config.expert_weights
    assert changed.experts * changed.expert_weights == pools


@pytest.mark.parametrize(
    ("name", "field", "values"),
    [("K", "blocks", [1, 2, 4, 8, 16, 32]), ("k", "top_k", [1, 2, 4, 8]), ("E", "experts", [1, 2, 4, 8, 16, 32, 64])],
)
def test_the_grid_changes_one_thing_at_a_time(recipe, name, field, values):
    variants = find_variants(recipe, name)
    configs = [config_of(recipe, variant) for variant in variants]
    assert [getattr(config, field) for config in configs] == values
    default = config_of(recipe, find_variants(recipe, "intbmoe")[0])
    for variant, config in zip(variants, configs, strict=True):
        changed = {f.name for f in fields(config) if getattr(config, f.name) != getattr(default, f.name)}
        allowed = {field, "top_k"} if config.blocks == 1 else {field}
        assert changed <= allowed
        assert (variant.label == "intbmoe") == (not changed), "the default is the plain run"
        assert config.top_k == (min(2, config.blocks) if name != "k" else config.top_k)


def test_depth_keeps_an_experts_weights(recipe):
    configs = [config_of(recipe, variant) for variant in find_variants(recipe, "L")]
    assert [len(config.hidden) + 1 for config in configs] == [1, 2, 3, 4]
    assert configs[2].hidden == (48, 48), "d → 2d → 2d → d"
    pools = [config.experts * config.expert_weights for config in configs]
    assert pools[:3] == [pools[1]] * 3
    d, w = 24, configs[3].hidden[0]
    half_a_unit = 16 * (2 * d + 4 * w) / 2  # how far rounding the width moves 2·d·w + 2·w²
    assert pools[3] == pytest.approx(pools[1], abs=half_a_unit)
    assert {config.shared_width for config in configs} == {64}


def test_the_choice_of_k_ends_at_the_number_of_blocks(recipe):
    four = replace(recipe, moe=MoESettings("intbmoe", 16, {"blocks": 4}))
    assert [config_of(four, variant).top_k for variant in find_variants(four, "k")] == [1, 2, 4]


@pytest.mark.parametrize(("name", "method"), [("digits", "dense"), ("stdlib", "swiglu")])
def test_in_its_place_dense_has_the_backbones_kind_and_width_where_mixtures_stand(name, method):
    recipe = load_recipe(name)
    dense, placed = find_variants(recipe, "place")
    assert (placed.moe.name, placed.moe.options) == (method, {"hidden": recipe.model.hidden})
    mixture = find_variants(recipe, "vmoe")[0]
    assert layers_of(replace(recipe, moe=dense.moe)) == []
    assert layers_of(replace(recipe, moe=placed.moe)) == layers_of(replace(recipe, moe=mixture.moe)) != []


def layers_of(recipe):
    return [name for name, _ in moe_layers(make_task(recipe).make_model())]


@pytest.mark.parametrize("name", ["journeys", "foursquare"])
def test_where_dense_stands_as_a_mixture_does_it_is_alone(name):
    recipe = load_recipe(name)
    (dense,) = find_variants(recipe, "place")
    states = []
    for options in ({}, {"hidden": recipe.model.hidden}):
        torch.manual_seed(0)
        states.append(make_task(replace(recipe, moe=replace(dense.moe, options=options))).make_model().state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_labels_are_distinct_also_where_case_does_not_count(recipe):
    variants = find_variants(recipe, ",".join(SETS))
    labels = [variant.label.lower() for variant in variants]
    assert len(set(labels)) == len(labels)
    assert len({variant.title for variant in variants}) == len(variants)
    for variant in variants:
        assert check_options(variant.moe.name, variant.moe.options) == variant.moe.options


def test_the_recipes_options_belong_to_its_own_method(recipe):
    own = replace(recipe, moe=MoESettings("intbmoe", 4, {"blocks": 4}))
    switch, intbmoe = find_variants(own, "switch, intbmoe")
    assert switch.moe == MoESettings("switch", 4)
    assert intbmoe.moe == MoESettings("intbmoe", 4, {"blocks": 4})
    assert config_of(own, find_variants(own, "ablations")[1]).blocks == 4


def test_a_misspelt_name_is_an_error_with_a_suggestion(recipe):
    with pytest.raises(KeyError, match="no method and no set is called 'ablation': did you mean 'ablations'"):
        find_variants(recipe, "dense,ablation")
    with pytest.raises(KeyError, match="no method was named"):
        find_variants(recipe, " , ")
