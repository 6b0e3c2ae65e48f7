"""Small MASS layers, and steps whose gradients follow a script."""

import torch

import intbmoe

DIM, HIDDEN = 6, 5
UP = [[1.0, 1.0, 0.0, 0.0]] * 12 + [[1.0, 10.0, 0.0, 0.0]] * 5  # expert 1 drifts at the last of these


PHASES = {"warmup": 50, "window": 200, "expansion_steps": 1000}


def make(**options):
    torch.manual_seed(0)
    return intbmoe.create("mass", DIM, HIDDEN, **{"experts": 4, **PHASES, **options}).double()


def growing(**options):
    """A layer with small windows, and a cosine test that a gradient orthogonal to the weights passes."""
    return make(**{"window": 8, "warmup": 3, "similarity": 1e-6, **options})


def tokens(*shape, seed=1):
    return torch.randn(*shape, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def scripted(layer, norms, optimizer=None, reevaluate=None):
    """One step for each row of ``norms``: the norm of every expert's first gradient, orthogonal to its weights."""
    first = layer.experts.gate.weight if layer.config.expert == "swiglu" else layer.experts.up.weight
    generator = torch.Generator().manual_seed(3)
    for row in norms:
        layer(tokens(1, 2))
        intbmoe.aux_loss(layer)
        for parameter in layer.parameters():
            parameter.grad = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        for e, norm in enumerate(row):
            weight, grad = first[e].detach(), first.grad[e]
            grad -= (grad * weight).sum() / weight.square().sum() * weight
            grad *= norm / grad.norm()
        intbmoe.before_step(layer, optimizer, reevaluate)
        if optimizer is not None:
            optimizer.step()
        intbmoe.after_step(layer, optimizer)
