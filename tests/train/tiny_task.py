"""A task of random tokens that trains in milliseconds, with every source of randomness that a real task has."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import intbmoe
from intbmoe.tasks import Task, register_task
from intbmoe.tasks.recipe import MoESettings, Recipe, TrainSettings
from intbmoe.train.data import make_generator

DIM, TOKENS, CLASSES = 8, 4, 3


@dataclass(frozen=True)
class TinyData:
    examples: int = 40
    noise: float = 0.1
    """Size of the noise on each example (augmentation) and on whole batches (mixing)."""
    poison: int = -1
    """The example that is NaN."""


@dataclass(frozen=True)
class TinyModelConfig:
    dropout: float = 0.1
    double: bool = False
    apart: bool = False
    """Whether one more mixture lies outside the blocks, as in a recommender's head."""


@dataclass(frozen=True)
class TinyRecipe(Recipe):
    data: TinyData = field(default_factory=TinyData)
    model: TinyModelConfig = field(default_factory=TinyModelConfig)


class TinyExamples:
    def __init__(self, data, split):
        generator = torch.Generator().manual_seed({"train": 1, "valid": 2, "test": 3}[split])
        count = data.examples if split == "train" else 14
        self.labels = torch.randint(CLASSES, (count,), generator=generator)
        centres = torch.randn(CLASSES, TOKENS, DIM, generator=torch.Generator().manual_seed(0))
        self.x = centres[self.labels] + torch.randn(count, TOKENS, DIM, generator=generator)
        self.noise = data.noise if split == "train" else 0.0
        if split == "train" and data.poison >= 0:
            self.x[data.poison] = torch.nan

    def __len__(self):
        return len(self.labels)

    def batch(self, indices, epoch, seed):
        noise = [torch.randn(TOKENS, DIM, generator=make_generator(seed, "noise", epoch, i)) for i in indices]
        return {"x": self.x[indices] + self.noise * torch.stack(noise), "y": self.labels[indices]}


class TinyBlock(nn.Module):
    def __init__(self, moe, dropout):
        super().__init__()
        self.moe = moe
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.moe(x))


class TinyModel(nn.Module):
    def __init__(self, make_ffn, dropout, apart):
        super().__init__()
        self.blocks = nn.ModuleList(TinyBlock(make_ffn(), dropout) for _ in range(2))
        self.apart = TinyBlock(make_ffn(), dropout) if apart else nn.Identity()
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        x = x.to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.apart(x)).mean(1))


@register_task("tiny")
class TinyTask(Task):
    recipe_type = TinyRecipe
    metric = "accuracy"
    higher_is_better = True

    def make_model(self):
        moe = self.recipe.moe
        options = intbmoe.match_budget(moe.name, DIM, 8, experts=moe.experts) | moe.options
        one = self.recipe.model
        model = TinyModel(lambda: intbmoe.create(moe.name, DIM, **options), one.dropout, one.apart)
        return model.double() if one.double else model

    def split(self, name):
        return TinyExamples(self.recipe.data, name)

    def prepare(self, batch, generator):
        if generator is None:
            return batch
        return {**batch, "x": batch["x"] + self.recipe.data.noise * torch.randn((), generator=generator)}

    def loss(self, model, batch):
        loss = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
        return loss, batch["y"].new_full((), len(batch["y"]))

    def evaluate_examples(self, model, batch):
        scores = model(batch["x"])
        return {
            "loss": F.cross_entropy(scores, batch["y"], reduction="none"),
            "right": scores.argmax(1) == batch["y"],
            "count": torch.ones_like(batch["y"]),
        }

    def metrics(self, sums):
        return {"accuracy": sums["right"] / sums["count"], "loss": sums["loss"] / sums["count"]}

    def example_inputs(self):
        return (torch.zeros(1, TOKENS, DIM),)


OPTIONS = {
    "switch": {"jitter": 0.0},
    "deepseek": {"bias_speed": 0.01},
    "remoe": {"sparsity_strength": 1e-3},
    "dynmoe": {"update_every": 3, "adaptation": 1.0},
    # Drift is tested from the third step on and nearly always found, so that pools grow in these few steps. With a
    # mass of 0.5, tokens would have one expert, routers no gradient, and a copy would long tie with its source.
    "mass": {
        "top_p": 0.9,
        "window": 3,
        "warmup": 1,
        "significance": 0.6,
        "similarity": 1.0,
        "patience": 2,
        "expansion": 1.0,
    },
}
"""Options with which a method's state changes within a few steps."""


def tiny_recipe(method="switch", *, data=None, model=None, **train):
    """40 examples in batches of 8: five steps per epoch."""
    settings = TrainSettings(
        **{"epochs": 2.0, "batch": 8, "lr": 0.01, "log_every": 2, "checkpoint_every": 3, "warmup": 0.4, **train}
    )
    moe = MoESettings(name=method, experts=4, options=OPTIONS.get(method, {}))
    return TinyRecipe("tiny", "tiny", TinyData(**(data or {})), TinyModelConfig(**(model or {})), moe, settings)


def still(recipe):
    """The recipe in float64 without dropout and noise, to compare runs that divide a batch in different ways."""
    return replace(recipe, data=replace(recipe.data, noise=0.0), model=replace(recipe.model, dropout=0.0, double=True))


def assert_close_metrics(run, expected, rel=1e-9):
    """The same lines with the same values, up to rounding in float64 (eps 2e-16, amplified over a few Adam steps)."""
    for row, other in zip(run.metrics(), expected.metrics(), strict=True):
        assert row.keys() == other.keys()
        assert row.pop("split") == other.pop("split")
        assert row == pytest.approx(other, rel=rel, abs=1e-12)
