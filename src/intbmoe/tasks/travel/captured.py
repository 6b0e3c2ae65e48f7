"""``recommend`` for journeys as CUDA graphs: from the codes of a batch to its best places.

A batch is rounded up to a number of requests and of sessions for which there are graphs: one computes the queries, one
searches the catalogue. It is padded with rows without sessions, which no mixture counts and no one reads; larger
batches are answered in parts. One copy goes in, one comes out:

    in     excluded (B, X), −1 for none; then for each request its number of sessions, its profile, its sessions
    out    for each request the best n + 1 scores, their bits as integers, and their rows
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from intbmoe.graphs.recording import Mirror, Recorded, Recorder, halves, ladder
from intbmoe.layer import moe_layers
from intbmoe.models.travel import PROFILE_TOKENS
from intbmoe.tasks.serving.ranking import ends_in_a_tie
from intbmoe.tasks.serving.requests import Encoded

MOST_REQUESTS = 256  # per graph: beyond that a GPU is busy anyway
USUAL_RESULTS = 10  # a number of results with its own graphs, besides the largest allowed
RECORDING_S = 60.0  # after this time no more shapes are recorded; the largest come first, and fit smaller batches
CODES = 10  # columns per session
HEAD = 1 + PROFILE_TOKENS  # entries of a request before its sessions
Shape = tuple[int, int]


class CapturedSearch:
    """The graphs of a ``PlacePredictor``, with the buffers they read and write."""

    def __init__(self, predictor: Any, requests: int) -> None:
        """Record all shapes that batches of up to ``requests`` need, or raise ``CaptureError``."""
        self._predictor = predictor
        limits, device = predictor.limits, predictor.device
        self.requests = ladder(min(requests, MOST_REQUESTS))
        self.sessions = halves(predictor.sessions)
        self.results = tuple(sorted({min(USUAL_RESULTS, limits.top_n), limits.top_n}))
        self._excluded = limits.history
        most, vectors = self.requests[-1], predictor.places.vectors
        self._words = torch.int64 if vectors.dtype == torch.float64 else torch.int32
        self.input = Mirror(most * (self._excluded + self._width(self.sessions[-1])), torch.int32, device)
        self._output = Mirror(most * 2 * (self.results[-1] + 1), self._words, device)
        self.queries = vectors.new_zeros(most, vectors.shape[1])
        self.models: dict[Shape, Recorded] = {}  # by requests and sessions: from ``input`` to ``queries``
        self.searches: dict[Shape, Recorded] = {}  # by requests and results: from ``queries`` to the output
        self._record()

    def __len__(self) -> int:
        return len(self.models) + len(self.searches)

    @property
    def about(self) -> str:
        models, searches = sorted(self.models), sorted(self.searches)
        return f"requests × sessions {_pairs(models)}; requests × results {_pairs(searches)}"

    def _record(self) -> None:
        statistics = [layer.statistics for _, layer in moe_layers(self._predictor.model)]
        recorder = Recorder(self._predictor.device, statistics)
        end = time.monotonic() + RECORDING_S
        for requests in reversed(self.requests):
            for results in self.results:
                self.searches[requests, results] = recorder.record(partial(self._search_places, requests, results))
            for sessions in reversed(self.sessions):
                self.models[requests, sessions] = recorder.record(partial(self._run_model, requests, sessions))
            if time.monotonic() > end:
                break

    def _run_model(self, requests: int, sessions: int) -> None:
        rows = self._rows(self.input.device, requests, sessions)
        lengths, profile, codes = rows.split([1, PROFILE_TOKENS, CODES * sessions], 1)
        codes = codes.unflatten(1, (sessions, CODES))
        self.queries[:requests] = self._predictor.queries(profile, codes, lengths.squeeze(1))

    def _search_places(self, requests: int, results: int) -> None:
        excluded = self.input.device[: requests * self._excluded].view(requests, self._excluded)
        values, rows = self._predictor.places.best(self.queries[:requests], results, excluded)
        found = torch.stack([values.view(self._words), rows.to(self._words)])
        self._output.device[: found.numel()] = found.flatten()

    def search(self, batch: Sequence[Encoded]) -> tuple[np.ndarray, np.ndarray]:
        """Return (B, n) scores and rows, where n is at least what each request asks for, if there are that many."""
        most = self.requests[-1]
        wanted = max(encoded.payload["top_n"] for encoded in batch)
        n = next(results for results in self.results if results >= wanted)
        found = [self._search_part(batch[start : start + most], n) for start in range(0, len(batch), most)]
        return np.concatenate([values for values, _ in found]), np.concatenate([rows for _, rows in found])

    def _search_part(self, batch: Sequence[Encoded], n: int) -> tuple[np.ndarray, np.ndarray]:
        shape = self.shape_for(batch)
        self.input.to_device(self.fill(batch, shape))
        self.models[shape]()
        self.searches[shape[0], n]()
        values, rows = self.read(shape[0], n)
        values, rows = values[: len(batch)], rows[: len(batch)]
        for row in np.flatnonzero(ends_in_a_tie(values, n)).tolist():
            excluded = [batch[row].payload["excluded"]]
            exact = self._predictor.places.search(self.queries[row : row + 1], n, excluded)
            values[row, :n], rows[row, :n] = (part[0].cpu().numpy() for part in exact)
        return values[:, :n], rows[:, :n]

    def shape_for(self, batch: Sequence[Encoded]) -> Shape:
        """Return the recorded requests and sessions that hold the batch with the least padding."""
        longest = max(len(encoded.payload["sessions"]) for encoded in batch)
        fits = [shape for shape in self.models if shape[0] >= len(batch) and shape[1] >= longest]
        return min(fits, key=lambda shape: shape[0] * shape[1])

    def fill(self, batch: Sequence[Encoded], shape: Shape) -> int:
        """Write a batch into the host's buffer, over whatever was there; return the number of entries it takes."""
        requests, sessions = shape
        used = requests * (self._excluded + self._width(sessions))
        before = requests * self._excluded
        self.input.array[:before] = -1
        self.input.array[before:used] = 0
        excluded = self.input.array[:before].reshape(requests, self._excluded)
        rows = self._rows(self.input.array, requests, sessions)
        for left_out, row, encoded in zip(excluded, rows, batch, strict=False):
            payload = encoded.payload
            codes = payload["sessions"]
            row[0] = len(codes)
            row[1:HEAD] = payload["profile"]
            row[HEAD : HEAD + codes.size] = codes.ravel()
            left_out[: len(payload["excluded"])] = payload["excluded"]
        return used

    def read(self, requests: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the graphs and return (B, n + 1) scores and rows, or as many as there are places."""
        width = min(n + 1, len(self._predictor.places))
        used = 2 * requests * width
        self._output.to_host(used)
        values, rows = self._output.array[:used].reshape(2, requests, width).copy()
        return values.view(np.float64 if self._words == torch.int64 else np.float32), rows

    def _rows(self, flat: Tensor | np.ndarray, requests: int, sessions: int) -> Tensor | np.ndarray:
        start, width = requests * self._excluded, self._width(sessions)
        return flat[start : start + requests * width].reshape(requests, width)

    @staticmethod
    def _width(sessions: int) -> int:
        return HEAD + CODES * sessions


def _pairs(shapes: Sequence[Shape]) -> str:
    first, second = (sorted({shape[place] for shape in shapes}) for place in (0, 1))
    return f"{', '.join(map(str, first))} × {', '.join(map(str, second))}"
