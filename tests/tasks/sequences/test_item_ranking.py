"""Ranks, hit rates and floors, counted by hand."""

import math

import numpy as np
import pytest
import torch
from fake_items import sequences
from hypothesis import given, settings
from hypothesis import strategies as st

from intbmoe.tasks.sequences.ranking import (
    counter_ranks,
    item_floors,
    popularity_places,
    rank_of,
    ranking_gains,
    ranking_metrics,
)


def sums_of(ranks, new):
    return {name: gain.sum() for name, gain in ranking_gains(ranks, new).items()}


def test_ties_count_against_the_target():
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [5.0, 4.0, 4.0, 4.5]])
    assert rank_of(scores, torch.tensor([0, 1, 3, 1])).tolist() == [1, 3, 4, 4]


def test_what_is_not_a_number_never_makes_a_hit():
    nan = math.nan
    scores = torch.tensor([[nan, nan, nan], [nan, 1.0, 2.0], [nan, 3.0, 2.0], [-math.inf, 1.0, 2.0]])
    assert rank_of(scores, torch.tensor([0, 0, 1, 0])).tolist() == [3, 3, 2, 3]


def test_hit_rates_and_gains_by_hand():
    ranks = torch.tensor([1, 2, 5, 10, 11])
    new = torch.tensor([False, True, False, True, True])
    metrics = ranking_metrics(sums_of(ranks, new))
    gains = [1, 1 / math.log2(3), 1 / math.log2(6), 1 / math.log2(11), 0]
    expected = {"HR@1": 0.2, "HR@5": 0.6, "HR@10": 0.8, "NDCG@10": sum(gains) / 5, "share new": 0.6}
    expected |= {"HR@1 new": 0, "HR@5 new": 1 / 3, "HR@10 new": 2 / 3, "NDCG@10 new": (gains[1] + gains[3]) / 3}
    assert metrics == pytest.approx(expected)


def test_sums_add_up_over_batches_and_without_any_new_target_its_metrics_are_0():
    ranks, new = torch.tensor([1, 4, 7, 20]), torch.tensor([False] * 4)
    whole, parts = sums_of(ranks, new), [sums_of(ranks[i : i + 2], new[i : i + 2]) for i in (0, 2)]
    assert {name: float(parts[0][name] + parts[1][name]) for name in whole} == pytest.approx(
        {name: float(value) for name, value in whole.items()}
    )
    metrics = ranking_metrics(whole)
    assert metrics["share new"] == metrics["HR@10 new"] == 0
    with pytest.raises(ValueError, match="no target was evaluated"):
        ranking_metrics(sums_of(ranks[:0], new[:0]))


def test_floors_by_hand():
    # Popularity without the tests: 0 five times, 3 three times, 1 and 2 twice (1 is the lower id), 4 never.
    data = sequences([0, 0, 1, 0, 1], [3, 2, 2, 3, 2], [0, 0, 3, 1, 4])
    floors = item_floors(data)
    assert popularity_places(data, np.array([4, 9, 14])).tolist() == [0, 2, 3, 1, 4]
    # By popularity, the targets 1, 2, 4 have ranks 3, 4, 5.
    assert floors["popularity"]["HR@1"] == 0
    assert floors["popularity"]["HR@5"] == 1
    assert floors["popularity"]["NDCG@10"] == pytest.approx(sum(1 / math.log2(1 + rank) for rank in (3, 4, 5)) / 3)
    # User 0 has 0 three times and 1 once: rank 2. User 1 has 2 and 3 twice, and 3 is more popular: rank 2.
    # User 2 has never visited 4, so it comes last of five: behind 0, 3 and 1, and behind 2 by popularity.
    for name in ("visit counter", "visit counter, popularity"):
        assert floors[name]["HR@1"] == 0
        assert floors[name]["NDCG@10"] == pytest.approx((2 / math.log2(3) + 1 / math.log2(6)) / 3)
        assert floors[name]["share new"] == pytest.approx(1 / 3)
        assert floors[name]["HR@1 new"] == 0
        assert floors[name]["HR@5 new"] == 1


def test_only_popularity_tells_places_never_visited_apart():
    place = np.array([4, 3, 2, 1, 0])
    history = np.array([0, 0, 2])
    assert counter_ranks(history, 0, place) == (1, 1)
    assert counter_ranks(history, 2, place) == (2, 2)
    assert counter_ranks(history, 4, place) == (5, 3)
    assert counter_ranks(history, 1, place) == (5, 5)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_counters_rank_is_that_of_a_full_sorting(data):
    count = data.draw(st.integers(1, 8))
    place = np.array(data.draw(st.permutations(range(count))))
    history = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=12)))
    target = data.draw(st.integers(0, count - 1))
    counts = np.bincount(history, minlength=count)
    order = np.lexsort((place, -counts)).tolist()
    visited, both = counter_ranks(history, target, place)
    assert both == order.index(target) + 1
    assert visited == (both if counts[target] else count)
