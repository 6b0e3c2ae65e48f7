"""Multi-hash embeddings: fixed rows, few collisions, zero for missing ids."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intbmoe.models.hashing import PRIME, ConcatenatedHashEmbedding, MultiHashEmbedding


def test_a_vector_is_the_sum_of_its_rows_and_zero_is_missing():
    table = MultiHashEmbedding(16, 4, hashes=3)
    ids = torch.tensor([[0, 1, 17], [5, 0, 10**9]])
    vectors = table(ids)
    assert vectors.shape == (2, 3, 4)
    assert (vectors[ids == 0] == 0).all()
    for i in (1, 17, 5, 10**9):
        by_hand = sum(table.tables[(a * i + b) % PRIME % 16 + 16 * j] for j, (a, b) in enumerate(table.constants))
        torch.testing.assert_close(table(torch.tensor(i)), by_hand, rtol=0, atol=1e-6)


def test_what_is_missing_stays_zero_in_training():
    table = MultiHashEmbedding(8, 4)
    optimizer = torch.optim.AdamW(table.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (table(torch.tensor([0, 3, 8])) - 1).square().sum().backward()
        optimizer.step()
    assert (table(torch.tensor(0)) == 0).all()
    assert (table(torch.tensor([3, 8])) != 0).all()


@given(st.lists(st.integers(0, PRIME - 1), max_size=20), st.integers(1, 10**6))
def test_rows_are_exact_integer_arithmetic(ids, rows):
    table = MultiHashEmbedding(7, 1, hashes=4)
    table.rows = rows
    found = table.places(torch.tensor(ids, dtype=torch.int64)).tolist()
    missing = 4 * rows
    expected = [[(a * i + b) % PRIME % rows + j * rows for j, (a, b) in enumerate(table.constants)] for i in ids]
    assert found == [row if i else [missing] * 4 for i, row in zip(ids, expected, strict=True)]


def test_rows_never_change():
    """Rows are fixed for good: with another hash function, a trained table would be useless."""
    found = MultiHashEmbedding(1000, 2, 3).places(torch.tensor([1, 12_345, 7_291_872])).tolist()
    assert found == [[1, 1741, 2159], [345, 1547, 2509], [872, 1874, 2553]]


def test_int32_ids_do_not_overflow():
    ids = torch.tensor([2_000_000_000, 7_291_872], dtype=torch.int32)
    table = MultiHashEmbedding(1000, 2, 4)
    assert torch.equal(table.places(ids), table.places(ids.long()))


def test_ids_that_fit_have_a_row_of_their_own():
    """As in a plain embedding, without knowing the number of ids."""
    rows = MultiHashEmbedding(100, 2, 2).places(torch.arange(1, 101))
    assert len(rows[:, 0].unique()) == 100


def test_seven_million_places_share_rows_but_hardly_any_two_share_all():
    """At a tenth of the places and rows, so with as many places per row."""
    table = MultiHashEmbedding(26_214, 1, 2)
    places = 730_000
    rows = table.places(torch.arange(1, places + 1))
    load = torch.bincount(rows[:, 1] - table.rows, minlength=table.rows).double()
    mean = places / table.rows
    assert load.mean() == pytest.approx(mean)
    assert load.max() < 2 * mean + 12 * mean**0.5  # no row is shared by too many
    pairs = rows[:, 0] * table.rows + rows[:, 1] - table.rows
    same = places - len(pairs.unique())
    assert same < 0.002 * places


def test_the_spread_of_a_vector_does_not_depend_on_the_number_of_hashes():
    for hashes in (1, 4):
        vectors = MultiHashEmbedding(1000, 8, hashes, std=0.3)(torch.arange(1, 1001))
        assert vectors.std().item() == pytest.approx(0.3, rel=0.1)


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="rows=0"):
        MultiHashEmbedding(0, 4)
    with pytest.raises(ValueError, match=r"hashes=1\.5"):
        MultiHashEmbedding(4, 4, 1.5)


def test_concatenated_rows_are_the_remainders_laid_end_to_end():
    """Against the plain version: one table for each prime, indexed by the remainder."""
    table = ConcatenatedHashEmbedding((5, 7, 11), 6, std=0.001)
    parts = table.tables[:-1].split([5, 7, 11])
    for number in (1, 5, 35, 12_345, 7_291_872):
        expected = torch.cat([part[number % prime] for part, prime in zip(parts, (5, 7, 11), strict=True)])
        assert torch.equal(table(torch.tensor(number)), expected)
    vectors = table(torch.tensor([[0, 3], [4, 0]]))
    assert vectors.shape == (2, 2, 6)
    assert (vectors[0, 0] == 0).all()
    vectors.sum().backward()
    assert (table.tables.grad[-1] == 0).all()
    assert ConcatenatedHashEmbedding((5003, 5009), 4, std=0.001).tables.std().item() == pytest.approx(0.001, rel=0.05)
    with pytest.raises(ValueError, match=r"moduli=\(5, 7\).*divides dim \(3\)"):
        ConcatenatedHashEmbedding((5, 7), 3)
