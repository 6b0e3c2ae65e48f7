"""Small files of item sequences."""

import numpy as np

from intbmoe.tasks.sequences.source import ItemSequences


def sequences(*histories, item_count=None):
    """The histories of users 0, 1, …, as the readers return them."""
    items = np.array([item for history in histories for item in history], dtype=np.int64)
    offsets = np.cumsum([0, *map(len, histories)]).astype(np.int64)
    return ItemSequences(items, offsets, item_count or int(items.max()) + 1)


def check_ins(*histories):
    """The arrays of a file of check-ins; times increase within a user and start again for the next."""
    found = sequences(*histories)
    lengths = found.lengths
    return {
        "user": np.repeat(np.arange(len(histories)), lengths).astype(np.int32),
        "poi": found.items.astype(np.int32),
        "time": np.concatenate([1_333_000_000 + 60 * np.arange(length) for length in lengths]),
    }


def item_lists(*histories):
    """The arrays of a file of item lists; its ids start at 1."""
    found = sequences(*histories)
    return {"items": (found.items + 1).astype(np.int32), "offsets": found.offsets}


def write(path, arrays):
    np.savez_compressed(path, **arrays)
    return str(path)
