"""Experts of sparse methods run by the compiled library: against the specification, and when layers use it."""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import intbmoe
from intbmoe.ops import native as library
from intbmoe.ops.blocks import Blocks
from intbmoe.ops.blocks import native as blocks_native
from intbmoe.ops.experts import naive, native
from intbmoe.parts.quantized import Quantized
from intbmoe.quantization import quantize
from small_methods import DIM, TINY, make, tokens

pytestmark = pytest.mark.skipif(library.LIBRARY is None, reason=f"the compiled library is {library.STATUS}")
dtypes = pytest.mark.parametrize("dtype", library.DTYPES)
networks = pytest.mark.parametrize("network", naive.NETWORKS)
ROUTED = ("switch", "vmoe", "deepseek", "mixtral", "remoe", "dynmoe")


def parameters_of(network, experts, dim, hidden, dtype):
    def random(*shape):
        return torch.randn(experts, *shape, dtype=dtype) / shape[0] ** 0.5

    if network == "gelu":
        return [random(dim, hidden), random(hidden), random(hidden, dim), random(dim)]
    return [random(dim, hidden), random(dim, hidden), random(hidden, dim)]


def assert_near(found, expected):
    """A few roundings per product: within 3e-14 (float64) or 2e-5 (float32) of a row's size."""
    tolerance = 128 * torch.finfo(found.dtype).eps
    size = expected.nan_to_num(0, 0, 0).norm(dim=-1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(found / size, expected / size, rtol=0, atol=tolerance, equal_nan=True)


@torch.no_grad()
def compare(network, x, ids, weights, parameters):
    found, load = native.run_experts(network, x, ids, weights, parameters)
    expected, counts = naive.run_experts(network, x, ids, weights, parameters)
    assert_near(found, expected)
    assert torch.equal(load, counts)


@networks
@dtypes
@given(
    dim=st.integers(1, 70),
    hidden=st.integers(1, 70),
    experts=st.integers(1, 6),
    rows=st.integers(0, 60),
    k=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=30, deadline=None)
def test_is_the_specification_at_any_width_and_number_of_rows(network, dtype, dim, hidden, experts, rows, k, seed):
    torch.manual_seed(seed)
    ids = torch.rand(rows, experts + 1).argsort(1)[:, : min(k, experts)] - 1  # distinct experts, some of them none
    x, weights = torch.randn(rows, dim, dtype=dtype), torch.rand(ids.shape, dtype=dtype)
    compare(network, x, ids, weights, parameters_of(network, experts, dim, hidden, dtype))


@networks
@dtypes
def test_every_instruction_set_way_of_multiplying_and_number_of_threads(network, dtype, instructions, two_threads):
    # Wider than one partial sum, so that every product has several; experts with no, one, few and many rows.
    parameters = parameters_of(network, 6, 33, 1030, dtype)
    counts = torch.tensor([0, 1, 3, 9, 27, 60])
    ids = torch.repeat_interleave(torch.arange(6), counts)[torch.randperm(100)].unsqueeze(1)
    x, weights = torch.randn(100, 33, dtype=dtype), torch.rand(100, 1, dtype=dtype)
    compare(network, x, ids, weights, parameters)
    together = native.run_experts(network, x, ids, weights, parameters)[0]
    torch.set_num_threads(1)
    alone = [native.run_experts(network, x[[i]], ids[[i]], weights[[i]], parameters)[0] for i in range(100)]
    assert torch.equal(together, torch.cat(alone))  # a row does not depend on other rows, to the last bit


@networks
@dtypes
@pytest.mark.parametrize("tokens", [1, 2, 5, 40])
def test_many_threads_share_the_products_of_few_rows(network, dtype, tokens, instructions, many_threads):
    parameters = parameters_of(network, 3, 33, 1030, dtype)
    x, ids = torch.randn(tokens, 33, dtype=dtype), torch.rand(tokens, 4).argsort(1)[:, :2] - 1
    weights = torch.rand(tokens, 2, dtype=dtype)
    compare(network, x, ids, weights, parameters)
    many_threads(lambda: native.run_experts(network, x, ids, weights, parameters)[0])


@dtypes
def test_gelu_to_the_last_places(dtype, instructions):
    special = torch.tensor([0.0, 1e-30, 1e30, -1e30, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    x = torch.cat([torch.linspace(-40, 40, 20_001, dtype=dtype), special]).unsqueeze(1)
    one, zero = torch.ones(1, 1, 1, dtype=dtype), torch.zeros(1, 1, dtype=dtype)
    ids = torch.zeros(len(x), 1, dtype=torch.int64)
    found = native.run_experts("gelu", x, ids, torch.ones_like(x), [one, zero, one, zero])[0]
    exact = F.gelu(x.double())
    bound = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=bound, atol=bound, equal_nan=True)


@dtypes
@networks
def test_nan_and_infinity_stay_in_their_row(network, dtype, instructions):
    x = torch.randn(30, 8, dtype=dtype)
    x[3, 2], x[11, 0] = torch.nan, torch.inf
    ids = torch.randint(2, (30, 1))
    parameters = parameters_of(network, 2, 8, 17, dtype)
    y = native.run_experts(network, x, ids, torch.ones(30, 1, dtype=dtype), parameters)[0]
    assert y[[3, 11]].isnan().all()
    assert y[[row for row in range(30) if row not in (3, 11)]].isfinite().all()


# In a layer.


@pytest.fixture
def calls():
    with mock.patch.object(native, "run_experts", wraps=native.run_experts) as spy:
        yield spy


@pytest.mark.parametrize("expert", ["gelu", "swiglu"])
@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize("shape", [(3, 9), (1, 1), (2, 0)])
def test_a_layer_without_gradients_takes_it(name, expert, shape, calls):
    if expert == "gelu" and name in ("deepseek", "mixtral"):
        pytest.skip("its experts are SwiGLU")
    layer, x = make(name, expert=expert).eval(), tokens(*shape)
    for mask in (None, torch.rand(shape) > 0.3):
        with_gradients = layer(x, mask).detach()
        assert not calls.called
        with torch.inference_mode():
            assert_near(layer(x, mask), with_gradients)
        assert calls.call_count == 1
        calls.reset_mock()


@pytest.mark.parametrize("name", ["switch", "vmoe", "deepseek"])
@torch.no_grad()
def test_ties_go_to_the_lower_index(name):
    layer, x = make(name).eval(), tokens(2, 5)
    layer.router.weight.zero_()
    with intbmoe.record_routing(layer) as log:
        layer(x)
    (routing,) = log.values()
    k = routing.ids.shape[-1]
    assert torch.equal(routing.ids, torch.arange(k).expand(10, k))


@torch.no_grad()
def test_capacity_leaves_out_the_same_tokens(calls):
    layer, x = make("switch", experts=3, eval_capacity_factor=0.5).eval(), tokens(2, 40)
    found = layer(x)
    assert calls.call_count == 1
    assert (found == 0).all(-1).any()
    with torch.enable_grad():
        assert_near(found, layer(x).detach())


@torch.no_grad()
def test_hooks_counters_and_fp8_keep_to_torch(calls):
    layer, x = make("vmoe").eval(), tokens(2, 5)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() > 0
    seen = []
    handle = layer.experts.up.register_forward_hook(lambda *_: seen.append(1))
    layer(x)
    assert seen
    handle.remove()
    quantize(layer, "fp8")
    layer(x)
    assert not calls.called


# Weights in int8.


@dtypes
def test_int8_products_are_those_of_integers(dtype, instructions, many_threads):
    counts = torch.tensor([0, 1, 3, 9, 27, 60])  # rows of each block: every way of multiplying
    ids = torch.repeat_interleave(torch.arange(6), counts)[torch.randperm(100)].unsqueeze(1)
    x, numbers = torch.randint(-4, 5, (100, 405)), torch.randint(-127, 128, (6, 405, 405), dtype=torch.int8)
    scales, biases = 2.0 ** torch.randint(-3, 4, (6, 1, 405)), torch.randint(-9, 10, (6, 405))
    blocks = Blocks((numbers,), (biases.to(dtype),), (), None, (), None, None, scales=(scales.to(dtype),))
    weights = torch.ones(100, 1, dtype=dtype)

    def run(rows):
        return blocks_native.run_blocks(x[:rows].to(dtype), ids[:rows], weights[:rows], None, blocks)[0]

    found = run(100)
    many_threads(lambda: run(100))
    many_threads(lambda: run(3))
    exact = torch.stack([row @ numbers[block].long() for row, (block,) in zip(x, ids.tolist(), strict=True)])
    block = ids.squeeze(1)
    assert torch.equal(found, (exact * scales[block, 0] + biases[block]).to(dtype))  # all of them fit into float32
    assert torch.equal(run(3), found[:3])


@pytest.mark.parametrize("name", ["intbmoe", "switch", "deepseek"])
@torch.no_grad()
def test_a_layer_in_int8_is_not_multiplied_out(name):
    layer = intbmoe.create(name, DIM, 40, **TINY.get(name, {})).double().eval()
    layer = layer.precompose() if name == "intbmoe" else layer
    quantize(layer)
    x = tokens(3, 40)
    owners = layer.block_weights if name == "intbmoe" else layer.experts
    experts = [part for part in owners.modules() if isinstance(part, Quantized)]
    spies = [mock.patch.object(part, "forward", wraps=part.forward) for part in experts]
    with ExitStack() as stack:
        multiplied = [stack.enter_context(spy) for spy in spies]
        found = layer(x)
        assert not any(spy.called for spy in multiplied)
    with torch.enable_grad():
        assert_near(found, layer(x).detach())
