"""Counts what ranks send to each other."""

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class Messages(TorchDispatchMode):
    """(operation, type, entries sent by this rank) of every message over the ranks."""

    KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "allgather", "allreduce")

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        if function.namespace in ("c10d", "_c10d_functional") and any(kind in name for kind in self.KINDS):
            # c10d's own collectives take (output, input, …), the functional ones (input, …).
            source = args[1] if function.namespace == "c10d" and "base" in name else args[0]
            source = source[0] if isinstance(source, list | tuple) else source
            entries = source.numel()
            if "all_to_all" in name:  # (rows, rows from each rank, rows to each rank, …): a rank keeps its own rows
                entries -= args[2][dist.get_rank()] * source[:1].numel()
            self.sent.append((name.split(".")[0].strip("_"), source.dtype, entries))
        return function(*args, **(kwargs or {}))

    def bytes(self, world):
        """Bytes of the messages that grow with the model: not losses and counts (float64) or statistics (short)."""
        factors = {
            "all_to_all": 1,
            "gather": world - 1,
            "scatter": (world - 1) / world,
            "reduce": 2 * (world - 1) / world,
        }
        total = 0
        for name, dtype, entries in self.sent:
            if dtype.is_floating_point and dtype != torch.float64 and entries > 8:
                kind = next(kind for kind in factors if kind in name)
                total += factors[kind] * entries * dtype.itemsize
        return total
