"""Leave-last-out: what is trained on, what is evaluated, and that the two never meet."""

import numpy as np
import pytest
import torch
from fake_items import sequences
from hypothesis import given, settings
from hypothesis import strategies as st

from intbmoe.models.sequence import PADDING
from intbmoe.tasks.sequences.examples import HeldOutEvents, TrainingWindows, held_out_events, training_ends

HISTORIES = ([0, 1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 10], [11, 12], [13], [14, 15, 14, 15])


def numbered(lengths):
    """Histories in which every event has a different number."""
    ends = np.cumsum(lengths)
    return sequences(*(range(end - length, end) for end, length in zip(ends, lengths, strict=True)))


def rows(batch, name):
    return [[item for item in row if item != PADDING] for row in batch[name].tolist()]


def test_windows_are_cut_from_the_end_and_predict_the_next_item():
    windows = TrainingWindows(sequences(*HISTORIES), 4)
    batch = windows.batch(range(len(windows)), 0, 0)
    assert rows(batch, "items") == [[2, 3, 4, 5], [0, 1], [11], [14]]
    assert rows(batch, "targets") == [[3, 4, 5, 6], [1, 2], [12], [15]]
    assert batch["items"].shape == batch["targets"].shape == (4, 4)


def test_the_last_event_is_the_test_and_the_one_before_it_valid():
    data = sequences(*HISTORIES)
    valid, test = (HeldOutEvents(data, split, 4) for split in ("valid", "test"))
    whole = valid.batch(range(3), 0, 0)
    assert rows(whole, "items") == [[3, 4, 5, 6], [9], [14, 15]]
    assert whole["target"].tolist() == [7, 9, 14]
    assert whole["new"].tolist() == [True, False, False]
    whole = test.batch(range(3), 0, 0)
    assert rows(whole, "items") == [[4, 5, 6, 7], [9, 9], [14, 15, 14]]
    assert whole["target"].tolist() == [8, 10, 15]
    assert whole["new"].tolist() == [True, True, False]


def test_new_is_said_of_the_whole_history_not_of_the_window():
    data = sequences([5, 1, 2, 3, 4, 5])
    batch = HeldOutEvents(data, "test", 2).batch([0], 0, 0)
    assert rows(batch, "items") == [[3, 4]]
    assert batch["new"].tolist() == [False]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(sum), st.integers(1, 9))
def test_every_training_event_but_a_users_first_is_a_target_exactly_once(lengths, length):
    data = numbered(lengths)
    windows = TrainingWindows(data, length)
    targets, inputs = [], []
    if len(windows):
        batch = windows.batch(range(len(windows)), 0, 0)
        targets, inputs = (batch[name][batch["targets"] != PADDING].tolist() for name in ("targets", "items"))
        assert torch.equal(batch["items"] != PADDING, batch["targets"] != PADDING)
    starts, ends = data.offsets[:-1], training_ends(data)
    assert sorted(targets) == [event for a, b in zip(starts, ends, strict=True) for event in range(a + 1, b)]
    # Events are numbered through: the input is the one before its target.
    assert [event + 1 for event in inputs] == targets


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(sum), st.integers(1, 9))
def test_what_is_evaluated_was_not_trained_on_and_is_not_in_its_own_input(lengths, length):
    data = numbered(lengths)
    windows = TrainingWindows(data, length)
    trained = set(windows.batch(range(len(windows)), 0, 0)["targets"].flatten().tolist()) if len(windows) else set()
    trained |= set(windows.batch(range(len(windows)), 0, 0)["items"].flatten().tolist()) if len(windows) else set()
    for split in ("valid", "test"):
        held = HeldOutEvents(data, split, length)
        assert len(held) == sum(count >= 3 for count in lengths)
        if not len(held):
            continue
        batch = held.batch(range(len(held)), 0, 0)
        assert not trained & set(batch["target"].tolist())
        for row, target in zip(rows(batch, "items"), batch["target"].tolist(), strict=True):
            user_start = data.offsets[np.searchsorted(data.offsets, target, side="right") - 1]
            assert row == list(range(max(user_start, target - length), target))
    assert not set(held_out_events(data, "valid")) & set(held_out_events(data, "test"))


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_example_does_not_depend_on_the_batch_around_it_nor_on_chance(split):
    data = numbered([20, 3, 7, 15])
    examples = TrainingWindows(data, 5) if split == "train" else HeldOutEvents(data, "test", 5)
    whole = examples.batch(range(len(examples)), 0, 0)
    for index in range(len(examples)):
        alone = examples.batch([index], 3, 9)
        assert all(torch.equal(alone[name][0], whole[name][index]) for name in whole)
    order = list(range(len(examples)))[::-1]
    turned = examples.batch(order, 1, 2)
    assert all(torch.equal(turned[name], whole[name][order]) for name in whole)
