"""Ranks restarted with the same store, as torchrun does, find each other and nothing of earlier starts."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from intbmoe.train.errors import LostRankError
from intbmoe.train.rendezvous import store_of_this_start

PATIENCE = timedelta(seconds=30)


def meet(store, delays):
    """Start all ranks, each after its delay; return what each then reads from rank 0."""

    def one(rank):
        time.sleep(delays[rank])
        own = store_of_this_start(store, rank, len(delays), PATIENCE)
        if rank == 0:
            own.set("address", f"start {delays}")
        return own.get("address").decode()

    with ThreadPoolExecutor(len(delays)) as pool:
        return list(pool.map(one, range(len(delays))))


def test_nothing_of_an_earlier_start_is_found():
    store = dist.HashStore()
    for delays in [(0, 0, 0), (0.2, 0, 0.1), (0, 0.2, 0.1)]:  # any rank may be first
        assert meet(store, delays) == [f"start {delays}"] * 3


def test_a_rank_that_does_not_come_is_named():
    store, short = dist.HashStore(), timedelta(seconds=0.2)
    with pytest.raises(LostRankError, match=r"rank 0 has not joined the others within train\.patience=0\.2 seconds"):
        store_of_this_start(store, 1, 2, short)  # its entry stays in the store
    with pytest.raises(LostRankError, match="rank 1 has not joined"):
        store_of_this_start(store, 0, 2, short)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(store_of_this_start, store, 1, 3, PATIENCE)
        with pytest.raises(LostRankError, match="rank 2 has not joined"):
            store_of_this_start(store, 0, 3, short)
