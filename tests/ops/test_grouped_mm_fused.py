"""The Triton grouped product against the loop in float64, outputs and gradients, for any group sizes.

``pytest -m gpu tests/ops/test_grouped_mm_fused.py`` runs the same on a GPU, and larger products.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intbmoe.ops import backend, triton_support
from intbmoe.ops.grouped_mm import fused, naive
from interpreter import INTERPRETING, on_device

# The interpreter silently multiplies bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16] if INTERPRETING else list(fused.DTYPES)
GROUPS = 5
ROUTINGS = ("balanced", "zipf", "one", "empty", "masked", "trimmed")
SMALL = fused.Tile(16, 16, 16, 4, 2, swizzle=2)


if not INTERPRETING:

    def test_the_cpu_without_the_interpreter_is_refused():
        x, weight, offsets = torch.randn(3, 4), torch.randn(1, 4, 4), torch.tensor([3], dtype=torch.int32)
        assert not backend.triton_runs(x.device, x.dtype)
        with pytest.raises(ValueError, match=r"x\.device='cpu'.*TRITON_INTERPRET"):
            fused.grouped_mm(x, weight, offsets)


def choices(routing, tokens, k, groups=GROUPS):
    """The group of each assignment, (tokens, k); −1 for none."""
    weights = {"zipf": 1 / torch.arange(1.0, groups + 1) ** 1.5, "one": torch.eye(groups)[groups // 2]}
    weights["empty"] = (torch.arange(groups) % 2).float()
    probability = weights.get(routing, torch.ones(groups))
    ids = torch.multinomial(probability, tokens * k, replacement=True).view(tokens, k) if tokens else torch.zeros(0, k)
    if routing in ("masked", "trimmed"):
        ids = torch.where(torch.rand(tokens, k) < 0.3, -1, ids)
    return ids.long()


def exact(x, weight, offsets, probe):
    """Output, gradient of x and gradient of weight, in float64 by the loop."""
    x, weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    out = naive.grouped_mm(x, weight, offsets)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), probe.double())]


def errors(found, case):
    """How far output and gradients are from the exact ones, in units of the tolerance; None for those not computed.

    Every entry is a sum of n products, added in float32 and rounded to its type at most three times. Each addition may
    lose a unit in the last place of Σ|terms|, 2^-23 (tensor cores cut off instead of rounding); Σ|terms| is what the
    same computation gives for the absolute values.
    """
    x, weight, offsets, probe = case
    expected = exact(*case)
    sizes = exact(x.abs(), weight.abs(), offsets, probe.abs())
    terms = weight.shape[1], weight.shape[2], probe.shape[0]
    for value, wanted, size, n in zip(found, expected, sizes, terms, strict=True):
        if value is not None:
            assert value.shape == wanted.shape
            precision = torch.finfo(value.dtype)
            rounding = 0 if value.dtype == torch.float32 else 1.5 * precision.eps
            allowed = ((n + 4) * 2**-23 + rounding) * size + 4 * precision.smallest_normal
            error = (value.detach().double() - wanted).abs() / allowed
            yield error.nan_to_num(nan=float("inf")).max().item() if error.numel() else 0.0


def padded(x):
    """``x`` with NaN after every row, up to the alignment of the kernels' own results."""
    width = triton_support.aligned(x.shape[-1], x.dtype)
    return x.new_full((*x.shape[:-1], width), float("nan"))[..., : x.shape[-1]].copy_(x)


def make(routing, tokens, k, inputs, outputs, dtype, device, groups=GROUPS):
    """Rows sorted by group, weights, ends of the groups, and a gradient of the output."""
    ids = choices(routing, tokens, k, groups).reshape(-1)
    offsets = torch.bincount(ids[ids >= 0], minlength=groups).cumsum(0).int()
    rows = int(offsets[-1]) if routing == "trimmed" else len(ids)
    shapes = (rows, inputs), (groups, inputs, outputs), (rows, outputs)
    x, weight, probe = (torch.randn(shape).to(device, dtype) for shape in shapes)
    return x, weight, offsets.to(device), probe


def check(routing, tokens, k, inputs, outputs, dtype, device, groups=GROUPS):
    case = make(routing, tokens, k, inputs, outputs, dtype, device, groups)
    x, weight, offsets, probe = case
    x.requires_grad_()
    weight.requires_grad_()
    out = fused.grouped_mm(x, weight, offsets, routing != "masked")
    found = [out, *torch.autograd.grad(out, (x, weight), probe)]
    assert all(value.dtype == dtype for value in found)
    assert max(errors(found, case)) <= 1


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_outputs_and_gradients_are_the_loops(device, dtype, routing):
    check(routing, 7, 2, 24, 40, dtype, device)
    check(routing, 20, 2, 17, 9, dtype, device)


@on_device
def test_no_row_one_row_one_group(device):
    for tokens in (0, 1):
        check("balanced", tokens, 1, 12, 20, torch.float32, device)
    check("balanced", 7, 1, 1, 1, torch.float32, device, groups=1)
    check("one", 3, 2, 8, 8, torch.float32, device, groups=9)


@pytest.mark.skipif(INTERPRETING, reason="too large for the interpreter")
@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("widths", [(768, 1536), (284, 572), (187, 61)])
def test_large_products_on_the_device(device, dtype, routing, widths):
    check(routing, 8192, 2, *widths, dtype, device)


@pytest.mark.skipif(INTERPRETING, reason="needs a CUDA device")
@on_device
@pytest.mark.parametrize("routing", ROUTINGS)
def test_weight_gradients_that_torch_computes(device, routing):
    assert fused.torch_outer_is_faster(4096, GROUPS, 2048, 2304, torch.bfloat16)
    check(routing, 2048, 2, 2048, 2304, torch.bfloat16, device)


@on_device
@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("persistent", [0, 1])
def test_every_kind_of_tile(device, descriptors, persistent, monkeypatch):
    # So that a persistent program has several tiles, and tiles are computed out of order.
    monkeypatch.setattr(fused, "PROCESSORS", 3)
    tile = SMALL._replace(descriptors=descriptors, persistent=persistent)
    for inputs, outputs in ((24, 32), (9, 17), (17, 32)):
        case = make("masked", 12, 2, inputs, outputs, torch.float32, device, groups=3)
        x, weight, offsets, probe = case
        x, weight, probe = (padded(tensor) if descriptors else tensor for tensor in (x, weight, probe))
        strided = weight.repeat_interleave(2, dim=2)[:, :, ::2]
        for matrices in (weight, padded(weight.mT).mT) if descriptors else (weight, strided):
            out = fused.run_mm(x, matrices, offsets, complete=False, tile=tile)
            assert max(errors([out, None, None], case)) <= 1
        for splits in () if persistent else (1, 2):
            outer = fused.run_outer(x, probe, offsets, tile=tile, splits=splits)
            assert max(errors([None, None, outer], case)) <= 1


@on_device
@pytest.mark.parametrize("routing", [routing for routing in ROUTINGS if routing not in ("masked", "trimmed")])
def test_programs_that_go_from_tile_to_tile(device, routing, monkeypatch):
    monkeypatch.setattr(fused, "PROCESSORS", 2)
    monkeypatch.setattr(fused, "NARROW", 16)
    tile = SMALL._replace(n=32, descriptors=True, persistent=1)
    for inputs, outputs in ((24, 40), (9, 17), (17, 32)):
        case = make(routing, 25, 2, inputs, outputs, torch.float32, device, groups=3)
        x, weight, offsets, *_ = case
        for matrices in (padded(weight), padded(weight.mT).mT):
            out = fused.run_mm(padded(x), matrices, offsets, complete=True, tile=tile)
            assert max(errors([out, None, None], case)) <= 1


@on_device
def test_rows_after_the_last_group_are_not_written(device, monkeypatch):
    """Whole tiles are written without a mask, so none may reach past its group."""
    monkeypatch.setattr(fused, "empty_rows", lambda like, rows, width: like.new_full((rows, width), 7.0))
    tile = SMALL._replace(descriptors=True, persistent=1)
    offsets = torch.tensor([16, 16, 37], dtype=torch.int32, device=device)
    x, weight = (torch.randn(shape, device=device) for shape in ((60, 16), (3, 16, 24)))
    out = fused.run_mm(x, weight, offsets, complete=True, tile=tile)
    assert (out[37:] == 7).all()
    assert not (out[:37] == 7).any()


@on_device
def test_repeats_are_equal_bit_for_bit(device):
    x, weight, offsets, probe = make("zipf", 30, 2, 12, 20, torch.float16, device)
    tile = SMALL._replace(n=32)
    for run in (
        lambda: fused.run_mm(x, weight, offsets, complete=True, tile=tile),
        lambda: fused.run_outer(x, probe, offsets, tile=tile, splits=2),
    ):
        assert torch.equal(run(), run())


@on_device
@pytest.mark.parametrize("descriptors", [False, True])
def test_what_belongs_to_no_group_never_leaks(device, descriptors):
    """Rows after the last group may hold anything."""
    tile = SMALL._replace(descriptors=descriptors)
    x, weight, offsets, probe = make("masked", 20, 2, 32, 20, torch.float32, device)
    x[offsets[-1] :] = float("nan")
    probe[offsets[-1] :] = float("inf")
    out = fused.run_mm(x, weight, offsets, complete=False, tile=tile)
    assert out.isfinite().all()
    assert (out[offsets[-1] :] == 0).all()
    assert fused.run_outer(x, probe, offsets, tile=tile, splits=2).isfinite().all()


@on_device
def test_second_derivatives(device):
    x, weight, offsets, _ = make("masked", 9, 2, 8, 12, torch.float32, device)
    results = []
    for dtype in (torch.float32, torch.float64):
        a, b = x.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_()
        out = (fused if dtype == torch.float32 else naive).grouped_mm(a, b, offsets)
        first = torch.autograd.grad(out.square().sum(), (a, b), create_graph=True)
        results.append(torch.autograd.grad(sum(grad.square().sum() for grad in first), (a, b)))
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()


@on_device
def test_torchs_own_checks(device):
    x, weight, offsets, probe = make("masked", 6, 2, 8, 12, torch.float32, device, groups=2)
    x, weight, probe = (tensor.requires_grad_() for tensor in (x, weight, probe))
    torch.library.opcheck(torch.ops.intbmoe.fused_mm.default, (x, weight, offsets, False))
    torch.library.opcheck(torch.ops.intbmoe.fused_outer.default, (x, probe, offsets))


@on_device
def test_a_compiled_step_is_the_same(device):
    x, weight, offsets, probe = make("masked", 9, 2, 8, 12, torch.float32, device)

    def step(x, weight):
        return (fused.grouped_mm(x, weight, offsets) * probe).sum()

    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        run(a, b).backward()
        results.append((a.grad, b.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.skipif(INTERPRETING, reason="needs a CUDA device")
@on_device
@pytest.mark.parametrize("sizes", [(300, 2, 64, 96), (2048, 2, 2048, 2304)], ids=["triton", "torch"])
def test_no_wait_for_the_device_and_replays_from_a_graph(device, sizes):
    x, weight, offsets, probe = make("zipf", *sizes, torch.bfloat16, device)
    x.requires_grad_()
    weight.requires_grad_()

    def step():
        out = fused.grouped_mm(x, weight, offsets, complete=True)
        return out, *torch.autograd.grad(out, (x, weight), probe)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    fresh, _, other, _ = make("empty", *sizes, torch.bfloat16, device)
    with torch.no_grad():
        x.copy_(fresh)
        offsets.copy_(other)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@on_device
def test_bad_input_is_named(device):
    x, weight, offsets, _ = make("balanced", 4, 1, 8, 8, torch.float32, device)
    with pytest.raises(ValueError, match=r"weight\.dtype=torch\.float16.*that of x"):
        fused.grouped_mm(x, weight.half(), offsets)
    with pytest.raises(ValueError, match=r"offsets\.dtype=torch\.int64.*int32"):
        fused.grouped_mm(x, weight, offsets.long())
    with pytest.raises(ValueError, match=r"x\.dtype=torch\.float64.*float32"):
        fused.grouped_mm(x.double(), weight.double(), offsets)


@pytest.mark.parametrize("device", ["cpu"])
def test_shapes_and_flops_without_a_kernel(device):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    x, weight, offsets, _ = make("balanced", 6, 2, 8, 12, torch.bfloat16, device)
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as counter:
        x, weight, offsets = map(mode.from_tensor, (x, weight, offsets))
        out = fused.grouped_mm(x.requires_grad_(), weight.requires_grad_(), offsets)
        out.sum().backward()
    assert (out.shape, x.grad.shape, weight.grad.shape) == ((12, 12), (12, 8), (5, 8, 12))
    assert counter.get_total_flops() == 3 * 2 * 12 * 8 * 12


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    tail=st.integers(0, 40),
    block=st.sampled_from([1, 2, 16]),
)
def test_every_tile_of_every_group_has_one_slot(counts, tail, block):
    """The rule at the top of fused_kernels.py, for all groups and for rows without one."""
    start, taken = 0, []
    for group, count in enumerate([*counts, tail]):
        end = start + count
        slots = list(range(start // block + group, end // block + group + 1))
        assert len(slots) * block >= count
        taken += slots
        start = end
    assert taken == list(range(start // block + len(counts) + 1))


@given(
    rows=st.integers(1, 200_000),
    groups=st.integers(1, 64),
    inputs=st.integers(1, 4096),
    outputs=st.integers(1, 8192),
    dtype=st.sampled_from(fused.DTYPES),
)
def test_tiles_are_sizes_that_triton_multiplies(rows, groups, inputs, outputs, dtype):
    mm = fused.mm_tile(rows, groups, inputs, outputs, dtype)
    outer = fused.outer_tile(inputs, outputs, dtype)
    for size in (*mm[:3], *outer[:3]):
        assert size >= 16
        assert size & (size - 1) == 0
    assert 1 <= fused.outer_parts(rows, groups, inputs, outputs, outer) <= 16
