"""A method made for testing the contract itself."""

from dataclasses import KW_ONLY, dataclass

import torch
from torch import nn

from intbmoe.layer import LayerConfig, MoELayer, Quantities, Result, Routing


@dataclass(frozen=True)
class EchoConfig(LayerConfig):
    _: KW_ONLY
    factor: float = 1.0


class Echo(MoELayer):
    """y = gain·x, with a loss and a load that show what the contract does with them."""

    Config = EchoConfig

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.full((1,), float(self.config.factor)))

    @property
    def choices(self):
        return 2

    def compute(self, x, mask, state, dtype):
        self.seen = (x.shape, mask, dtype, torch.is_autocast_enabled("cpu"))
        ids = torch.zeros(x.shape[0] * x.shape[1], 1, dtype=torch.int64)
        load = torch.tensor([x.shape[0] * x.shape[1] if mask is None else int(mask.sum()), 0])
        losses = {"size": self.gain.square().sum()}
        return Result(x * self.gain, Routing(ids, ids.float()), losses, {"load": load})

    def quantities(self):
        return Quantities(1, 1, 0)
