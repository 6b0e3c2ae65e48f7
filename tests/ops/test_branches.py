"""Branches of a captured graph change the time and nothing else."""

import weakref
from unittest import mock

import pytest
import torch
from fake_streams import fake_streams
from torch import nn

import intbmoe
from intbmoe.ops import branches
from intbmoe.ops.backend import INTERPRETING
from intbmoe.ops.branches import Branches

DIM = 48


class Stack(nn.Module):
    """Layers of several widths, so that one layer reuses memory that another has freed."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        hidden = (64, 200, 96, 160)
        layers = [intbmoe.IntBMoE(DIM, width, experts=6, blocks=5, top_k=2) for width in hidden]
        layers.insert(2, intbmoe.create("deepseek", DIM, 72, experts=5))
        self.layers = nn.ModuleList(layers)
        for layer in self.layers:
            for name, value in options.items():
                if isinstance(layer, intbmoe.IntBMoE):
                    setattr(layer, name, value)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(nn.functional.layer_norm(x, (DIM,)))
        return x


def test_without_a_capture_there_are_none():
    x = torch.randn(3, DIM)
    found = Branches(x)
    with mock.patch.object(torch.cuda, "Stream", side_effect=AssertionError("no stream is needed")):
        assert found.enter(x, torch.bfloat16) == (x, None)
        with found.branch("side", x), found.gradients("side"):
            y = x + 1
        found.mark()
        found.join("side", y, None)
        found.join_all(y)


@pytest.mark.parametrize(
    ("hidden", "half", "options"),
    [
        (24, False, {}),
        ((), False, {}),
        (24, False, {"recompute": True}),
        (24, False, {"backend": "grouped"}),
        (24, True, {"backend": "grouped"}),
    ],
    ids=str,
)
def test_branches_are_joined_and_change_nothing(hidden, half, options):
    torch.manual_seed(0)
    layer = intbmoe.IntBMoE(16, hidden, experts=3, blocks=3, top_k=2)
    layer.backend = "fused" if INTERPRETING else "tiled"
    for name, value in options.items():
        setattr(layer, name, value)
    x, mask = torch.randn(2, 9, 16, requires_grad=True), torch.arange(18).view(2, 9) % 5 > 0
    leaves = [x, *layer.parameters()]

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            y = layer(x, mask)
        return [y, *torch.autograd.grad(y.square().sum(), leaves)]

    expected = step()
    with fake_streams() as streams:
        found = step()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    main, *sides = streams
    assert sides
    assert all(main.has_waited_for(side) for side in sides)


def test_without_gradients_what_a_branch_reads_lives_until_the_forward_ends():
    with fake_streams(), torch.no_grad():
        found, x = Branches(torch.ones(1)), torch.ones(1)
        with found.branch("side", x):
            kept = weakref.ref(x)
        del x
        assert kept() is not None
        del found
        assert kept() is None


def test_under_checkpointing_there_are_none():
    x = mock.Mock(is_cuda=True, numel=lambda: 1)
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        assert branches._may_branch(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            assert not branches._may_branch(x)


def test_a_thread_uses_few_streams():
    with fake_streams() as streams:
        found = Branches(torch.ones(1))
        for number in range(40):
            with found.branch(branches.pool(number)):
                pass
        found.join_all()
    main, *sides = streams
    assert len(sides) == branches.MOST_STREAMS
    assert all(main.has_waited_for(side) for side in sides)


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:The AccumulateGrad node's stream")
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"recompute": True}),
        (torch.bfloat16, {"backend": "grouped"}),
    ],
    ids=str,
)
def test_a_captured_step_gives_the_same_bits(dtype, options):
    model = Stack(**options).cuda().eval()
    inputs = [torch.randn(2, 150, DIM, device="cuda") for _ in range(6)]
    static = inputs[0].clone().requires_grad_()
    leaves = [static, *model.parameters()]

    def step():
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32, cache_enabled=False):
            y = model(static)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    expected = []
    with torch.cuda.stream(side):
        for x in inputs:
            static.data.copy_(x)
            expected.append([value.clone() for value in step()])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    spy = mock.patch.object(Branches, "_start", autospec=True, side_effect=Branches._start)
    with spy as started, torch.cuda.graph(graph):
        found = step()
    # Router, shared expert, codes, coefficients, filter's terms, two pools; with kernels also the filter's term of
    # tokens and three that only take gradients. Weights that are composed where they are used need no branch.
    per_layer = {"backend": 7, "recompute": 6}[next(iter(options))] if options else 11
    assert started.call_count == 4 * per_layer + 1
    for _ in range(5):
        for x, values in zip(inputs, expected, strict=True):
            static.data.copy_(x)
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(found, values, strict=True))


@pytest.mark.gpu
def test_a_captured_forward_gives_the_same_bits():
    model = Stack().cuda().eval()
    x = torch.randn(2, 150, DIM, device="cuda")
    with torch.no_grad():
        for _ in range(2):
            model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        with mock.patch.object(branches, "enabled", False):
            for _ in range(20):
                x.copy_(torch.randn_like(x))
                graph.replay()
                assert torch.equal(y, model(x))


@pytest.mark.gpu
def test_a_shared_module_of_the_users_own_is_no_branch():
    layer = intbmoe.IntBMoE(DIM, 64, experts=4)
    layer.shared = nn.Linear(DIM, DIM)
    layer, x = layer.cuda().eval(), torch.randn(40, DIM, device="cuda")
    streams = []
    layer.shared.register_forward_hook(lambda *_: streams.append(torch.cuda.current_stream()))
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            layer(x)
    assert streams[-1] == main
