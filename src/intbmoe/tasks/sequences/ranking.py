"""Hit rate and NDCG over a full ranking, for all targets and for those that are new to their user.

rank     1 + the number of other items that score at least as high as the target: ties count against it
HR@k     share of targets with rank ≤ k
NDCG@k   mean of 1/log₂(1 + rank) over all targets, 0 where rank > k

Rankings that need no learning, on the test split; a model that does not beat them has learned nothing:

popularity                    number of events of all users with the item, without the test events; ties by lower id
visit counter                 number of the user's own events with the item before the test event; ties by popularity.
                              It knows nothing of items never visited: they come last, all tied
visit counter, popularity     the same, but items never visited follow by popularity
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from intbmoe.checks import require
from intbmoe.tasks.sequences.examples import FEWEST, held_out_events
from intbmoe.tasks.sequences.source import ItemSequences

HITS = (1, 5, 10)
NDCG = 10
NAMES = (*(f"HR@{k}" for k in HITS), f"NDCG@{NDCG}")
NEW = " new"


def rank_of(scores: Tensor, target: Tensor) -> Tensor:
    """(B, V) scores, (B,) targets → (B,) ranks from 1; NaN is never ranked below anything."""
    below = scores < scores.gather(1, target.unsqueeze(1))
    return scores.shape[1] - below.sum(1)


def ranking_gains(ranks: Tensor, new: Tensor) -> dict[str, Tensor]:
    """Return (B,) what each target adds to each metric's sum, to ``count`` and to ``count new``."""
    gains = {f"HR@{k}": (ranks <= k).double() for k in HITS}
    gains[f"NDCG@{NDCG}"] = torch.where(ranks <= NDCG, 1 / torch.log2(1 + ranks.double()), 0)
    gains["count"] = torch.ones_like(ranks, dtype=torch.float64)
    return {f"{name}{part}": gain * of for part, of in (("", 1), (NEW, new)) for name, gain in gains.items()}


def ranking_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics; those of new targets are 0 if there are none."""
    count, new = float(sums["count"]), float(sums["count" + NEW])
    require(count > 0, "count", count, "positive: no target was evaluated")
    metrics = {name: float(sums[name]) / count for name in NAMES}
    metrics |= {name + NEW: float(sums[name + NEW]) / max(new, 1) for name in NAMES}
    return {**metrics, "share new": new / count}


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
    """Return (items,) int64: each item's position, from 0, by popularity without the events ``held_out``."""
    known = np.delete(sequences.items, held_out)
    counts = np.bincount(known, minlength=sequences.item_count)
    place = np.empty(sequences.item_count, dtype=np.int64)
    place[np.argsort(-counts, kind="stable")] = np.arange(sequences.item_count)
    return place


def counter_ranks(history: np.ndarray, target: int, place: np.ndarray) -> tuple[int, int]:
    """Return the target's rank by the visit counter alone, and with popularity for items never visited."""
    items, counts = np.unique(history, return_counts=True)
    places = place[items]
    own = counts[items == target]
    if len(own) == 0:
        # It comes after all visited items and after the other items that are more popular.
        return len(place), 1 + len(items) + int(place[target] - (places < place[target]).sum())
    rank = 1 + int(((counts > own) | ((counts == own) & (places < place[target]))).sum())
    return rank, rank
