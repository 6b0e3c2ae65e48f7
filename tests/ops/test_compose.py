"""Composition and its gradients: plain torch and the compiled library against the equation."""

import ctypes
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from intbmoe.ops import native as library
from intbmoe.ops.compose import Coefficients, compose, compose_gradients, naive, native, plain

needs_library = pytest.mark.skipif(library.LIBRARY is None, reason=f"the compiled library is {library.STATUS}")
dtypes = pytest.mark.parametrize("dtype", library.DTYPES)


def tensors(paths, blocks, bases, lines, width, dtype=torch.float64):
    coefficients = torch.randn(paths, blocks, bases, dtype=dtype, requires_grad=True)
    return coefficients, torch.randn(bases, lines, width, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("paths", [1, 2])
@pytest.mark.parametrize("shape", [(5, 3, 4), (5, 1, 4)], ids=["weights", "biases"])
def test_one_product_is_the_equation(paths, shape):
    coefficients, pool = tensors(paths, 6, *shape)
    torch.testing.assert_close(plain.product(coefficients, pool), naive.compose(coefficients, pool))
    assert torch.autograd.gradcheck(plain.product, (coefficients, pool))
    grad = torch.randn(6, shape[1], paths * 4, dtype=torch.float64)
    expected = torch.autograd.grad(naive.compose(coefficients, pool), (coefficients, pool), grad)
    torch.testing.assert_close(plain.gradients(grad, coefficients, pool), expected)


def test_paths_stand_side_by_side():
    pool = torch.randn(2, 3, 4, dtype=torch.float64)
    composed = plain.product(torch.stack([torch.eye(2, dtype=torch.float64), torch.zeros(2, 2).double()]), pool)
    assert torch.equal(composed[..., :4], pool)
    assert (composed[..., 4:] == 0).all()


def results(product, coefficients, pool, grad):
    composed = product(coefficients, pool)
    return composed, *torch.autograd.grad(composed, (coefficients, pool), grad)


def compare(coefficients, pool):
    """Compares the library with the equation in float64: composition, and both gradients.

    Each entry is a sum of products, whose rounding is relative to the sum of their absolute values.
    """
    grad = torch.randn(coefficients.shape[1], pool.shape[1], len(coefficients) * pool.shape[2], dtype=pool.dtype)
    exact, sizes = (
        [change(each.detach().double()).requires_grad_() for each in (coefficients, pool, grad)]
        for change in (torch.clone, torch.abs)
    )
    for found, expected, size in zip(
        results(native.product, coefficients, pool, grad),
        results(naive.compose, *exact),
        results(naive.compose, *sizes),
        strict=True,
    ):
        assert found.dtype == pool.dtype
        assert ((found.double() - expected).abs() <= 16 * torch.finfo(pool.dtype).eps * size).all()


@needs_library
@dtypes
@given(
    paths=st.integers(1, 2),
    blocks=st.integers(1, 30),
    bases=st.integers(1, 30),
    lines=st.integers(1, 20),
    width=st.integers(native.NARROWEST, 200),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_the_library_is_the_equation(dtype, paths, blocks, bases, lines, width, seed):
    torch.manual_seed(seed)
    compare(*tensors(paths, blocks, bases, lines, width, dtype))


@needs_library
@dtypes
def test_every_instruction_set_and_number_of_threads(dtype, instructions, two_threads):
    coefficients, pool = tensors(2, 13, 17, 70, 130, dtype)
    compare(coefficients, pool)
    grad = torch.randn(13, 70, 260, dtype=dtype)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(results(native.product, coefficients, pool, grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))  # to the last bit


@needs_library
@pytest.mark.parametrize(
    "sizes", [(1, 8, native.MOST_ROWS, 3, 50), (2, native.MOST_ROWS // 2, 8, 3, 50), (2, 2, 3, 70, 4100)]
)
def test_the_largest_sizes_and_many_chunks(sizes):
    compare(*tensors(*sizes))


@needs_library
def test_the_library_takes_what_is_sent_to_it():
    for name, value in (("narrowest", native.NARROWEST), ("most_rows", native.MOST_ROWS)):
        assert ctypes.c_int64.in_dll(library.LIBRARY, f"intbmoe_{name}").value == value


@needs_library
def test_strided_coefficients_and_gradients():
    coefficients, pool = tensors(2, 3, 4, 5, 40)
    strided = coefficients.detach().permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
    composed = native.product(strided, pool)
    assert torch.equal(composed, native.product(coefficients, pool))
    whole = torch.randn(3, 80, 5, dtype=torch.float64)
    for grad in (whole.transpose(1, 2), whole[:1, :1].expand(3, 5, 5).repeat(1, 1, 16)[:1].expand(3, 5, 80), -whole.mT):
        found = torch.autograd.grad(composed, (strided, pool), grad, retain_graph=True)
        torch.testing.assert_close(found, plain.gradients(grad, coefficients, pool))


@needs_library
def test_the_library_has_first_and_second_derivatives():
    coefficients, pool = tensors(2, 2, 2, 1, native.NARROWEST)
    assert torch.autograd.gradcheck(native.product, (coefficients, pool))
    assert torch.autograd.gradgradcheck(native.product, (coefficients, pool))


@needs_library
@pytest.mark.parametrize("frozen", [0, 1], ids=["coefficients", "pool"])
def test_what_needs_no_gradient_gets_none(frozen):
    given = tensors(2, 3, 4, 5, 40)
    given[frozen].requires_grad_(False)
    composed = native.product(*given)
    grad = torch.randn_like(composed)
    composed.backward(grad)
    assert given[frozen].grad is None
    torch.testing.assert_close(given[1 - frozen].grad, plain.gradients(grad, *given)[1 - frozen])


@needs_library
@pytest.mark.parametrize("gate", [True, False])
def test_gradients_of_a_composed_pool_by_every_backend(gate):
    value, pool = (each.float().detach() for each in tensors(1, 3, 4, 5, 40))
    coefficients = Coefficients(value[0], torch.randn(3, 4) if gate else None, 0.3)
    wanted = [each.requires_grad_() for each in (*coefficients[:2], pool) if each is not None]
    composed = compose(coefficients, pool, torch.float32, "naive")
    grad = torch.randn_like(composed)
    expected = torch.autograd.grad(composed, wanted, grad)
    with torch.no_grad():
        for backend in ("grouped", "tiled"):
            found = [each for each in compose_gradients(grad, coefficients, pool, backend) if each is not None]
            torch.testing.assert_close(found, list(expected))


@needs_library
def test_when_the_library_composes(monkeypatch):
    called = []
    product = native.product
    monkeypatch.setattr(native, "product", lambda *given: called.append(1) or product(*given))
    coefficients, pool = tensors(2, 3, 4, 5, 40, torch.float32)

    def run(backend="grouped", pool=pool):
        called.clear()
        compose(Coefficients(*coefficients, 1.0), pool, torch.float32, backend)
        return bool(called)

    assert run()
    assert run("native")
    assert run(pool=torch.nn.Parameter(pool.detach()))
    assert not run("tiled")
    assert not run("naive")
    assert not run(pool=pool.transpose(1, 2).contiguous().transpose(1, 2))
    assert not run(pool=pool[..., : native.NARROWEST - 1].contiguous())
    with forward_ad.dual_level():
        assert not run()
    many = torch.randn(native.MOST_ROWS + 1, 1, 40)
    called.clear()
    compose(Coefficients(torch.randn(1, len(many)), None, 1.0), many, torch.float32, "grouped")
    assert not called


@needs_library
def test_counted_operations_are_plain_torch():
    coefficients, pool = tensors(2, 3, 4, 5, 40)
    with FlopCounterMode(display=False) as counter:
        composed = native.product(coefficients, pool)
        assert counter.get_total_flops() == 2 * 6 * 4 * 200
        composed.sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 6 * 4 * 200


@needs_library
@pytest.mark.parametrize("counted", ["forward", "backward"])
def test_checkpointing_while_only_one_pass_is_counted(counted):
    coefficients, pool = tensors(2, 3, 4, 5, 40)
    expected = results(plain.product, coefficients, pool, torch.ones(3, 5, 80, dtype=torch.float64))
    composed = []

    def forward():
        composed.append(checkpoint(native.product, coefficients, pool, use_reentrant=False))

    def backward():
        composed[0].sum().backward()

    for name, run in (("forward", forward), ("backward", backward)):
        with FlopCounterMode(display=False) if name == counted else nullcontext():
            run()
    torch.testing.assert_close((composed[0], coefficients.grad, pool.grad), expected)


@needs_library
@pytest.mark.parametrize("change", [lambda x: x, lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2)])
def test_saved_tensors_may_return_in_another_layout(change):
    coefficients, pool = tensors(2, 3, 4, 5, 40)
    grad = torch.randn(3, 5, 80, dtype=torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, change):
        composed = native.product(coefficients, pool)
    found = torch.autograd.grad(composed, (coefficients, pool), grad)
    torch.testing.assert_close(found, plain.gradients(grad, coefficients, pool))


@needs_library
def test_a_program_traced_before_dispatch_is_not_its_result():
    pool = torch.randn(4, 5, 40)

    def composed(value):
        return compose(Coefficients(value, None, 1.0), pool, torch.float32, "grouped")

    traced = make_fx(composed, pre_dispatch=True)(torch.randn(3, 4))
    other = torch.randn(3, 4)
    torch.testing.assert_close(traced(other), composed(other))


@needs_library
@pytest.mark.parametrize("lazy", [torch._neg_view, lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype)])
def test_gradients_that_are_not_what_lies_in_memory(lazy):
    coefficients, pool = tensors(2, 3, 4, 5, 40)
    grad = lazy(torch.randn(3, 5, 80, dtype=torch.float64))
    found = torch.autograd.grad(native.product(coefficients, pool), (coefficients, pool), grad)
    torch.testing.assert_close(found, plain.gradients(grad.resolve_neg().clone(), coefficients, pool))


@needs_library
def test_many_gradients_at_once_are_plain_torch():
    coefficients, pool = tensors(2, 3, 4, 5, 40)
    composed = native.product(coefficients, pool)
    grads = torch.randn(3, *composed.shape, dtype=torch.float64)
    found = torch.autograd.grad(composed, (coefficients, pool), grads, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        one = torch.autograd.grad(composed, (coefficients, pool), grads[i], retain_graph=True)
        torch.testing.assert_close([each[i] for each in found], list(one))
