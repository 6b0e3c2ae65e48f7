"""A callback for transformers' ``Trainer``: ``Trainer(model, …, callbacks=[MixtureCallback()])``."""

from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from intbmoe.connection import Connection, connect
from intbmoe.steps import plan_steps


class MixtureCallback(TrainerCallback):
    """Tells the mixtures how long training is, and runs their hooks before and after each optimizer step.

    It works for any model with MoE layers. If the model does not collect the auxiliary losses itself, they are added to
    its loss; the layers also get their padding mask, as with ``intbmoe.connect``, whose ``mask`` this takes, too.
    """

    def __init__(self, mask: str | None = None) -> None:
        self._mask = mask
        self._connection: Connection | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, optimizer: torch.optim.Optimizer, **_: Any
    ) -> None:
        plan_steps(model, state.max_steps)
        self._connection = connect(model, optimizer, mask=self._mask)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._connection.remove()
