"""What is used for training and what for evaluation: leave-last-out over the users.

    events of a user    e_0 … e_{n−3}   e_{n−2}   e_{n−1}          n ≥ 3; with fewer events all are for training
                           training      valid      test

Training uses windows of at most ``length`` items of the training events and predicts the next item at every item; each
training event but a user's first is a target exactly once. An evaluated event is predicted from the ``length`` events
before it. So no evaluated event is ever a training target, or seen before it is predicted.

Sequences are padded at the end with ``PADDING``.
"""

from collections.abc import Sequence

import numpy as np
import torch

from intbmoe.models.sequence import PADDING
from intbmoe.tasks.base import Batch
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.sequences.source import ItemSequences

HELD_OUT = {"valid": 2, "test": 1}  # position of the event, counted from a user's end
FEWEST = 3  # events of a user who is evaluated


def held_out_events(sequences: ItemSequences, split: str) -> np.ndarray:
    """Return (examples,) positions in ``sequences.items`` of the events that ``split`` evaluates, one per user."""
    return sequences.offsets[1:][sequences.lengths >= FEWEST] - HELD_OUT[split]


def training_ends(sequences: ItemSequences) -> np.ndarray:
    """Return (users,) where each user's training events end in ``sequences.items``."""
    held_out = np.where(sequences.lengths >= FEWEST, len(HELD_OUT), 0)
    return sequences.offsets[1:] - held_out


def require_splits(sequences: ItemSequences, file: str) -> None:
    if not (sequences.lengths >= FEWEST).any():
        raise DataError(f"{file} leaves nothing to evaluate: expected users with {FEWEST} events or more")
    if not (training_ends(sequences) - sequences.offsets[:-1] > 1).any():
        raise DataError(f"{file} leaves nothing to train on: expected users with {FEWEST + 1} events or more")


class TrainingWindows:
    """Windows over the training events, cut from each user's end, so that only the oldest may be shorter."""

    def __init__(self, sequences: ItemSequences, length: int) -> None:
        self.items = sequences.items
        self.length = length
        starts, ends = [], []
        for start, end in zip(sequences.offsets[:-1].tolist(), training_ends(sequences).tolist(), strict=True):
            # The last training event is only a target: a window is given by where its inputs start and end.
            for last in range(end - 1, start, -length):
                starts.append(max(start, last - length))
                ends.append(last)
        self.starts, self.ends = np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return ``items`` (B, length) and ``targets`` (B, length), the item after each; nothing is random here."""
        chosen = np.asarray(indices, dtype=np.int64)
        starts, ends = self.starts[chosen], self.ends[chosen]
        items = _pad(self.items, starts, ends, self.length)
        return {"items": items, "targets": _pad(self.items, starts + 1, ends + 1, self.length)}


class HeldOutEvents:
    def __init__(self, sequences: ItemSequences, split: str, length: int) -> None:
        self.items = sequences.items
        self.length = length
        self.events = held_out_events(sequences, split)
        self.starts = np.maximum(self.events - length, sequences.offsets[:-1][sequences.lengths >= FEWEST])
        self.new = sequences.first_visits()[self.events]

    def __len__(self) -> int:
        return len(self.events)

    def batch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return ``items`` (B, length), ``target`` (B,), and ``new`` (B,): whether it is not in the user's history."""
        chosen = np.asarray(indices, dtype=np.int64)
        events = self.events[chosen]
        return {
            "items": _pad(self.items, self.starts[chosen], events, self.length),
            "target": torch.from_numpy(self.items[events]),
            "new": torch.from_numpy(self.new[chosen]),
        }


def _pad(items: np.ndarray, starts: np.ndarray, ends: np.ndarray, length: int) -> torch.Tensor:
    """(B, length) int64: items[start:end] of each row, then ``PADDING``."""
    places = starts[:, None] + np.arange(length)
    inside = places < ends[:, None]
    return torch.from_numpy(np.where(inside, items[np.minimum(places, len(items) - 1)], PADDING))
