"""Between a living training and the tensors of a checkpoint."""

from typing import Any

import torch
from torch import Tensor, nn

from intbmoe.checks import require_state
from intbmoe.layer import moe_layers
from intbmoe.train.checkpoint import PARTS, Checkpoint
from intbmoe.train.distribution import assign, whole
from intbmoe.train.errors import TrainingError
from intbmoe.train.optimizer import named_state


def collect_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """All tensors of a training, whole and by name. With a sharded model all ranks must call this together."""
    return {
        "model": {name: whole(value) for name, value in model.state_dict().items()},
        "optimizer": {f"{name}/{what}": whole(value) for name, what, value in named_state(model, optimizer)},
        "statistics": {
            f"{name}/{key}": value
            for name, layer in moe_layers(model)
            for key, value in layer.statistics.window.items()
        },
    }


def describe_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[dict[str, Any]]:
    """The optimizer's groups: their settings, and the names of their parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [names[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's tensors back. Names and shapes must be exactly those of the model."""
    tensors = {part: dict(checkpoint.tensors[part]) for part in PARTS}
    restore_model(model, tensors["model"], f"the checkpoint of step {checkpoint.step}")
    _restore_optimizer(model, optimizer, tensors["optimizer"])
    for name, layer in moe_layers(model):
        prefix = f"{name}/"
        device = next(layer.parameters()).device
        window = {
            key.removeprefix(prefix): value.to(device)
            for key, value in tensors["statistics"].items()
            if key.startswith(prefix)
        }
        layer.statistics.restore(window, checkpoint.state["warned"].get(name, ()))


def restore_model(model: nn.Module, tensors: dict[str, Tensor], source: str) -> None:
    """Put parameters and buffers back, into shards too."""
    own = model.state_dict()
    try:
        require_state("its", tensors, own, dtypes=True)
    except (KeyError, ValueError) as error:
        raise TrainingError(f"{source} is of another model: {error.args[0]}") from error
    for name, target in own.items():
        assign(target, tensors[name])


def _restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, quantity = key.rpartition("/")
        parameter = parameters[name]
        if value.shape == parameter.shape and quantity != "step":
            state = torch.zeros_like(parameter, requires_grad=False)
            assign(state, value)
        else:
            state = value.to(parameter.device)
        optimizer.state[parameter][quantity] = state


def warned_layers(model: nn.Module) -> dict[str, list[int]]:
    """The dead experts that a warning has named, by layer."""
    return {name: sorted(layer.statistics.warned) for name, layer in moe_layers(model) if layer.statistics.warned}
