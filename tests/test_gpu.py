"""On a CUDA device: no waiting for the device, agreement with float64 on the CPU, exact repeats, graphs, compile.

Run with ``pytest -m gpu tests/test_gpu.py`` on a machine with a GPU.
"""

import copy

import pytest
import torch

import intbmoe
from inductor_code import read_backs
from intbmoe.models.vit import Block, ViT, ViTConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
METHODS = intbmoe.list_methods()
DIM, HIDDEN = 32, 64


def make(name):
    torch.manual_seed(1)
    return intbmoe.create(name, DIM, HIDDEN)


def batch(tokens=24):
    torch.manual_seed(2)
    return torch.randn(3, tokens, DIM), torch.rand(3, tokens) > 0.2


def outputs_and_gradients(layer, x, mask, probe):
    x = x.clone().requires_grad_()
    y = layer(x, mask)
    (y * probe).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
def test_a_step_never_waits_for_the_device(name, autocast, masked):
    layer = make(name).cuda()
    x, mask = (tensor.cuda() for tensor in batch())
    mask = mask if masked else None
    for strict in (False, True):  # the first call may initialise libraries, which waits
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                y = layer(x, mask)
            (y.square().mean() + intbmoe.aux_loss(layer)).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", METHODS)
def test_float32_is_near_float64_on_the_cpu(name):
    layer = make(name).eval()
    x, mask = batch()
    probe = torch.randn(3, 24, DIM, generator=torch.Generator().manual_seed(3))
    exact = outputs_and_gradients(copy.deepcopy(layer).double(), x.double(), mask, probe.double())
    found = outputs_and_gradients(layer.cuda(), x.cuda(), mask.cuda(), probe.cuda())
    for a, b in zip(found, exact, strict=True):
        assert (a.cpu().double() - b).norm() <= 1e-3 * (b.norm() + 1e-3)


@pytest.mark.parametrize("name", METHODS)
def test_training_repeats_bit_for_bit(name):
    runs = []
    for _ in range(2):
        layer = make(name).cuda()
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        x, mask = (tensor.cuda() for tensor in batch(200))
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                y = layer(x, mask)
            (y.square().mean() + intbmoe.aux_loss(layer)).backward()
            intbmoe.before_step(layer, optimizer)
            optimizer.step()
            intbmoe.after_step(layer, optimizer)
        runs.append(layer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(runs[0].values(), runs[1].values(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 7, 1000])
def test_intbmoe_backends_agree_on_the_device(dtype, tokens):
    layer = make("intbmoe").cuda().eval()
    x = torch.randn(1, tokens, DIM, device="cuda")
    exact = copy.deepcopy(layer).double()
    exact.backend = "naive"
    expected = exact(x.double()).float()
    with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
        found = layer(x)
    bound = 2**-6 if dtype == torch.bfloat16 else 1e-4
    assert (found - expected).norm() <= bound * expected.norm()


def test_intbmoe_replays_from_a_cuda_graph():
    layer = intbmoe.precompose(make("intbmoe").cuda().eval(), torch.bfloat16)
    x = torch.randn(2, 50, DIM, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(3):
            layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(torch.randn_like(x) * 3)
        graph.replay()
        assert torch.equal(y, layer(x))


@pytest.mark.parametrize("name", ["intbmoe", "vmoe", "deepseek"])
def test_compiled_layers_keep_the_kernels(name):
    """torch 2.11 reports "exporting" whenever it compiles, which once made layers use plain torch."""
    written = []

    def backend(graph, inputs):
        written.append(str(graph.graph))
        return graph

    x, mask = (tensor.cuda() for tensor in batch())
    torch.compile(make(name).cuda(), fullgraph=True, backend=backend)(x, mask)
    wanted = ["intbmoe.permute", "intbmoe.gated_rows" if name == "intbmoe" else "intbmoe.fused_mm"]
    assert all(any(operation in text for text in written) for operation in wanted), written


@pytest.mark.parametrize("name", METHODS)
def test_compiled_gradients_are_the_ordinary_ones(name):
    plain = make(name).cuda().eval()  # in training some methods draw random numbers, and compiled code draws others
    compiled = copy.deepcopy(plain)
    compiled.compile()
    x, mask = (tensor.cuda() for tensor in batch(200))
    probe = torch.randn_like(x)
    found, expected = (outputs_and_gradients(layer, x, mask, probe) for layer in (compiled, plain))
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-4 * (b.norm() + 1e-3)


def assert_trains_alike(plain, compiled, x, dtype=torch.bfloat16):
    """Compare outputs and gradients, and search the generated code for kernels that read back other threads' stores.

    Gradients of single numbers (λ) are compared only in float32: they are sums over all tokens whose terms cancel, so
    bfloat16's rounding can leave little of them.
    """
    from torch._inductor.utils import run_and_get_code

    probe = torch.randn_like(plain(x))

    def outputs_and_gradients(model):
        model.zero_grad()
        inputs = x.clone().requires_grad_()
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            y = model(inputs)
        (y * probe).sum().backward()
        smallest = 1 if dtype == torch.float32 else 2
        gradients = (p.grad.clone() for p in model.parameters() if p.grad is not None and p.numel() >= smallest)
        return [y.detach(), inputs.grad, *gradients]

    expected, (found, codes) = outputs_and_gradients(plain), run_and_get_code(outputs_and_gradients, compiled)
    assert len(codes) >= 2, "of forward and backward"
    assert not [kernel for code in codes for kernel in read_backs(code)]
    for again in (found, outputs_and_gradients(compiled)):
        for a, b in zip(again, expected, strict=True):
            assert (a - b).norm() <= (1e-4 if dtype == torch.float32 else 0.1) * (b.norm() + 1e-3)


@pytest.mark.parametrize(("name", "backend"), [*((name, None) for name in METHODS), ("intbmoe", "grouped")])
def test_compiled_blocks_train_as_ordinary_ones(name, backend):
    """A block with a class token, where a gather of the layer, fused into the norm, once went wrong."""
    from intbmoe.train.distribution import compile_in_place

    torch.manual_seed(1)
    config = ViTConfig(image_size=32, patch_size=4, dim=192, heads=3, hidden=64)
    plain = Block(config, 0.0, intbmoe.create(name, 192, 64)).cuda().eval()
    if backend:
        plain.moe.backend = backend
    compiled = copy.deepcopy(plain)
    compile_in_place(compiled)
    assert_trains_alike(plain, compiled, torch.randn(64, 1 + config.patches, 192, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [None, "vmoe", "intbmoe"])
def test_a_whole_vit_compiled_at_once_trains_as_the_ordinary_one(name, dtype, monkeypatch):
    """Where patches, their class token and a norm meet, as in torch's own example of such kernels.

    Float32 without TF32, which the patches' convolution uses by default: its rounding can change a token's experts.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(1)
    config = ViTConfig(image_size=32, patch_size=4, hidden=64, depth=2, moe_layers=(0,), classes=10)
    plain = ViT(config, (lambda: intbmoe.create(name, 192, 64)) if name else None).cuda().eval()
    compiled = torch.compile(copy.deepcopy(plain), fullgraph=True)
    assert_trains_alike(plain, compiled, torch.randn(64, 3, 32, 32, device="cuda"), dtype)


def test_intbmoe_compiles_whole_and_trains():
    eager, compiled = make("intbmoe").cuda(), make("intbmoe").cuda()
    run = torch.compile(compiled, fullgraph=True)
    x, mask = (tensor.cuda() for tensor in batch())
    for layer, call in ((eager, eager), (compiled, run)):
        call(x, mask).square().sum().backward()
        assert intbmoe.aux_loss(layer) == 0
    for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 1e-3 * (a.grad.norm() + 1e-6)
