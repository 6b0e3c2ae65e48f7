"""Where training ends and where the test begins: by time, so that nobody is trained on what comes after a test."""

from collections.abc import Callable, Iterable

import numpy as np

BINS = 1 << 20
TRAIN_TENTHS, KNOWN_TENTHS = 8, 9  # of all sessions, so many tenths are for training, and for training or validation


def split_times(parts: Callable[[], Iterable[np.ndarray]]) -> tuple[int, int]:
    """``valid_from`` and ``test_from``: 80, 10 and 10 % of the sessions whose times ``parts`` gives.

    Each is the first edge of a histogram with at least that share of the sessions before it. The bins divide the whole
    range by a million (7 seconds for three months): the parts are read one after another, twice, and never sorted.
    """
    ranges = [(int(part.min()), int(part.max())) for part in parts() if len(part)]
    first = min(low for low, _ in ranges)
    width = (max(high for _, high in ranges) - first) // BINS + 1
    counts = np.zeros(BINS, np.int64)
    for part in parts():
        counts += np.bincount((part - first) // width, minlength=BINS)
    before = np.concatenate([[0], np.cumsum(counts)])
    edges = np.searchsorted(10 * before, before[-1] * np.array([TRAIN_TENTHS, KNOWN_TENTHS]))
    return first + width * int(edges[0]), first + width * int(edges[1])
