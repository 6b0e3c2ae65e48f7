"""The sharded tensors of a checkpoint: every rank writes its own part, and any number of ranks can read them back.

This uses torch's distributed checkpointing in its safetensors form, which pickles nothing.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from intbmoe.train.errors import DamagedFileError


def is_sharded(tensor: Tensor) -> bool:
    return any(placement.is_shard() for placement in getattr(tensor, "placements", ()))


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors into an empty folder; all ranks call this together."""
    import torch.distributed.checkpoint as dcp  # slow to import, and only sharded runs need it
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    dcp.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def read_shards(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Read into ``targets``, whole or sharded, in place; all ranks call this together."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    alone = not dist.is_initialized() or dist.get_world_size() == 1
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process is intended
            dcp.load(dict(targets), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=alone)
    except (dcp.CheckpointException, SafetensorError, OSError) as error:
        raise DamagedFileError(f"the shards in {folder} cannot be read back: {error}") from error
