"""Runs a function in several gloo processes and collects what each returns.

The processes are forks of a server that has only imported what they need, once for all tests: importing
torch takes seconds, and a fork of the tests' own process would inherit the state of threads that it does not have.
"""

import multiprocessing
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NEEDED = ["torch._inductor", "torch.distributed.checkpoint", "intbmoe.train", "pytest", "duckdb", "pyarrow.parquet"]
NEEDED += [f"intbmoe.tasks.{task}" for task in ("language", "sequences", "travel", "vision")]
multiprocessing.get_context("forkserver").set_forkserver_preload(NEEDED)  # modules that cannot be imported are left out


def _worker(rank, world, function, arguments, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        torch.save(function(rank, world, *arguments), os.path.join(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()


def run_ranks(world, function, *arguments):
    """``[function(rank, world, *arguments) for rank in range(world)]``, each in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_worker, (world, function, arguments, folder), nprocs=world, start_method="forkserver")
        return [torch.load(os.path.join(folder, f"{rank}.pt")) for rank in range(world)]
