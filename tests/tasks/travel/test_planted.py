"""The planted rule: only scenario and cell together give the destination, and the ceiling is the score of the rule."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch

from intbmoe.recipes import load_recipe
from intbmoe.tasks import make_task
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.travel import planted
from intbmoe.tasks.travel.candidates import Candidates, session_keys
from intbmoe.tasks.travel.planted import ceiling_sums, expected_ranking, make_planted, make_rule
from intbmoe.tasks.travel.task import ranking_gains


@pytest.mark.parametrize("cells", [4, 16, 64])
def test_neither_the_scenario_nor_the_cell_alone_tells_the_destination(cells):
    rule = make_rule(cells=cells)
    for row in rule:
        assert np.array_equal(np.sort(row), np.arange(cells))
    for column in rule.T:
        assert np.array_equal(np.bincount(column), np.full(cells, len(rule) // cells))
    assert not np.array_equal(make_rule(seed=1, cells=cells), rule)


def test_as_many_trips_follow_the_rule_as_its_strength_says():
    data, rule = make_planted(0.7, users=500), make_rule()
    (shard,) = data.shards
    hour = shard.time // 3_600_000 % 24 - planted.HOURS[0]
    ruled = rule[hour * planted.WEATHERS + shard.weather - 1, shard.cell - 1]
    followed = data.places.cell[shard.place] - 1 == ruled
    assert followed.mean() == pytest.approx(0.7 + 0.3 / planted.CELLS, abs=0.01)
    assert np.bincount(shard.place, minlength=256).std() < 1.3 * (len(shard.place) / 256) ** 0.5, "no place is popular"
    days = shard.time // 86_400_000
    assert {*((days + 3) % 7).tolist()} == {0}, "all on Mondays"


def test_the_ceiling_is_the_mean_over_all_orders_of_who_knows_the_rule():
    """Computed from every rank that ties can give."""
    data, rule = make_planted(0.6, users=3), make_rule()
    (shard,) = data.shards
    at = np.flatnonzero(shard.time >= data.test_from)
    drawn = Candidates(data.places, near=0).draw(shard.place[at], session_keys(0, 0, 0, at))
    hour = shard.time[at] // 3_600_000 % 24 - planted.HOURS[0]
    ruled = 1 + rule[hour * planted.WEATHERS + shard.weather[at] - 1, shard.cell[at] - 1]
    likely = data.places.cell[drawn] == ruled[:, None]
    expected = dict.fromkeys(("HR@1", "HR@2", "HR@5", "NDCG@2", "NDCG@5"), 0.0)
    for row in likely:
        ranks = [rank for rank, other in enumerate(sorted(row, reverse=True), 1) if other == row[0]]
        for name in expected:
            kind, top = name.split("@")
            gains = [(1 if kind == "HR" else 1 / np.log2(1 + rank)) * (rank <= int(top)) for rank in ranks]
            expected[name] += np.mean(gains)
    found = ceiling_sums(data, rule, "time", near=0)
    assert found.pop("count") == len(at) > 0
    assert found == pytest.approx(expected)
    assert 0 < likely[:, 0].sum() < len(at), "both kinds of trips were counted"


def test_expected_ranks_are_those_of_ties_broken_at_random():
    """Three equal candidates and a better one, in all orders, by the metric that models are measured with."""
    scores = torch.tensor([[0.0, 9.0, 0.0, 0.0]])
    orders = [torch.tensor([order]) * 1e-3 for order in permutations([1.0, 2.0, 3.0, 4.0])]
    sums = [ranking_gains(scores + order, torch.zeros(1, 4, dtype=torch.int32)) for order in orders]
    found = expected_ranking(np.array([1]), np.array([3]))
    assert found == pytest.approx({name: float(np.mean([float(one[name]) for one in sums])) for name in found})
    chance = expected_ranking(np.zeros(1, int), np.array([65]))
    assert chance["HR@5"] == pytest.approx(5 / 65)


def test_the_recipe_has_floors_at_chance_and_a_ceiling_at_its_strength():
    recipe = load_recipe("planted")
    task = make_task(replace(recipe, data=replace(recipe.data, users=300)))
    strength, tests = recipe.data.planted, len(task.split("test"))
    for floor in task.floors().values():
        assert floor["HR@5"] == pytest.approx(5 / 65, abs=4 * (0.08 / tests) ** 0.5)
    (ceiling,) = task.ceilings().values()
    assert ceiling["HR@1"] == pytest.approx(strength, abs=4 * (strength * (1 - strength) / tests) ** 0.5)
    with pytest.raises(DataError, match=r"data\.tasks has how, which planted journeys do not have"):
        make_task(replace(recipe, data=replace(recipe.data, tasks=("where", "how")))).split("train")


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"strength=1\.5 is not allowed"):
        make_planted(1.5)
    with pytest.raises(ValueError, match=r"cells=10 is not allowed.*a divisor of 64"):
        make_rule(cells=10)
    with pytest.raises(ValueError, match=r"planted=-0\.1"):
        replace(load_recipe("planted").data, planted=-0.1)
