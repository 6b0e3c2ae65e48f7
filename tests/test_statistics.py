import math

import pytest
import torch

from intbmoe.statistics import load_statistics_of


def test_balance_and_collapse():
    even = load_statistics_of(torch.tensor([5, 5, 5, 5]), tokens=10)
    assert (even.utilisation, even.worst_case, even.entropy, even.dead) == (1, 1, 1, ())
    collapsed = load_statistics_of(torch.tensor([0, 20, 0, 0]), tokens=10)
    assert (collapsed.utilisation, collapsed.worst_case, collapsed.entropy) == (0.25, 4, 0)
    assert collapsed.dead == (0, 2, 3)


def test_halves():
    half = load_statistics_of(torch.tensor([3, 3, 0, 0]), tokens=3, dropped=2)
    assert half.entropy == pytest.approx(math.log(2) / math.log(4))
    assert half.dropped == pytest.approx(2 / 8)


def test_nothing_routed_is_not_a_number_rather_than_a_lie():
    empty = load_statistics_of(torch.zeros(3, dtype=torch.int64), tokens=0)
    assert math.isnan(empty.worst_case)
    assert empty.dead == (0, 1, 2)


def test_everything_can_be_dropped():
    assert load_statistics_of(torch.zeros(3, dtype=torch.int64), tokens=4, dropped=8).dropped == 1
    assert math.isnan(load_statistics_of(torch.zeros(3, dtype=torch.int64), tokens=0).dropped)


def test_closed_slots_are_not_there():
    pool = load_statistics_of(torch.tensor([4, 0, 4, 0]), tokens=8, opened=torch.tensor([True, True, True, False]))
    assert pool.dead == (1,)
    assert pool.utilisation == pytest.approx(2 / 3)
    assert pool.worst_case == pytest.approx(1.5)
    assert pool.counts == (4, 0, 4, 0)


def test_a_slot_closed_within_the_window_was_there():
    pool = load_statistics_of(torch.tensor([10, 10]), tokens=20, opened=torch.tensor([True, False]))
    assert pool.worst_case == 1
