"""Sorting and its inverse: sums over rows equal sums over choices, in backward too, and repeats are exact."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intbmoe.parts.dispatch import combine, dispatch, from_rows, limit_capacity, spread, to_rows

sizes = st.tuples(st.integers(0, 12), st.integers(1, 4), st.integers(1, 5))


def random_ids(tokens, k, groups, holes=True):
    return torch.randint(-1 if holes else 0, groups, (tokens, k))


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_rows_are_sorted_by_group_and_stable(size):
    tokens, k, groups = size
    ids = random_ids(tokens, k, groups)
    plan = dispatch(ids, groups, "tiled")
    keys = ids.flatten()
    order = [i for g in range(groups) for i in range(tokens * k) if keys[i] == g]
    assert plan.choice.tolist() == order
    assert plan.group.tolist() == [int(keys[i]) for i in order]
    assert plan.token.tolist() == [i // k for i in order]
    place = {choice: row for row, choice in enumerate(order)}
    assert plan.inverse.flatten().tolist() == [place.get(i, len(order)) for i in range(tokens * k)]
    assert plan.counts.tolist() == [int((keys == g).sum()) for g in range(groups)]
    assert torch.equal(plan.ends, plan.counts.cumsum(0).to(torch.int32))


@settings(max_examples=30, deadline=None)
@given(sizes)
def test_static_rows_hold_the_same_and_a_tail_of_no_group(size):
    """The plan for a compiled graph or a GPU, whose shapes may not depend on the routing."""
    tokens, k, groups = size
    ids = random_ids(tokens, k, groups)
    trimmed = dispatch(ids, groups, "tiled")
    with mock.patch("torch.compiler.is_compiling", return_value=True):
        static = dispatch(ids, groups, "tiled")
    rows = len(trimmed.group)
    assert static.group.shape == (tokens * k,)
    assert torch.equal(static.group[:rows], trimmed.group)
    assert (static.group[rows:] == groups).all()
    x, table = torch.randn(tokens, 3, dtype=torch.float64), torch.randn(groups, 3, dtype=torch.float64)
    weights = torch.where(ids < 0, 0, torch.randn(tokens, k, dtype=torch.float64))
    results = [combine(to_rows(x, plan) * spread(table, plan), weights, plan) for plan in (trimmed, static)]
    assert torch.equal(*results)
    assert (spread(table, static)[rows:] == 0).all()


@settings(max_examples=30, deadline=None)
@given(sizes)
def test_there_and_back_is_the_weighted_sum_over_choices(size):
    tokens, k, groups = size
    ids = random_ids(tokens, k, groups)
    plan = dispatch(ids, groups, "tiled")
    x, table = torch.randn(tokens, 3, dtype=torch.float64), torch.randn(groups, 3, dtype=torch.float64)
    weights = torch.randn(tokens, k, dtype=torch.float64)
    found = combine(to_rows(x, plan) * spread(table, plan), weights, plan)
    chosen = torch.cat([table, torch.zeros(1, 3, dtype=torch.float64)])[ids]
    torch.testing.assert_close(found, (x.unsqueeze(1) * chosen * weights.unsqueeze(-1)).sum(1))


@pytest.mark.parametrize("static", [False, True])
def test_gradients(static):
    ids = random_ids(5, 2, 3)
    with mock.patch("torch.compiler.is_compiling", return_value=static):
        plan = dispatch(ids, 3, "tiled")
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    table = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(len(plan.token), 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: to_rows(x, plan), x)
    assert torch.autograd.gradcheck(lambda table: spread(table, plan), table)
    assert torch.autograd.gradcheck(lambda rows, weights: combine(rows, weights, plan), (rows, weights))


def test_rows_of_tokens_that_have_one_go_back_to_their_order():
    plan = dispatch(random_ids(7, 1, 3, holes=False), 3, "tiled", complete=True)
    x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(from_rows(to_rows(x, plan), plan), x)
    assert torch.autograd.gradcheck(lambda x: from_rows(x, plan), x)


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
