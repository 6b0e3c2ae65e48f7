"""For transformers' ``Trainer``: ``Trainer(model, …, callbacks=[MixtureCallback()])``."""

from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from intbmoe.connection import Connection, connect
from intbmoe.steps import plan_steps


class MixtureCallback(TrainerCallback):
    """Tells the mixtures how long the training is, and runs what they do before and after each optimizer step.

    For any model with MoE layers: one that does not collect the auxiliary losses itself gets them added to its loss,
    and its layers their padding mask, as ``intbmoe.connect`` does.
    """

    def __init__(self) -> None:
        self._connection: Connection | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, optimizer: torch.optim.Optimizer, **_: Any
    ) -> None:
        plan_steps(model, state.max_steps)
        self._connection = connect(model, optimizer)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._connection.remove()
