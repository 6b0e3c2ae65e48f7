"""Sorting and its way back: sums over rows equal sums over choices, backwards too, and repeats are exact."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intbmoe.parts.dispatch import combine, dispatch, limit_capacity, spread, to_rows

sizes = st.tuples(st.integers(0, 12), st.integers(1, 4), st.integers(1, 5))


def random_ids(tokens, k, groups, holes=True):
    return torch.randint(-1 if holes else 0, groups, (tokens, k))


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_rows_are_sorted_by_group_and_stable(size):
    tokens, k, groups = size
    ids = random_ids(tokens, k, groups)
    plan = dispatch(ids, groups)
    keys = torch.where(ids < 0, groups, ids).flatten()
    assert torch.equal(plan.group, keys.sort(stable=True).values)
    assert torch.equal(plan.choice, keys.sort(stable=True).indices)
    assert torch.equal(plan.token, plan.choice // k)
    assert torch.equal(plan.choice[plan.inverse.flatten()], torch.arange(tokens * k))
    assert torch.equal(plan.counts, torch.bincount(keys, minlength=groups + 1)[:groups])
    assert torch.equal(plan.offsets, plan.counts.cumsum(0).to(torch.int32))


@settings(max_examples=30, deadline=None)
@given(sizes)
def test_there_and_back_is_the_weighted_sum_over_choices(size):
    tokens, k, groups = size
    ids = random_ids(tokens, k, groups)
    plan = dispatch(ids, groups)
    x, table = torch.randn(tokens, 3, dtype=torch.float64), torch.randn(groups, 3, dtype=torch.float64)
    weights = torch.randn(tokens, k, dtype=torch.float64)
    found = combine(to_rows(x, plan) * spread(table, plan), weights, plan)
    chosen = torch.cat([table, torch.zeros(1, 3, dtype=torch.float64)])[ids]
    torch.testing.assert_close(found, (x.unsqueeze(1) * chosen * weights.unsqueeze(-1)).sum(1))


def test_gradients():
    plan = dispatch(random_ids(5, 2, 3), 3)
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    table = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(10, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: to_rows(x, plan), x)
    assert torch.autograd.gradcheck(lambda table: spread(table, plan), table)
    assert torch.autograd.gradcheck(lambda rows, weights: combine(rows, weights, plan), (rows, weights))


def test_capacity_serves_first_choices_first_and_tokens_in_order():
    ids = torch.tensor([[[0, 1], [0, 1], [0, 1], [1, 0]]])
    assert limit_capacity(ids, 2, 2).tolist() == [[[0, 1], [0, -1], [-1, -1], [1, -1]]]


def test_capacity_by_priority():
    ids = torch.tensor([[[0], [0], [0]]])
    priority = torch.tensor([[0.1, 0.9, 0.9]])
    assert limit_capacity(ids, 1, 1, priority).flatten().tolist() == [-1, 0, -1]
    assert limit_capacity(ids, 1, 2, priority).flatten().tolist() == [-1, 0, 0]


def test_capacity_counts_each_sequence_by_itself_and_no_hole():
    ids = torch.tensor([[[-1], [0]], [[0], [0]]])
    assert limit_capacity(ids, 1, 1).flatten().tolist() == [-1, 0, 0, -1]
