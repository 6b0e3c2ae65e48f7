"""The best n of many are those of a full sort, ties included, in any number of chunks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intbmoe.tasks.serving import ranking
from intbmoe.tasks.serving.ranking import VectorIndex, ends_in_a_tie, top_n


def naive(scores, n):
    values, columns = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :n], columns[:, :n]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 700), st.integers(1, 20), st.integers(1, 40), st.integers(0, 10**6))
def test_the_best_are_those_of_a_full_sort(batch, entries, n, levels, seed):
    """Few score levels give many ties; groups are small so that several are used."""
    n = min(n, entries)
    scores = torch.randint(levels, (batch, entries), generator=torch.Generator().manual_seed(seed)).double()
    scores[scores == 0] = -torch.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "WIDE", 64)
        patch.setattr(ranking, "GROUP", 8)
        values, columns = top_n(scores, n)
    expected_values, expected_columns = naive(scores, n)
    assert torch.equal(values, expected_values)
    real = values > -torch.inf
    assert torch.equal(columns[real], expected_columns[real])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(1, 500), st.integers(1, 12), st.integers(0, 10**6), st.booleans())
def test_a_search_in_stretches_is_one_over_all(batch, entries, n, seed, tied):
    random = np.random.default_rng(seed)
    vectors = torch.from_numpy(random.integers(-2, 3, (entries, 3)) if tied else random.normal(size=(entries, 3)))
    queries = torch.from_numpy(random.integers(-2, 3, (batch, 3)) if tied else random.normal(size=(batch, 3)))
    vectors, queries = vectors.double(), queries.double()
    excluded = [random.choice(entries, random.integers(0, entries + 1), replace=False) for _ in range(batch)]
    scores = queries @ vectors.T
    for row, left_out in enumerate(excluded):
        scores[row, left_out] = -torch.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "GROUP", 8)
        patch.setattr(ranking, "WIDE", 64)
        patch.setitem(ranking.STRETCH, "cpu", 100)
        values, rows = VectorIndex(vectors).search(queries, n, excluded)
        padded = torch.full((batch, entries + 2), -1)
        for row, left_out in enumerate(excluded):
            padded[row, : len(left_out)] = torch.from_numpy(left_out)
        best_values, best_rows = VectorIndex(vectors).best(queries, n, padded)
    expected_values, expected_rows = naive(scores, n)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=1e-12)
    real = values > -torch.inf
    assert torch.equal(rows[real], expected_rows[real])
    assert best_values.shape[1] == min(n + 1, entries)
    torch.testing.assert_close(best_values, naive(scores, n + 1)[0], rtol=0, atol=1e-12)
    settled = real & ~ends_in_a_tie(best_values, n).unsqueeze(1)
    assert torch.equal(best_rows[:, :n][settled], expected_rows[settled])


@pytest.mark.slow
def test_a_large_catalogue_is_searched_in_little_memory():
    """A million places: the scores of 64 queries would take 256 MB, those of a chunk take 8."""
    torch.manual_seed(0)
    vectors, queries = torch.randn(1_000_000, 16), torch.randn(64, 16)
    catalogue = VectorIndex(vectors)
    values, rows = catalogue.search(queries, 10, [np.empty(0, np.int64)] * 64)
    expected = (queries[:4] @ vectors.T).topk(10)
    torch.testing.assert_close(values[:4], expected.values)
    assert torch.equal(rows[:4], expected.indices)
