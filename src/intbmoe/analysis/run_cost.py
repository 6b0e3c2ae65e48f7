"""The inference cost of a run's IntBMoE with more or fewer expert bases, composed in every forward and precomposed.

The run's own model is rebuilt for every E, with everything else as in its recipe, and run on one example. FLOPs and the
peak bytes of live tensors are counted on the CPU and are the same on every machine (``counting.py``). On a GPU, the
memory its allocator handed out, including kernels' scratch space, is measured as well.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from intbmoe.analysis.cost import SWEEP, Setting, Swept, sweep_experts
from intbmoe.precomposition import precompose
from intbmoe.tasks import make_task
from intbmoe.tasks.recipe import Recipe

MOST_BYTES = 2**32  # of parameters: a sweep leaves out larger models, which may not fit on this machine


@dataclass(frozen=True)
class CostRow(Swept):
    allocated: int | None
    allocated_precomposed: int | None  # peak bytes that the GPU's allocator handed out; None without a GPU


@dataclass(frozen=True)
class RunCost:
    experts: int  # the run's own E
    device: str  # where the allocated bytes were measured; "cpu" if they were not
    sweep: list[CostRow]
    too_large: list[int]  # numbers of bases left out, because the parameters exceed ``MOST_BYTES``

    def rows(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.sweep]


def measure_run_cost(recipe: Recipe, device: torch.device | str = "cpu") -> RunCost:
    """Sweep the bases of a recipe's IntBMoE over ``SWEEP`` and the recipe's own number."""
    own = own_experts(recipe)
    experts = sorted({*SWEEP, own})
    too_large = [count for count in experts if _parameter_bytes(recipe, count) > MOST_BYTES]
    setting = Setting(
        name=recipe.name,
        title=recipe.name,
        build=lambda _, count: _build(recipe, count),
        inputs=make_task(recipe).example_inputs,
        experts=own,
        methods=("intbmoe",),
    )
    device = torch.device(device)
    rows = []
    for count in (count for count in experts if count not in too_large):
        counted = asdict(sweep_experts(setting, count)).values()
        rows.append(CostRow(*counted, *(_allocated(recipe, count, device) if device.type == "cuda" else (None, None))))
    return RunCost(own, device.type, rows, too_large)


def own_experts(recipe: Recipe) -> int:
    """The recipe's number of bases: an option of the method overrides the paper's E."""
    return recipe.moe.options.get("experts", recipe.moe.experts)


def _build(recipe: Recipe, experts: int) -> nn.Module:
    """The recipe's model with ``experts`` bases, untrained."""
    options = {name: value for name, value in recipe.moe.options.items() if name != "experts"}
    moe = replace(recipe.moe, experts=experts, options=options)
    return make_task(replace(recipe, moe=moe)).make_model()


def _parameter_bytes(recipe: Recipe, experts: int) -> int:
    """The bytes of a model's parameters, without allocating them."""
    with torch.device("meta"):
        return sum(parameter.numel() * parameter.element_size() for parameter in _build(recipe, experts).parameters())


def _allocated(recipe: Recipe, experts: int, device: torch.device) -> tuple[int, int]:
    """Peak bytes on the GPU beyond what was allocated before: as trained, and precomposed."""
    inputs = tree_map_only(torch.Tensor, lambda value: value.to(device), make_task(recipe).example_inputs())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _build(recipe, experts).eval()
    found = []
    for make in (lambda: model, lambda: precompose(model.cpu())):
        before = torch.cuda.memory_allocated(device)
        placed = make().to(device)
        torch.cuda.reset_peak_memory_stats(device)
        with torch.no_grad():
            placed(*inputs)
        found.append(torch.cuda.max_memory_allocated(device) - before)
        model.cpu()
        del placed
    return found[0], found[1]
