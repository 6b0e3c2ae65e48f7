"""The compiled library against the specification, in every instruction set of this CPU; and when it is not used."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from intbmoe import IntBMoE
from intbmoe.ops import native as library
from intbmoe.ops.backend import choose_backend
from intbmoe.ops.blocks import Blocks, naive, native
from intbmoe.ops.choose import naive as choose_naive
from intbmoe.ops.choose import native as choose_native
from small_intbmoe import SIZES, make, switches, tokens

pytestmark = pytest.mark.skipif(library.LIBRARY is None, reason=f"the compiled library is {library.STATUS}")
TOLERANCE = {dtype: 16 * torch.finfo(dtype).eps / naive.LAYER_NORM_EPS**0.5 for dtype in library.DTYPES}
"""Some roundings in another order than torch's, and a LayerNorm that may divide by only √ε: 1.1e-12, 6.0e-4."""
dtypes = pytest.mark.parametrize("dtype", library.DTYPES)


def random_blocks(widths, count, dtype, gate=True, filtered=True):
    def random(*shape):
        return torch.randn(*shape, dtype=dtype)

    paths = 2 if gate else 1
    pairs = list(pairwise(widths))
    return Blocks(
        weights=tuple(random(count, a, paths * b) / a**0.5 for a, b in pairs),
        biases=tuple(random(count, paths * b) for _, b in pairs),
        gains=tuple(random(b) for _, b in pairs) if gate else (),
        scale=torch.tensor([0.7], dtype=dtype) if gate else None,
        norms=tuple((random(b), random(b)) for _, b in pairs[:-1]),
        token_filter=random(widths[0], widths[0]) if filtered else None,
        block_filter=random(count, widths[0]) if filtered else None,
    )


def assert_near(found, expected):
    assert found.dtype == expected.dtype
    size = expected.nan_to_num(0, 0, 0).norm(dim=-1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(found / size, expected / size, rtol=0, atol=TOLERANCE[found.dtype], equal_nan=True)


@torch.no_grad()
def compare(x, ids, weights, blocks, shared=None):
    before = x.clone()
    found, load = native.run_blocks(x, ids, weights, shared, blocks)
    expected = naive.run_blocks(x, ids, weights, blocks)
    assert_near(found, expected if shared is None else expected + shared)
    assert load.tolist() == [int((ids == b).sum()) for b in range(len(load))]
    assert torch.equal(x.nan_to_num(), before.nan_to_num())


@dtypes
@given(
    widths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    count=st.integers(1, 6),
    rows=st.integers(0, 150),
    k=st.integers(1, 6),
    gate=st.booleans(),
    filtered=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_is_the_specification_at_any_width_and_number_of_rows(dtype, widths, count, rows, k, gate, filtered, seed):
    torch.manual_seed(seed)
    blocks = random_blocks([*widths, widths[0]], count, dtype, gate, filtered)
    ids = torch.rand(rows, count + 1).argsort(1)[:, : min(k, count)] - 1  # distinct blocks, some of them none
    weights = torch.where(ids < 0, 0, torch.rand(ids.shape, dtype=dtype))
    shared = torch.randn(rows, widths[0], dtype=dtype) if seed % 2 else None
    compare(torch.randn(rows, widths[0], dtype=dtype), ids, weights, blocks, shared)


@dtypes
def test_every_instruction_set_and_number_of_threads(dtype, instructions, two_threads):
    blocks = random_blocks([33, 50, 33], 5, dtype)
    counts = [0, 1, 7, 40, 152]  # an empty block, and one that is cut into pieces
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor(counts))[torch.randperm(200)].unsqueeze(1)
    x, weights = torch.randn(200, 33, dtype=dtype), torch.rand(200, 1, dtype=dtype)
    compare(x, ids, weights, blocks)
    # A row does not depend on other rows, to the last bit. No filter here, because torch computes its product.
    blocks = random_blocks([33, 50, 33], 5, dtype, filtered=False)
    together = native.run_blocks(x, ids, weights, None, blocks)[0]
    torch.set_num_threads(1)
    alone = [native.run_blocks(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], None, blocks)[0] for i in range(200)]
    assert torch.equal(together, torch.cat(alone))


@dtypes
@pytest.mark.parametrize("tokens", [1, 2, 5, 40])
def test_many_threads_share_the_products_of_few_rows(dtype, tokens, instructions, many_threads):
    blocks = random_blocks([33, 700, 33], 3, dtype, filtered=False)
    x, ids = torch.randn(tokens, 33, dtype=dtype), torch.rand(tokens, 4).argsort(1)[:, :2] - 1
    weights = torch.rand(tokens, 2, dtype=dtype)
    compare(x, ids, weights, blocks)
    many_threads(lambda: native.run_blocks(x, ids, weights, None, blocks)[0])


@dtypes
def test_strided_inputs(dtype):
    blocks = random_blocks([6, 9, 6], 3, dtype)
    ids = torch.randint(3, (2, 8)).t()
    weights = torch.rand(2, 8, dtype=dtype).t()
    x = torch.randn(8, 20, dtype=dtype)
    for view in (x[:, 3:9], x[:, ::3][:, :6], torch.randn(6, 8, dtype=dtype).t(), x[:1, :6].expand(8, 6)):
        compare(view, ids, weights, blocks, shared=torch.randn(6, 8, dtype=dtype).t())
    turned = tuple(weight.transpose(1, 2).contiguous().transpose(1, 2) for weight in blocks.weights)
    compare(x[:, :6], ids, weights, Blocks(**{**vars(blocks), "weights": turned}))


@dtypes
def test_nan_and_infinity_stay_in_their_row(dtype, instructions):
    blocks = random_blocks([8, 17, 8], 2, dtype)
    x = torch.randn(30, 8, dtype=dtype)
    x[3, 2], x[11, 0], x[20, 5], x[25] = torch.nan, torch.inf, -torch.inf, 1e30
    ids = torch.randint(2, (30, 1))
    compare(x, ids, torch.rand(30, 1, dtype=dtype), blocks)
    y = native.run_blocks(x, ids, torch.ones(30, 1, dtype=dtype), None, blocks)[0]
    strange = torch.tensor([3, 11, 20])
    assert y[strange].isnan().all(1).all()
    assert y[[row for row in range(30) if row not in (3, 11, 20, 25)]].isfinite().all()


@dtypes
@pytest.mark.parametrize("term", [-1e5, -800.0, -90.0, -87.5, -10.0, 0.0, 10.0, 88.5, 800.0, 1e5])
def test_the_filter_opens_and_closes_without_overflow(dtype, term, instructions):
    blocks = random_blocks([5, 5], 1, dtype, gate=False)
    closed = torch.full((1, 5), term, dtype=dtype)
    blocks = Blocks(**{**vars(blocks), "token_filter": torch.zeros(5, 5, dtype=dtype), "block_filter": closed})
    compare(torch.randn(4, 5, dtype=dtype), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1, dtype=dtype), blocks)


@dtypes
@given(rows=st.integers(0, 40), count=st.integers(1, 20), seed=st.integers(0, 2**16), levels=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_routing_is_the_specification_ties_included(dtype, rows, count, seed, levels):
    torch.manual_seed(seed)
    scores = torch.randint(levels, (rows, count)).to(dtype) * torch.randn((), dtype=dtype)
    k = 1 + seed % count
    ids, weights = choose_native.choose(scores, k)
    expected_ids, expected = choose_naive.choose(scores, k)
    assert torch.equal(ids, expected_ids)
    assert_near(weights, expected)


@dtypes
def test_routing_of_strange_and_of_many_scores(dtype, instructions, two_threads):
    inf, nan = torch.inf, torch.nan
    rows = [[0, nan, 1], [nan, 2, nan], [-inf, 0, 1], [inf, 0, inf], [-inf, -inf, -inf], [1e4, -1e4, 0], [-0.0, 0, 0]]
    many = torch.randn(2000, 3)
    for scores in (torch.tensor(rows, dtype=dtype), many.to(dtype), torch.randn(3, 9).to(dtype).t()):
        ids, weights = choose_native.choose(scores, 2)
        expected_ids, expected = choose_naive.choose(scores, 2)
        assert torch.equal(ids, expected_ids)
        assert_near(weights, expected)


@dtypes
def test_wrong_types_are_errors_not_wrong_numbers(dtype):
    blocks = random_blocks([4, 4], 2, dtype)
    ids, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1, dtype=dtype)
    other = torch.float32 if dtype == torch.float64 else torch.float64
    for arguments in ((ids.int(), weights), (ids, weights.to(other))):
        with pytest.raises(TypeError, match="expected torch"):
            native.run_blocks(torch.randn(3, 4, dtype=dtype), *arguments, None, blocks)


# In a layer.


@pytest.fixture
def calls():
    with mock.patch.object(native, "run_blocks", wraps=native.run_blocks) as spy:
        yield spy


@switches
@dtypes
@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_without_gradients_takes_it(options, dtype, masked, calls):
    layer = make(**options).to(dtype).eval()
    x, mask = tokens(3, 9).to(dtype), torch.rand(3, 9) > 0.3 if masked else None
    with_gradients = layer(x, mask).detach()
    assert not calls.called
    with torch.inference_mode():
        found, composed = layer(x, mask), layer.precompose()(x, mask)
        assert calls.call_count == (2 if layer.config.has_kernels else 0)
        layer.backend = "naive"
        assert_near(found, layer(x, mask))
    assert_near(found, with_gradients)
    assert torch.equal(found, composed)


@torch.no_grad()
def test_norms_of_another_type_than_the_blocks(calls):
    composed = make().eval().precompose(torch.float32)
    x = tokens(2, 5).float()
    found = composed(x)
    assert calls.called
    composed.backend = "grouped"
    assert_near(found, composed(x))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (1, 1)])
@torch.no_grad()
def test_few_tokens_and_none(shape, calls):
    layer = make().eval()
    x = tokens(*shape)
    found, nothing = layer(x), layer(x, torch.zeros(shape, dtype=torch.bool))
    assert calls.call_count == 2
    layer.backend = "naive"
    assert_near(found, layer(x))
    assert torch.equal(nothing, torch.zeros_like(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_and_autocast_keep_to_torch(dtype, calls):
    layer = make(hidden=16).float().eval()
    layer.precompose(dtype)(tokens(2, 5).to(dtype))
    with torch.autocast("cpu", dtype):
        layer(tokens(2, 5).float())
    assert not calls.called


@torch.no_grad()
def test_counters_compilers_and_transforms_keep_to_torch(calls):
    layer = make().eval().precompose()
    x = tokens(2, 5)
    expected = layer(x)
    assert calls.call_count == 1
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() > 0
    assert_near(torch.compile(layer, backend="eager", fullgraph=True)(x), expected)
    program = torch.export.export(layer, (x,))
    assert_near(program.module()(x), expected)
    with forward_ad.dual_level():
        assert choose_backend(x, has_native=True) == "tiled"
    seen = []
    torch.func.vmap(lambda row: seen.append(choose_backend(row, has_native=True)) or row)(x)
    assert seen == ["tiled"]
    with FakeTensorMode():
        assert IntBMoE(8, 12, **SIZES).eval()(torch.empty(2, 5, 8)).shape == (2, 5, 8)
    assert calls.call_count == 1


def test_asked_for_where_it_cannot_run_it_says_why():
    layer = make().eval()
    layer.backend = "native"
    with pytest.raises(RuntimeError, match=r"gradients are on.*leave layer\.backend None"):
        layer(tokens(1, 3))


def test_without_it_torch_takes_its_place_and_says_so():
    script = """
import torch, intbmoe
from intbmoe.ops import native
from intbmoe.ops.backend import choose_backend
layer = intbmoe.IntBMoE(8, 12)
assert "without the compiled library" in repr(layer), layer
with torch.no_grad():
    assert choose_backend(torch.zeros(1), has_native=True) == "grouped"
    assert layer(torch.randn(1, 3, 8)).isfinite().all()
    layer.backend = "native"
    try:
        layer(torch.randn(1, 3, 8))
    except RuntimeError as error:
        assert "switched off by INTBMOE_NATIVE=0" in str(error), error
    else:
        raise AssertionError("it ran")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "INTBMOE_NATIVE": "0"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_library_of_other_sources_is_refused(monkeypatch):
    monkeypatch.setattr(library, "SOURCES", library.SOURCES[:1])
    found, status = library._load()
    assert found is None
    assert "built from other sources" in status


def test_openmp_is_torchs_own():
    """A library that links OpenMP by name could load a second one, whose threads compete with torch's for cores."""
    assert b"libgomp" not in Path(library.__file__).with_name(library.NAME).read_bytes()
