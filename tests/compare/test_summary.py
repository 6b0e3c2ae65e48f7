"""What a row of a comparison is made of."""

import torch
from torch import nn

import intbmoe
from intbmoe.compare.summary import active_experts

DIM, LENGTH, VALID = 8, 10, 4


class Padded:
    """A task of sequences whose first ``VALID`` tokens are valid and whose others are padding."""

    def split(self, name):
        return self

    def __len__(self):
        return 6

    def batch(self, indices, epoch, seed):
        mask = torch.zeros(len(indices), LENGTH, dtype=torch.bool)
        mask[:, :VALID] = True
        return {"x": torch.randn(len(indices), LENGTH, DIM), "mask": mask}

    def prepare(self, batch, generator):
        return batch

    def evaluate(self, model, batch):
        model(batch["x"], batch["mask"])


class Stack(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x, mask)


def test_experts_per_token_are_divided_by_valid_tokens_only():
    switch, two = (intbmoe.create(name, DIM, 16, experts=4) for name in ("switch", "vmoe"))
    assert active_experts(Padded(), Stack(switch)) == 1
    assert active_experts(Padded(), Stack(switch, two)) == 1.5  # V-MoE gives every token two
