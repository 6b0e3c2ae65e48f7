"""What is trained on and what is evaluated: leave-last-out over the users.

    events of a user    e_0 … e_{n−3}   e_{n−2}   e_{n−1}          n ≥ 3; with fewer events all are training
                           training      valid      test

Training sees windows of at most ``length`` items of the training events and predicts at every item the next one; each
training event but a user's first is a target exactly once. An evaluated event is predicted from the ``length`` events
before it. So no evaluated event is ever a target of training, nor seen before it is predicted.

Sequences are padded at their end with ``PADDING``.
"""

from collections.abc import Sequence

import numpy as np
import torch

from intbmoe.models.sequence import PADDING
from intbmoe.tasks.base import Batch
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.sequences.source import ItemSequences

HELD_OUT = {"valid": 2, "test": 1}  # how far from a user's end the event is
FEWEST = 3  # events of a user who is evaluated


def held_out_events(sequences: ItemSequences, split: str) -> np.ndarray:
    """(examples,) positions in ``sequences.items`` of the events that ``split`` evaluates, one for each user."""
    return sequences.offsets[1:][sequences.lengths >= FEWEST] - HELD_OUT[split]


def training_ends(sequences: ItemSequences) -> np.ndarray:
    """(users,) where the training events of each user end in ``sequences.items``."""
    held_out = np.where(sequences.lengths >= FEWEST, len(HELD_OUT), 0)
    return sequences.offsets[1:] - held_out


def require_splits(sequences: ItemSequences, file: str) -> None:
    if not (sequences.lengths >= FEWEST).any():
        raise DataError(f"{file} leaves nothing to evaluate: expected users with {FEWEST} events or more")
    if not (training_ends(sequences) - sequences.offsets[:-1] > 1).any():
        raise DataError(f"{file} leaves nothing to train on: expected users with {FEWEST + 1} events or more")


class TrainingWindows:
    """Windows over the training events, cut from each user's end: only the oldest may be shorter than ``length``."""

    def __init__(self, sequences: ItemSequences, length: int) -> None:
        self.items = sequences.items
        self.length = length
        starts, ends = [], []
        for start, end in zip(sequences.offsets[:-1].tolist(), training_ends(sequences).tolist(), strict=True):
            # The last training event is a target only: a window is where its inputs start and end.
            for last in range(end - 1, start, -length):
                starts.append(max(start, last - length))
                ends.append(last)
        self.starts, self.ends = np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """``items`` (B, length), and ``targets`` (B, length), the item after each; nothing is random here."""
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
        """``items`` (B, length), ``target`` (B,), and whether it is ``new`` (B,): not in all of the user's history."""
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
