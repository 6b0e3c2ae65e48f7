"""A layer that was built on the meta device and sharded starts as one that was never sharded."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import intbmoe
from ranks import run_ranks

OPTIONS = {"experts": 3, "blocks": 4, "top_k": 2}


def start(rank, world):
    with torch.device("meta"):
        layer = intbmoe.IntBMoE(7, 5, **OPTIONS)
    fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    layer.to_empty(device="cpu")
    torch.manual_seed(rank)  # all ranks must get the first one's values
    layer.reset_parameters()
    values = {name: parameter.full_tensor() for name, parameter in layer.named_parameters()}
    return values, layer(torch.ones(2, 3, 7)).detach()


def test_two_ranks_start_as_one_process():
    torch.manual_seed(0)
    layer = intbmoe.IntBMoE(7, 5, **OPTIONS)
    for values, y in run_ranks(2, start):
        assert values.keys() == dict(layer.named_parameters()).keys()
        assert all(torch.equal(values[name], parameter) for name, parameter in layer.named_parameters())
        torch.testing.assert_close(y, layer(torch.ones(2, 3, 7)))
