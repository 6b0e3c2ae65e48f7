"""The best n of many, exactly; of equal scores, the lower index comes first.

Letters: ``B`` queries, ``P`` entries of a catalogue, ``d`` width.

The scores of a large catalogue are never all in memory: one stretch is scored at a time, and within it only the groups
with the largest maxima are searched, so each score is read once. Entries whose scores differ by no more than rounding
may change places depending on the rest of the batch; entries that are equal to the last bit never do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

GROUP = 128
WIDE = 2**14  # groups pay from this many entries on
STRETCH = {"cpu": 2**21, "cuda": 2**29}  # scores at a time: what fits into a core's cache, and 2 GiB of a GPU


def top_n(scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """(B, P) → (B, n) scores and (B, n) columns, by descending score and then by ascending column; n ≤ P."""
    values, columns = _order(*_largest(scores, min(n + 1, scores.shape[1])))
    return _settle(values, columns, n, lambda row: scores[row])


def leave_out(scores: Tensor, excluded: Sequence[np.ndarray]) -> None:
    """Set the scores (B, P) of each row's excluded columns to −∞."""
    _leaving_out(excluded, scores.device)(scores, 0)


class VectorIndex:
    """Vectors to search in: the score of an entry is its inner product with the query."""

    def __init__(self, vectors: Tensor) -> None:
        """``vectors`` (P, d) must have a type with reliable products: float32 or wider."""
        self.vectors = vectors

    def __len__(self) -> int:
        return len(self.vectors)

    def search(self, queries: Tensor, n: int, excluded: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """(B, d) → (B, n) scores and rows, like ``top_n``; each query's ``excluded`` rows come last, with −∞."""
        n = min(n, len(self))
        values, columns = self._best(queries, n, _leaving_out(excluded, queries.device))

        def all_scores(row: int) -> Tensor:
            scores = self.vectors @ queries[row]
            scores[torch.from_numpy(excluded[row].astype(np.int64)).to(scores.device)] = -torch.inf
            return scores

        return _settle(values, columns, n, all_scores)

    def best(self, queries: Tensor, n: int, excluded: Tensor) -> tuple[Tensor, Tensor]:
        """Do a ``search`` that never waits for the device, for a graph; return n + 1 entries, if there are as many.

        ``excluded`` (B, X) has the rows that each query leaves out, −1 for none. If the last two scores are equal
        (``ends_in_a_tie``), which of the equal entries were found is arbitrary, and only ``search`` gives the answer.
        """

        def leave_out(scores: Tensor, start: int) -> None:
            width = scores.shape[1]
            columns = excluded.long() - start
            here = (excluded >= 0) & (columns >= 0) & (columns < width)
            # A minimum with +∞ changes nothing; idle entries are spread, because many at one place would queue up.
            idle = torch.arange(excluded.shape[1], device=scores.device) % width
            limits = torch.where(here, -torch.inf, torch.inf).to(scores.dtype)
            scores.scatter_reduce_(1, torch.where(here, columns, idle), limits, "amin")

        return self._best(queries, n, leave_out)

    def _best(self, queries: Tensor, n: int, leave_out: Callable[[Tensor, int], None]) -> tuple[Tensor, Tensor]:
        """Return the best n + 1, or all; ``leave_out`` gets the scores of a stretch and where it starts."""
        step = max(GROUP, STRETCH["cpu" if queries.device.type == "cpu" else "cuda"] // max(1, len(queries)))
        found = []
        for start in range(0, len(self), step):
            scores = queries @ self.vectors[start : start + step].T
            leave_out(scores, start)
            values, columns = _largest(scores, min(n + 1, scores.shape[1]))
            found.append((values, columns + start))
        values = torch.cat([values for values, _ in found], 1)
        columns = torch.cat([columns for _, columns in found], 1)
        values, columns = _order(values, columns)
        return values[:, : n + 1], columns[:, : n + 1]


def ends_in_a_tie(values: Any, n: int) -> Any:
    """(B, n + 1) descending scores, array or tensor → (B,) whether the last two are equal."""
    if values.shape[1] <= n:
        return values[:, 0] != values[:, 0]
    return (values[:, n - 1] == values[:, n]) & (values[:, n] != -np.inf)


def _leaving_out(rows: Sequence[np.ndarray], device: torch.device) -> Callable[[Tensor, int], None]:
    """Return a function that sets a stretch's excluded scores to −∞; sorted by column, to find them on the host."""
    query = np.repeat(np.arange(len(rows)), [len(one) for one in rows])
    column = np.concatenate([np.empty(0, np.int64), *rows]).astype(np.int64)
    order = np.argsort(column, kind="stable")
    columns = column[order]
    where = torch.from_numpy(np.stack([query[order], columns])).to(device)

    def leave_out(scores: Tensor, start: int) -> None:
        first, last = np.searchsorted(columns, [start, start + scores.shape[1]])
        if last > first:
            query, column = where[:, first:last]
            scores[query, column - start] = -torch.inf

    return leave_out


def _largest(scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the n largest of each row and their columns, in any order; among equal ones, any."""
    total = scores.shape[1]
    groups = total // GROUP
    if total < WIDE or groups < 4 * n:
        return scores.topk(n, dim=1, sorted=False)
    # Each of the n largest lies in one of the n groups with the largest maxima.
    grouped = scores[:, : groups * GROUP].unflatten(1, (groups, GROUP))
    chosen = grouped.amax(2).topk(n, dim=1, sorted=False).indices
    inside = torch.arange(GROUP, device=scores.device)
    columns = (chosen.unsqueeze(2) * GROUP + inside).flatten(1)
    rest = torch.arange(groups * GROUP, total, device=scores.device).expand(len(scores), -1)
    columns = torch.cat([columns, rest], 1)
    values, places = scores.gather(1, columns).topk(n, dim=1, sorted=False)
    return values, columns.gather(1, places)


def _order(values: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    columns, order = columns.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


def _settle(values: Tensor, columns: Tensor, n: int, scores_of: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the first n of n + 1; if the last two are equal, the choice among equal ones was arbitrary: look again."""
    for row in ends_in_a_tie(values, n).nonzero().flatten().tolist():
        ordered, places = scores_of(row).sort(descending=True, stable=True)
        values[row, :n], columns[row, :n] = ordered[:n], places[:n]
    return values[:, :n], columns[:, :n]


def ranked_results(ids: Sequence[int | str], scores: list[float], count: int) -> list[dict[str, Any]]:
    """Return the first ``count`` entries; excluded ones come last, with −∞, and are not results."""
    best = list(zip(ids, scores, strict=True))[:count]
    return [{"id": one, "score": score} for one, score in best if score != -np.inf]
