"""How ranks find each other, even after ``torchrun`` has restarted them.

Ranks exchange their addresses through a store. torchrun (2.13) keeps the same store across all its restarts
(https://github.com/pytorch/pytorch/issues/135712): a restarted rank that looks there before another has written its new
address finds the old one, of a process that is gone, and the restart fails. So every start gets its own prefix in the
store. Rank 0 makes up the prefix, and each other rank asks for it under a key that was never used before, so nothing
left by an earlier start can answer. torchrun's restart count would not work: each machine counts only its own.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from intbmoe.train.errors import LostRankError

SCHEME = "intbmoe"
INIT_METHOD = f"{SCHEME}://"
"""For ``init_process_group``: like ``env://``, but also correct after a restart."""
SECONDS_BETWEEN_LOOKS = 0.01


def store_of_this_start(store: dist.Store, rank: int, world: int, timeout: timedelta) -> dist.Store:
    """Return a part of ``store`` that the ranks of this start share and no earlier start has written to."""
    if rank == 0:
        start = uuid4().hex
        for other in range(1, world):
            _answer(store, start, other, timeout)
    else:
        question = uuid4().hex
        store.set(f"question of rank {rank}", question)
        start = _get(store, question, 0, timeout)
        store.set(f"{start}/rank {rank} knows", "")
    return dist.PrefixStore(start, store)


def _answer(store: dist.Store, start: str, other: int, timeout: timedelta) -> None:
    """Tell rank ``other`` the prefix of this start; its question may be an old one, so repeat until it knows."""
    deadline = time.monotonic() + timeout.total_seconds()
    while not store.check([f"{start}/rank {other} knows"]):
        if time.monotonic() > deadline:
            raise _missing(other, timeout)
        store.set(_get(store, f"question of rank {other}", other, timeout), start)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _get(store: dist.Store, key: str, other: int, timeout: timedelta) -> str:
    try:
        store.wait([key], timeout)
    except dist.DistStoreError as error:
        raise _missing(other, timeout) from error
    return store.get(key).decode()


def _missing(other: int, timeout: timedelta) -> LostRankError:
    return LostRankError(
        f"rank {other} has not joined the others within train.patience={timeout.total_seconds():g} seconds. If it left "
        "a message, that says why. If it was only slow to start, raise train.patience"
    )


def _meet(_: str, timeout: timedelta, **__: Any) -> Iterator[tuple[dist.Store, int, int]]:
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    yield store_of_this_start(store, rank, world, timeout), rank, world


with suppress(RuntimeError):  # if this module is imported again, the name is already registered, with the same meaning
    register_rendezvous_handler(SCHEME, _meet)
