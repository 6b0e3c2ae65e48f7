"""SwiGLU networks by Triton's kernels against their specification in float64, outputs and gradients.

The interpreter runs them where there is no GPU (``tests/interpreter.py``).
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from intbmoe.ops.backend import TRITON
from interpreter import INTERPRETING, on_device
from near import gradients_near, near, pairs

if not TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from intbmoe.ops.swiglu import fused as swiglu_fused
from intbmoe.ops.swiglu import fused_hidden, fused_product, fused_tokens, fused_weights, naive, swiglu

HALVES = {torch.float16: 2**-9} if INTERPRETING else {torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""How far a result may be from the exact one, as a share of the norm; the interpreter multiplies bfloat16 wrongly."""


def maps(dim, hidden, dtype=torch.float32):
    """The tensors of a network, of a size at which its sums are about one."""
    shapes = (hidden, dim), (hidden, dim), (dim, hidden)
    return [(torch.randn(shape) / shape[1] ** 0.5).to(dtype) for shape in shapes]


def check_halves(device, tokens, dim, hidden, dtype, weights=torch.float32):
    x, probe = torch.randn(2, tokens, dim).to(dtype)
    quick = [each.to(device, copy=True).requires_grad_() for each in (x, *maps(dim, hidden, weights))]
    # The products take the weights in the type of the tokens.
    exact = [each.detach().cpu().to(dtype).double().requires_grad_() for each in quick]
    y = swiglu(*quick, "fused")
    expected = naive.swiglu(*exact)
    y.backward(probe.to(device))
    expected.backward(probe.double())
    for found, wanted in ((y, expected), *((a.grad, b.grad) for a, b in zip(quick, exact, strict=True))):
        assert found.shape == wanted.shape
        assert (found.cpu().double() - wanted).norm() <= HALVES[dtype] * wanted.norm()
    assert [each.grad.dtype for each in quick] == [dtype, *3 * [weights]]
    with torch.no_grad():
        assert torch.equal(swiglu(*quick, "fused"), y)
    return quick


@pytest.fixture
def calls(monkeypatch):
    """Counts the launches of each kernel."""
    found = {}
    for module in (fused_product, fused_hidden, fused_tokens, fused_weights):

        def counted(kernel, *arguments, launch=module.launch, **constants):
            found[kernel.fn.__name__] = found.get(kernel.fn.__name__, 0) + 1
            launch(kernel, *arguments, **constants)

        monkeypatch.setattr(module, "launch", counted)
    return found


@on_device
@pytest.mark.parametrize("tokens", (0, 1, 70) if INTERPRETING else (0, 1, 7, 8192))
@pytest.mark.parametrize("width", [12, 37] if INTERPRETING else [37, 2844])
def test_float32(device, tokens, width):
    shapes = (tokens, 5), (width, 5), (width, 5), (5, width)
    quick, exact = pairs(device, *(torch.randn(shape) for shape in shapes))
    y = swiglu(*quick, "fused")
    expected = naive.swiglu(*exact)
    near(y, expected)
    probe = torch.randn(tokens, 5)
    y.backward(probe.to(device))
    expected.backward(probe.double())
    gradients_near(quick, exact)


@on_device
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kernels", ["narrow", "wide", "none"])
@pytest.mark.parametrize(
    ("tokens", "dim", "hidden"), [(0, 8, 8), (1, 16, 8), (150, 72, 200), (333, 136, 61), (141, 72, 150)]
)
def test_halves(device, tokens, dim, hidden, dtype, kernels, monkeypatch, calls):
    monkeypatch.setattr(fused_product, "PROCESSORS", 2)
    monkeypatch.setattr(fused_product, "FEWEST_TILES", 1000 if kernels == "none" else 1)
    monkeypatch.setattr(fused_tokens, "WIDEST", 256 if kernels == "narrow" else 0)
    if kernels == "none":
        monkeypatch.setattr(fused_hidden, "WIDEST", 0)
        monkeypatch.setattr(fused_weights, "MOST_ENTRIES", 0)
    check_halves(device, tokens, dim, hidden, dtype)
    gradient = "_token_gradient" if kernels == "narrow" else "_hidden_gradient"
    assert calls == ({} if kernels == "none" or tokens == 0 else {"_gate_and_up": 2, gradient: 1, "_parts": 1})


@on_device
@pytest.mark.parametrize(("dim", "hidden"), [(72, 80), (72, 75)], ids=["as they are", "padded"])
def test_weights_of_the_tokens_type(device, dim, hidden):
    check_halves(device, 77, dim, hidden, torch.float16, torch.float16)


@on_device
def test_tokens_padded_to_an_aligned_width(device, monkeypatch, calls):
    monkeypatch.setattr("intbmoe.ops.aligned_linear.LARGE_PRODUCT", 0)
    check_halves(device, 77, 27, 45, torch.float16)
    assert calls["_token_gradient"] == calls["_parts"] == 1


@on_device
def test_tokens_of_an_unaligned_width(device, calls):
    check_halves(device, 77, 27, 45, torch.float16)
    assert not calls


@on_device
@pytest.mark.parametrize("needed", ["1000", "0111", "0100", "0001", "1010"])
@pytest.mark.parametrize("weights", [torch.float32, torch.float16], ids=str)
def test_only_needed_gradients(device, needed, weights):
    whole = check_halves(device, 40, 16, 24, torch.float16, weights)
    some = [each.detach().requires_grad_(need == "1") for each, need in zip(whole, needed, strict=True)]
    probe = torch.randn(40, 16).to(device, torch.float16)
    wanted = torch.autograd.grad(swiglu(*whole, "fused"), whole, probe)
    swiglu(*some, "fused").backward(probe)
    for each, grad in zip(some, wanted, strict=True):
        assert torch.equal(each.grad, grad) if each.requires_grad else each.grad is None


@on_device
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_what_is_kept_for_backward(device, frozen):
    x, *matrices = (each.to(device) for each in (torch.randn(64, 24).half(), *maps(24, 32)))
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: sizes.append(each.numel()), lambda each: each):
        swiglu(x.requires_grad_(), *(each.requires_grad_(not frozen) for each in matrices), "fused")
    # Gates, ups and the weights; for the weights' gradients also the tokens and the inputs of the last product.
    assert sum(sizes) == 64 * 2 * 32 + 3 * 24 * 32 + (0 if frozen else 64 * (24 + 32))


@on_device
def test_expanded_gradients_and_strided_tokens(device):
    x, *weights = (each.to(device) for each in (torch.randn(30, 40).half(), *maps(24, 32)))
    quick = [each.requires_grad_() for each in (x[:, 8:32], *weights)]
    found = torch.autograd.grad(swiglu(*quick, "fused").sum(), quick)
    whole = [quick[0].detach().clone().requires_grad_(), *quick[1:]]
    y = swiglu(*whole, "fused")
    for a, b in zip(found, torch.autograd.grad(y, whole, torch.ones_like(y)), strict=True):
        assert torch.equal(a, b)


@on_device
@pytest.mark.parametrize(("hidden", "weights"), [(32, torch.float32), (30, torch.float16)], ids=str)
def test_operations_are_registered_properly(device, hidden, weights):
    x, *matrices = (each.to(device) for each in (torch.randn(20, 24).half(), *maps(24, hidden, weights)))
    given = [each.requires_grad_() for each in (x, *matrices)]
    torch.library.opcheck(torch.ops.intbmoe.swiglu.default, (*given, True))
    torch.library.opcheck(torch.ops.intbmoe.swiglu.default, (*(each.detach() for each in given), False))
    plain = [each.detach() for each in given]
    y, inner, kept, joined, filled = swiglu_fused._run(*plain, True)
    down = filled if len(filled) else plain[3]
    rows = fused_hidden.hidden_gradient(y, down, kept)
    torch.library.opcheck(torch.ops.intbmoe.swiglu_hidden_gradient.default, (y, down, kept))
    torch.library.opcheck(torch.ops.intbmoe.swiglu_token_gradient.default, (y, down, kept, joined))
    factors = rows, plain[0], inner, y
    torch.library.opcheck(torch.ops.intbmoe.swiglu_products.default, factors)
    operation = torch.ops.intbmoe.swiglu_weight_gradients.default
    torch.library.opcheck(operation, (*factors, hidden, 24, torch.float32))


@on_device
def test_flops_are_counted(device):
    x, *matrices = (each.to(device).requires_grad_() for each in (torch.randn(20, 24).half(), *maps(24, 32)))
    with FlopCounterMode(display=False) as forward:
        y = swiglu(x, *matrices, "fused")
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert forward.get_total_flops() == 6 * 20 * 24 * 32
    assert backward.get_total_flops() == 12 * 20 * 24 * 32


@on_device
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize(("hidden", "weights"), [(30, torch.float32), (32, torch.float16)])
def test_compiled(device, hidden, weights, frozen):
    given = [each.to(device).requires_grad_() for each in (torch.randn(20, 24).half(), *maps(24, hidden, weights))]
    wanted_of = given[:1] if frozen else given
    for each in given[len(wanted_of) :]:
        each.requires_grad_(False)
    compiled = torch.compile(lambda *each: swiglu(*each, "fused"), fullgraph=True, backend="aot_eager")
    probe = torch.randn(20, 24).to(device, torch.float16)
    wanted = torch.autograd.grad(swiglu(*given, "fused"), wanted_of, probe)
    found = torch.autograd.grad(compiled(*given), wanted_of, probe)
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a, b)
