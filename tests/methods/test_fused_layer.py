"""Layers run by Triton's kernels against the specification in float64 (``tests/interpreter.py``)."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import intbmoe
from intbmoe.ops.backend import TRITON
from interpreter import INTERPRETING, on_device

if not TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from intbmoe.ops import tiles
from intbmoe.ops.scores import fused as scores_fused

DIM, HIDDEN, TOKENS = (6, 11, 5) if INTERPRETING else (12, 22, 17)
SWITCHES = {
    "plain": {},
    "no gate": {"gate": False},
    "no filter": {"filter": False},
    "no shared": {"shared": False},
    "softmax": {"coefficients": "softmax"},
    "fixed scale": {"learn_scale": False},
    "one layer": {"hidden": ()},
    "three layers": {"hidden": (20, 13)},
    "one block": {"blocks": 1, "top_k": 1},
    "all blocks": {"blocks": 3, "top_k": 3},
    "linear hypernetwork": {"hypernetwork": "linear"},
    "no bias": {"bias": False},
    "shared mlp": {"shared_kind": "mlp"},
    "two shared": {"shared_experts": 2},
    "gate LayerNorm": {"gate_norm": "layer"},
    "gate without norm": {"gate_norm": "none"},
    "no LayerNorm": {"layer_norm": False},
}
CASES = [*((s, False) for s in SWITCHES), ("plain", True), ("no gate", True), ("gate LayerNorm", True)]
if INTERPRETING:  # each takes a second, so one layer has several switches where they do not exclude each other
    CASES = [("plain", False), ("plain", True), ("no gate, no bias", True), ("gate LayerNorm", True)]
    CASES += [("gate without norm, no LayerNorm", False), ("one block", False), ("no filter, two shared", False)]
    CASES += [("three layers, shared mlp, all blocks", False), ("one layer, linear hypernetwork", False)]


def outputs_and_gradients(layer, x, mask, probe):
    x = x.clone().requires_grad_()
    y = layer(x, mask)
    (y * probe).sum().backward()
    parameters = layer.parameters() if isinstance(layer, torch.nn.Module) else ()
    return [y.detach(), x.grad, *(parameter.grad for parameter in parameters)]


TERMS = 2 * TOKENS * 2 * (20 + 13 + DIM)
"""Terms of the longest sum: λ's gradient, over all rows and columns. Its rounding error can be larger than the sum."""


def agree(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a.cpu().double() - b).norm() <= 1e-5 * (b.norm() + 0.02 * TERMS**0.5)


def make(name="intbmoe", **options):
    torch.manual_seed(0)
    if name == "intbmoe":
        options = {"hidden": HIDDEN, "experts": 5, "blocks": 4, **options}
    layer = intbmoe.create(name, DIM, **{"hidden": HIDDEN, **options})
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return layer.eval()


def inputs(tokens=TOKENS):
    torch.manual_seed(1)
    return torch.randn(2, tokens, DIM), torch.rand(2, tokens) > 0.2, torch.randn(2, tokens, DIM)


@on_device
@pytest.mark.parametrize(
    ("switches", "recompute"),
    CASES,
)
def test_every_switch(device, switches, recompute):
    options = [SWITCHES[switch] for switch in switches.split(", ")]
    layer = make(**{name: value for chosen in options for name, value in chosen.items()})
    exact = copy.deepcopy(layer).double()
    exact.backend = "naive"
    x, mask, probe = inputs()
    expected = outputs_and_gradients(exact, x.double(), mask, probe.double())
    layer = layer.to(device)
    layer.recompute = recompute
    found = outputs_and_gradients(layer, x.to(device), mask.to(device), probe.to(device))
    agree(found, expected)
    composed = layer.precompose()
    assert (composed(x.to(device), mask.to(device)) - found[0]).norm() <= 1e-5 * found[0].norm()


@on_device
@pytest.mark.parametrize("switch", ["gate LayerNorm", "gate without norm", "no LayerNorm"])
def test_forms_without_kernels_leave_rows_of_no_block_alone(device, switch, monkeypatch):
    """As on a GPU, where the number of masked tokens is not read back: they stay there, as rows without a block."""
    monkeypatch.setattr("intbmoe.parts.dispatch.readable", lambda ids: False)
    layer = make(**SWITCHES[switch])
    exact = copy.deepcopy(layer).double()
    exact.backend = "naive"
    x, mask, probe = inputs()
    expected = outputs_and_gradients(exact, x.double(), mask, probe.double())
    agree(outputs_and_gradients(layer.to(device), x.to(device), mask.to(device), probe.to(device)), expected)


@on_device
def test_an_odd_width_is_filled_up_for_large_products(device, monkeypatch):
    monkeypatch.setattr("intbmoe.ops.aligned_linear.LARGE_PRODUCT", 0)
    torch.manual_seed(0)
    layer = intbmoe.create("intbmoe", 7, hidden=HIDDEN, experts=5, blocks=4).eval()
    exact = copy.deepcopy(layer).double()
    exact.backend = "naive"
    x, probe = torch.randn(2, TOKENS, 7), torch.randn(2, TOKENS, 7)
    expected = outputs_and_gradients(exact, x.double(), None, probe.double())
    agree(outputs_and_gradients(layer.to(device), x.to(device), None, probe.to(device)), expected)


@on_device
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one(device, tokens):
    layer = make().to(device)
    x, mask, probe = (tensor.to(device) for tensor in inputs(tokens))
    found = outputs_and_gradients(layer, x, torch.ones_like(mask), probe)
    assert all(tensor.isfinite().all() for tensor in found)


@on_device
@pytest.mark.parametrize("name", ["switch", "deepseek", "dynmoe"])
def test_sparse_baselines_share_the_kernels(device, name):
    layer = make(name)
    x, mask, probe = inputs()
    expected = outputs_and_gradients(copy.deepcopy(layer).double(), x.double(), mask, probe.double())
    found = outputs_and_gradients(layer.to(device), x.to(device), mask.to(device), probe.to(device))
    agree(found, expected)


@on_device
def test_activation_checkpointing_changes_no_gradient(device):
    layer = make().to(device)
    x, mask, probe = (tensor.to(device) for tensor in inputs())
    expected = outputs_and_gradients(layer, x, mask, probe)
    layer.zero_grad()
    found = outputs_and_gradients(lambda x, mask: checkpoint(layer, x, mask, use_reentrant=False), x, mask, probe)
    assert all(map(torch.equal, found, expected[:2]))
    assert all(map(torch.equal, [parameter.grad for parameter in layer.parameters()], expected[2:]))


@on_device
def test_compiles_into_one_graph(device):
    layer = make().to(device)
    x, mask, probe = (tensor.to(device) for tensor in inputs())
    expected = outputs_and_gradients(layer, x, mask, probe)
    layer.zero_grad()
    backend = "aot_eager" if INTERPRETING else "inductor"
    found = outputs_and_gradients(torch.compile(layer, fullgraph=True, backend=backend), x, mask, probe)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-5 * (b.norm() + 1e-2)


@on_device
def test_compiles_for_a_range_of_tokens(device, monkeypatch):
    monkeypatch.setattr(tiles, "ENOUGH_WARPS", 1)  # so that even so few tokens have tilings of their own
    monkeypatch.setattr(scores_fused, "ENOUGH_PROGRAMS", 1)
    layer = make().to(device)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, dynamic=True, fullgraph=True, backend=backend)
    counts = []
    for tokens in (TOKENS, TOKENS + 1, 4 * TOKENS, 4 * TOKENS + 1):
        compiled(torch.randn(1, tokens, DIM, device=device, requires_grad=True)).sum().backward()
        counts.append(backend.frame_count)
    assert counts[0] == counts[1]
    assert counts[2] == counts[3] <= counts[0] + 1


@on_device
def test_a_nan_spoils_its_own_token_alone(device):
    layer = make().to(device)
    x = inputs()[0].to(device)
    x[1, 2, 3] = torch.nan
    assert layer(x).isnan().any(-1).nonzero().tolist() == [[1, 2]]
    layer.codebook.data[0, 0] = torch.nan
    assert layer(x).isnan().all(-1).any()


@on_device
def test_flops_are_those_of_the_plain_backend(device):
    from torch.utils.flop_counter import FlopCounterMode

    counts = {}
    for backend in ("fused", "grouped"):
        layer = make(shared_hidden=16).to(device)  # other sizes are padded with zeros, which are multiplied too
        layer.backend = backend
        x = inputs()[0].to(device)
        with FlopCounterMode(display=False) as counter:
            layer(x)
        counts[backend] = counter.get_total_flops()
    assert counts["fused"] == counts["grouped"]


@on_device
def test_tokens_may_lie_in_memory_as_they_like(device):
    layer = make().to(device)
    x = torch.randn(1, DIM, 9, device=device).transpose(1, 2)
    probe = torch.randn(1, DIM, 9, device=device).transpose(1, 2)
    expected = outputs_and_gradients(layer, x.contiguous(), None, probe.contiguous())
    layer.zero_grad()
    found = outputs_and_gradients(layer, x, None, probe)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-6 * (b.norm() + 1)


@pytest.fixture
def launches(monkeypatch):
    """Names of the Triton kernels that were launched."""
    from triton.runtime.jit import KernelInterface

    from intbmoe.ops import launch

    names = []
    plain = KernelInterface.__getitem__

    def recording(kernel, grid):
        names.append(kernel.fn.__name__)
        return plain(kernel, grid)

    monkeypatch.setattr(KernelInterface, "__getitem__", recording)
    monkeypatch.setattr(launch, "_compiled", {})  # compiled kernels would be launched without a lookup by name
    return names


@on_device
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("backend", ["fused", "grouped", "tiled", "naive"])
def test_only_the_fused_backend_starts_kernels(device, backend, recompute, launches):
    layer = make().to(device)
    layer.backend, layer.recompute = backend, recompute
    x, mask, probe = (tensor.to(device) for tensor in inputs(tokens=1))
    outputs_and_gradients(layer, x, mask, probe)
    layer.precompose()(x, mask)
    assert (len(launches) > 0) == (backend == "fused"), launches
