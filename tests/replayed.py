"""A small IntBMoE in training steps that are replayed from graphs, and how to compare them with launched ones.

Without a GPU, a graph is the recorded function itself, so that the code around it can be tested.
"""

import pytest
import torch

import intbmoe
from intbmoe.graphs import replay, training

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)
DIM = 16
FIRST = training.IN_A_ROW


def counting(monkeypatch, graph, method):
    """Switch replays on, also on the CPU; yield a list with one entry for each call of the graphs' ``method``."""
    replay._found.clear()
    monkeypatch.setattr(replay, "enabled", True)
    counted, run = [], getattr(graph, method)
    monkeypatch.setattr(graph, method, lambda *given: counted.append(1) or run(*given))
    on_gpu = replay._on_default_stream
    monkeypatch.setattr(replay, "_on_default_stream", lambda x: on_gpu(x) if x.is_cuda else True)
    yield counted
    replay._found.clear()  # on the CPU a graph keeps its layer alive


def make(device, **options):
    torch.manual_seed(0)
    layer = intbmoe.IntBMoE(DIM, **{"hidden": 24, "experts": 3, "blocks": 4, **options})
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return layer.to(device)


def draw(device, tokens=3, **options):
    return torch.randn(2, tokens, DIM, device=device, **options)


def plainly(function, *given):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "enabled", False)
        return function(*given)


def gradients(layer, x, mask=None, autocast=False):
    """The output and all gradients of one forward and backward, and the statistics that it leaves."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        y = layer(x, mask)
    (y.float() ** 2).sum().backward()
    sums = layer.statistics.take_record().sums
    return [y.detach(), x.grad, *(each.grad for each in layer.parameters()), *map(torch.clone, sums.values())]


def equal(found, expected):
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def recorded(layer, *given):
    for _ in range(FIRST):
        gradients(layer, *given)
    return layer
