"""Many devices: pools are sharded along their entries, composed slice by slice and gathered as K blocks.

See docs/scaling.md.

mesh = init_device_mesh("cuda", (world,))
parallel.shard_pools(model, mesh)                                    # each rank keeps its slice of every expert base
fully_shard(model, mesh=mesh, ignored_params=parallel.pool_parameters(model))    # or DDP, which ignores them by itself
…
parallel.set_requires_gradient_sync(model, last)                     # last micro-batch? only needed with accumulation
parallel.clip_grad_norm(model.parameters(), 1.0)

Expert parallelism, for methods that send tokens to experts: each rank holds some of the experts.

parallel.shard_experts(model, mesh)
model = DistributedDataParallel(model)
"""

from intbmoe.parallel.experts import expert_parameters, shard_experts
from intbmoe.parallel.gradients import clip_grad_norm, global_norm, local
from intbmoe.parallel.pool import ShardedPool, abandon_step, pool_parameters, set_requires_gradient_sync, shard_pools

__all__ = [
    "ShardedPool", "abandon_step", "clip_grad_norm", "expert_parameters", "global_norm", "local",
    "pool_parameters", "set_requires_gradient_sync", "shard_experts", "shard_pools",
]  # fmt: skip
