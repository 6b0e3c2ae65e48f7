"""Two processes on one GPU: the kernels compose slices, and the final weights are those of a single process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import intbmoe
from intbmoe import parallel
from intbmoe.parallel import pool as pool_module
from ranks import run_ranks

pytestmark = pytest.mark.gpu
DIM, HIDDEN, STEPS = 64, 200, 5


def make(backend):
    torch.manual_seed(0)
    layer = intbmoe.create("intbmoe", DIM, hidden=HIDDEN, experts=16, blocks=4).cuda()
    layer.backend = backend
    return layer


def batch(step):
    return torch.randn(8, 32, DIM, generator=torch.Generator().manual_seed(step)).cuda()


def step(layer, model, optimizer, x, world, dtype):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        loss = model(x).float().square().mean()
    (loss + intbmoe.aux_loss(layer)).backward()
    norm = parallel.clip_grad_norm(layer.parameters(), 1.0)
    optimizer.step()
    intbmoe.after_step(layer)
    return float(norm)


def on_cpu(collective):
    """Send messages through the CPU: gloo lacks some collectives on a GPU, and NCCL refuses two ranks on one GPU."""

    def through(tensor, *arguments):
        return collective(tensor.cpu(), *arguments).cuda()

    return through


def train_shared(rank, world, backend, dtype, recompute):
    torch.cuda.set_device(0)
    pool_module._gather, pool_module._scatter = on_cpu(pool_module._gather), on_cpu(pool_module._scatter)
    layer = make(backend)
    layer.recompute = recompute
    parallel.shard_pools(layer, DeviceMesh.from_group(dist.group.WORLD, "cuda"))  # gloo's; a new mesh would use NCCL
    model = nn.parallel.DistributedDataParallel(layer)
    pools = parallel.pool_parameters(layer)
    rest = [parameter for parameter in layer.parameters() if parameter not in pools]
    optimizer = torch.optim.SGD([{"params": list(pools)}, {"params": rest}], 0.5)
    norms = [step(layer, model, optimizer, batch(n).chunk(world)[rank], world, dtype) for n in range(STEPS)]
    slices = {name: parallel.local(value).detach().cpu() for name, value in layer.state_dict().items()}
    return slices, norms


@pytest.mark.parametrize(
    ("backend", "dtype", "recompute", "tolerance"),
    [
        ("fused", torch.float32, False, 1e-4),
        ("fused", torch.float32, True, 1e-4),
        ("grouped", torch.float32, False, 1e-4),
        ("fused", torch.bfloat16, False, 2e-2),
    ],
)
def test_two_processes_on_one_gpu_train_as_one(backend, dtype, recompute, tolerance):
    layer = make(backend)
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    start = {name: value.detach().cpu().clone() for name, value in layer.state_dict().items()}
    norms = [step(layer, layer, optimizer, batch(n), 1, dtype) for n in range(STEPS)]
    found = run_ranks(2, train_shared, backend, dtype, recompute)
    for name, expected in layer.state_dict().items():
        parts = [slices[name] for slices, _ in found]
        whole = parts[0] if parts[0].shape == expected.shape else torch.cat(parts, dim=1)
        moved = (expected.cpu() - start[name]).abs().max()
        assert moved > 0 or "scale" in name
        assert (whole - expected.cpu()).abs().max() <= tolerance * max(moved, 1e-3), name
    for _, norms_there in found:
        assert norms_there == pytest.approx(norms, rel=max(tolerance, 1e-4) * 5)
