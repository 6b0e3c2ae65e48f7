"""A task whose model is one layer and whose classes are its outputs, small enough to compute by hand."""

from types import SimpleNamespace

import torch
from torch import nn

from intbmoe.analysis.sample import Sample
from intbmoe.tasks.looking import View
from intbmoe.train.distribution import Ranks


class OneLayer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.moe = layer

    def forward(self, batch):
        return self.moe(batch["x"], batch["mask"])


class LayerExamples:
    def __init__(self, x, mask, labels):
        self.arrays = {"x": x, "mask": mask, "labels": labels}

    def __len__(self):
        return len(self.arrays["x"])

    def batch(self, indices, epoch, seed):
        return {name: array[list(indices)] for name, array in self.arrays.items()}


class LayerTask:
    """``metric`` is "accuracy" of the largest output, or "loss", the mean square of all outputs."""

    def __init__(self, x, mask=None, metric="accuracy", classes=8):
        self.metric, self.higher_is_better = metric, metric == "accuracy"
        self.recipe = SimpleNamespace(model=SimpleNamespace(classes=classes))
        mask = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        self.examples = LayerExamples(x, mask, torch.arange(len(x)) % classes)

    name = "layer"

    def views(self):
        names = tuple(str(label) for label in range(self.recipe.model.classes))
        words = tuple((f"class {name}",) for name in names)
        return [View("class", names, lambda b: b["labels"].unsqueeze(1), words, lambda of: of.arrays["labels"].numpy())]

    def split(self, name):
        return self.examples

    def prepare(self, batch, generator):
        assert generator is None, "an analysis never varies its examples"
        return batch

    def evaluate(self, model, batch):
        return {name: values.sum() for name, values in self.evaluate_examples(model, batch).items()}

    def evaluate_examples(self, model, batch):
        y = model(batch)
        correct = y[:, 0].argmax(-1) == batch["labels"]
        return {"count": torch.ones(len(y)), "accuracy": correct, "loss": y.square().mean((1, 2))}

    def metrics(self, sums):
        return {name: sums[name] / sums["count"] for name in ("accuracy", "loss")}


def sample_of(task, examples=100, batch_size=5):
    return Sample(task, "valid", examples, Ranks(), batch_size)


def force(layer, *blocks):
    """Send every token to these blocks, the first with the largest weight."""
    with torch.no_grad():
        layer.router.scores.weight.zero_()
        layer.router.scores.bias.zero_()
        for place, block in enumerate(blocks):
            layer.router.scores.bias[block] = 100 - place
    return layer
