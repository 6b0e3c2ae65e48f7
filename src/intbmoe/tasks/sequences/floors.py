"""Rankings that need no learning, on the test split. What does not beat them has learned nothing.

popularity                    events of all users with the item, the tests left out; equal ones by the lower id
visit counter                 the user's own events with it before the test; equal ones by popularity. Of items
                              never visited it knows nothing: they come last, all at once
visit counter, popularity     the same, but items never visited follow by popularity too
"""

from collections.abc import Mapping

import numpy as np
import torch

from intbmoe.tasks.sequences.examples import FEWEST, held_out_events
from intbmoe.tasks.sequences.ranking import ranking_gains, ranking_metrics
from intbmoe.tasks.sequences.source import ItemSequences


def item_floors(sequences: ItemSequences) -> Mapping[str, Mapping[str, float]]:
    events = held_out_events(sequences, "test")
    targets = sequences.items[events]
    place = popularity_places(sequences, events)
    visited_ranks, ranks = [], []
    starts = sequences.offsets[:-1][sequences.lengths >= FEWEST]
    for start, event in zip(starts.tolist(), events.tolist(), strict=True):
        visited, counted = counter_ranks(sequences.items[start:event], sequences.items[event], place)
        visited_ranks.append(visited)
        ranks.append(counted)
    new = sequences.first_visits()[events]
    found = {
        "popularity": place[targets] + 1,
        "visit counter": np.array(visited_ranks),
        "visit counter, popularity": np.array(ranks),
    }
    gains = {name: ranking_gains(torch.from_numpy(ranks), torch.from_numpy(new)) for name, ranks in found.items()}
    return {name: ranking_metrics({key: float(gain.sum()) for key, gain in one.items()}) for name, one in gains.items()}


def popularity_places(sequences: ItemSequences, held_out: np.ndarray) -> np.ndarray:
    """(items,) int64: each item's place, from 0, in the order of popularity without the events ``held_out``."""
    known = np.delete(sequences.items, held_out)
    counts = np.bincount(known, minlength=sequences.item_count)
    place = np.empty(sequences.item_count, dtype=np.int64)
    place[np.argsort(-counts, kind="stable")] = np.arange(sequences.item_count)
    return place


def counter_ranks(history: np.ndarray, target: int, place: np.ndarray) -> tuple[int, int]:
    """The target's rank by the visit counter alone, and with popularity for the items never visited."""
    items, counts = np.unique(history, return_counts=True)
    places = place[items]
    own = counts[items == target]
    if len(own) == 0:
        # Before it stand all visited items, and of the others those that are more popular.
        return len(place), 1 + len(items) + int(place[target] - (places < place[target]).sum())
    rank = 1 + int(((counts > own) | ((counts == own) & (places < place[target]))).sum())
    return rank, rank
