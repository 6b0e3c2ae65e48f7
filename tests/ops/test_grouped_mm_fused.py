"""The Triton grouped product against the loop in float64, outputs and gradients, wherever the rows fall.

``pytest -m gpu tests/ops/test_grouped_mm_fused.py`` runs the same on a GPU, and larger products.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intbmoe.ops import triton_support
from intbmoe.ops.grouped_mm import fused, naive
from interpreter import INTERPRETING, on_device, rerun

# The interpreter multiplies bfloat16 wrongly, without a word.
DTYPES = [torch.float32, torch.float16] if INTERPRETING else list(fused.DTYPES)
GROUPS = 5
ROUTINGS = ("balanced", "zipf", "one", "empty", "masked", "trimmed")
SMALL = fused.Tile(16, 16, 16, 4, 2, swizzle=2)


if not INTERPRETING:

    def test_in_the_interpreter():
        rerun(__file__)

    def test_the_cpu_without_the_interpreter_is_refused():
        x, weight, offsets = torch.randn(3, 4), torch.randn(1, 4, 4), torch.tensor([3], dtype=torch.int32)
        assert not triton_support.usable(x)
        with pytest.raises(ValueError, match=r"x\.device='cpu'.*TRITON_INTERPRET"):
            fused.gathered_mm(x, weight, offsets)


def choices(routing, tokens, k, groups=GROUPS):
    """(tokens, k) group of each assignment, −1 for none."""
    weights = {"zipf": 1 / torch.arange(1.0, groups + 1) ** 1.5, "one": torch.eye(groups)[groups // 2]}
    weights["empty"] = (torch.arange(groups) % 2).float()
    probability = weights.get(routing, torch.ones(groups))
    ids = torch.multinomial(probability, tokens * k, replacement=True).view(tokens, k) if tokens else torch.zeros(0, k)
    if routing in ("masked", "trimmed"):
        ids = torch.where(torch.rand(tokens, k) < 0.3, -1, ids)
    return ids.long()


def plan(ids, groups=GROUPS, trim=False):
    """Offsets, the token of each row, the row of each assignment."""
    keys, order = torch.where(ids < 0, groups, ids).reshape(-1).sort(stable=True)
    offsets = torch.searchsorted(keys, torch.arange(groups), right=True).int()
    token, inverse = order // ids.shape[1], order.argsort().view_as(ids)
    if trim:
        token, inverse = token[: int(offsets[-1])], inverse.clamp(max=int(offsets[-1]))
    return offsets, token, inverse


def exact(x, weight, offsets, token, probe):
    """Output, gradient of x and gradient of weight, in float64 by the loop."""
    x, weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    out = naive.grouped_mm(x if token is None else x[token], weight, offsets)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), probe.double())]


def errors(found, case, k=1):
    """How far output and gradients are from the exact ones, None for those not found, in units of what is allowed.

    Every entry is a sum of n products, added in float32 and rounded to its type at most three times. Each addition may
    lose a unit in the last place of Σ|terms|, 2^-23 (tensor cores cut off instead of rounding); Σ|terms| is what the
    same computation gives for the absolute values.
    """
    x, weight, offsets, token, probe = case
    expected = exact(*case)
    sizes = exact(x.abs(), weight.abs(), offsets, token, probe.abs())
    terms = weight.shape[1], weight.shape[2] + k, probe.shape[0]
    for value, wanted, size, n in zip(found, expected, sizes, terms, strict=True):
        if value is not None:
            assert value.shape == wanted.shape
            precision = torch.finfo(value.dtype)
            rounding = 0 if value.dtype == torch.float32 else 1.5 * precision.eps
            allowed = ((n + 4) * 2**-23 + rounding) * size + 4 * precision.smallest_normal
            error = (value.detach().double() - wanted).abs() / allowed
            yield error.nan_to_num(nan=float("inf")).max().item() if error.numel() else 0.0


def padded(x):
    """``x`` with NaN behind every row, up to the alignment that the kernels' own results have."""
    width = triton_support.aligned(x.shape[-1], x.dtype)
    return x.new_full((*x.shape[:-1], width), float("nan"))[..., : x.shape[-1]].copy_(x)


def make(routing, tokens, k, inputs, outputs, dtype, device, gathered=True, groups=GROUPS):
    offsets, token, inverse = plan(choices(routing, tokens, k, groups), groups, trim=routing == "trimmed")
    rows = token.shape[0]
    x = torch.randn(tokens if gathered else rows, inputs).to(device, dtype)
    weight = torch.randn(groups, inputs, outputs).to(device, dtype)
    probe = torch.randn(rows, outputs).to(device, dtype)
    token, inverse = (token.to(device), inverse.to(device)) if gathered else (None, None)
    return (x, weight, offsets.to(device), token, probe), inverse


def check(routing, tokens, k, inputs, outputs, dtype, device, gathered=True, groups=GROUPS):
    case, inverse = make(routing, tokens, k, inputs, outputs, dtype, device, gathered, groups)
    x, weight, offsets, token, probe = case
    x.requires_grad_()
    weight.requires_grad_()
    out = fused.gathered_mm(x, weight, offsets, token, inverse, complete=routing != "masked")
    found = [out, *torch.autograd.grad(out, (x, weight), probe)]
    assert all(value.dtype == dtype for value in found)
    assert max(errors(found, case, k)) <= 1


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_outputs_and_gradients_are_the_loops(device, dtype, routing):
    check(routing, 7, 2, 24, 40, dtype, device)
    check(routing, 20, 2, 17, 9, dtype, device, gathered=dtype == torch.float32)


@on_device
@pytest.mark.parametrize("gathered", [True, False])
def test_no_row_one_row_one_group(device, gathered):
    for tokens in (0, 1):
        check("balanced", tokens, 1, 12, 20, torch.float32, device, gathered)
    check("balanced", 7, 1, 1, 1, torch.float32, device, gathered, groups=1)
    check("one", 3, 2, 8, 8, torch.float32, device, gathered, groups=9)


@pytest.mark.skipif(INTERPRETING, reason="too large for the interpreter")
@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("widths", [(768, 1536), (284, 572), (187, 61)])
def test_large_products_on_the_device(device, dtype, routing, widths):
    check(routing, 8192, 2, *widths, dtype, device)
    check(routing, 8192, 2, *widths, dtype, device, gathered=False)


@on_device
@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("persistent", [0, 1])
@pytest.mark.parametrize("gathered", [True, False])
def test_every_kind_of_tile(device, descriptors, persistent, gathered, monkeypatch):
    # So that a persistent program has several tiles to go through, and tiles are not computed in their order.
    monkeypatch.setattr(fused, "PROCESSORS", 3)
    tile = SMALL._replace(descriptors=descriptors, persistent=persistent)
    for inputs, outputs in ((24, 32), (9, 17)):
        case, _ = make("masked", 12, 2, inputs, outputs, torch.float32, device, gathered, groups=3)
        x, weight, offsets, token, probe = case
        x, weight, probe = (padded(tensor) if descriptors else tensor for tensor in (x, weight, probe))
        strided = weight.repeat_interleave(2, dim=2)[:, :, ::2]
        for matrices in (weight, padded(weight.mT).mT) if descriptors else (weight, strided):
            out = fused.run_mm(x, matrices, offsets, token, complete=False, tile=tile)
            assert max(errors([out, None, None], case)) <= 1
        for splits in () if persistent else (1, 2):
            outer = fused.run_outer(x, probe, offsets, token, tile=tile, splits=splits)
            assert max(errors([None, None, outer], case)) <= 1


@on_device
@pytest.mark.parametrize("routing", [routing for routing in ROUTINGS if routing not in ("masked", "trimmed")])
def test_programs_that_go_from_tile_to_tile(device, routing, monkeypatch):
    monkeypatch.setattr(fused, "PROCESSORS", 2)
    tile = SMALL._replace(descriptors=True, persistent=1)
    for inputs, outputs in ((24, 32), (9, 17)):
        case, _ = make(routing, 13, 2, inputs, outputs, torch.float32, device, gathered=False, groups=3)
        x, weight, offsets, *_ = case
        for matrices in (padded(weight), padded(weight.mT).mT):
            out = fused.run_mm(padded(x), matrices, offsets, None, complete=True, tile=tile)
            assert max(errors([out, None, None], case)) <= 1


@on_device
def test_repeats_are_equal_bit_for_bit(device):
    (x, weight, offsets, token, probe), _ = make("zipf", 30, 2, 12, 20, torch.float16, device)
    tile = SMALL._replace(n=32)
    for run in (
        lambda: fused.run_mm(x, weight, offsets, token, complete=True, tile=tile),
        lambda: fused.run_outer(x, probe, offsets, token, tile=tile, splits=2),
    ):
        assert torch.equal(run(), run())


@on_device
@pytest.mark.parametrize("descriptors", [False, True])
def test_what_belongs_to_no_group_never_leaks(device, descriptors):
    """Rows after the last group, and the tokens only they read, may hold anything."""
    tile = SMALL._replace(descriptors=descriptors)
    (x, weight, offsets, _, probe), _ = make("masked", 20, 2, 32, 20, torch.float32, device, gathered=False)
    x[offsets[-1] :] = float("nan")
    probe[offsets[-1] :] = float("inf")
    out = fused.run_mm(x, weight, offsets, None, complete=False, tile=tile)
    assert out.isfinite().all()
    assert (out[offsets[-1] :] == 0).all()
    assert fused.run_outer(x, probe, offsets, None, tile=tile, splits=2).isfinite().all()


@on_device
def test_half_precision_gives_float32_sums_on_demand(device):
    case, _ = make("zipf", 40, 2, 24, 40, torch.float16, device)
    x, _, offsets, token, probe = case
    for splits in (1, 2):
        outer = fused.run_outer(x, probe, offsets, token, torch.float32, SMALL._replace(m=32, n=64), splits)
        assert outer.dtype == torch.float32
        assert max(errors([None, None, outer], case)) <= 1
    assert fused.gathered_outer(x, probe, offsets, token, dtype=torch.float32).dtype == torch.float32


@on_device
@pytest.mark.parametrize("gathered", [True, False])
def test_second_derivatives(device, gathered):
    case, inverse = make("masked", 9, 2, 8, 12, torch.float32, device, gathered)
    x, weight, offsets, token, _ = case
    results = []
    for dtype in (torch.float32, torch.float64):
        a, b = x.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_()
        if dtype == torch.float32:
            out = fused.gathered_mm(a, b, offsets, token, inverse)
        else:
            out = naive.grouped_mm(a[token] if gathered else a, b, offsets)
        first = torch.autograd.grad(out.square().sum(), (a, b), create_graph=True)
        results.append(torch.autograd.grad(sum(grad.square().sum() for grad in first), (a, b)))
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()


@on_device
def test_torchs_own_checks(device):
    (x, weight, offsets, token, probe), inverse = make("masked", 6, 2, 8, 12, torch.float32, device, groups=2)
    x, weight, probe = (tensor.requires_grad_() for tensor in (x, weight, probe))
    torch.library.opcheck(torch.ops.intbmoe.gathered_mm.default, (x, weight, offsets, token, inverse, False))
    torch.library.opcheck(torch.ops.intbmoe.gathered_outer.default, (x, probe, offsets, token, inverse, None))
    rows = x.detach()[token].requires_grad_()
    torch.library.opcheck(torch.ops.intbmoe.gathered_mm.default, (rows, weight, offsets, None, None, False))


@on_device
def test_a_compiled_step_is_the_same(device):
    (x, weight, offsets, token, probe), inverse = make("masked", 9, 2, 8, 12, torch.float32, device)

    def step(x, weight):
        return (fused.gathered_mm(x, weight, offsets, token, inverse) * probe).sum()

    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        run(a, b).backward()
        results.append((a.grad, b.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.skipif(INTERPRETING, reason="needs a CUDA device")
@on_device
def test_no_wait_for_the_device_and_replays_from_a_graph(device):
    (x, weight, offsets, token, probe), inverse = make("zipf", 300, 2, 64, 96, torch.bfloat16, device)
    x.requires_grad_()
    weight.requires_grad_()

    def step():
        out = fused.gathered_mm(x, weight, offsets, token, inverse)
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
    (fresh, _, other, tokens, _), rows = make("empty", 300, 2, 64, 96, torch.bfloat16, device)
    with torch.no_grad():
        x.copy_(fresh)
        for old, new in ((offsets, other), (token, tokens), (inverse, rows)):
            old.copy_(new)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@on_device
def test_bad_input_is_named(device):
    (x, weight, offsets, token, _), _ = make("balanced", 4, 1, 8, 8, torch.float32, device)
    with pytest.raises(ValueError, match=r"weight\.dtype=torch\.float16.*that of x"):
        fused.gathered_mm(x, weight.half(), offsets, token)
    with pytest.raises(ValueError, match=r"offsets\.dtype=torch\.int64.*int32"):
        fused.gathered_mm(x, weight, offsets.long(), token)
    with pytest.raises(ValueError, match=r"x\.dtype=torch\.float64.*float32"):
        fused.gathered_mm(x.double(), weight.double(), offsets, token)
    out = fused.gathered_mm(x.requires_grad_(), weight, offsets, token)
    with pytest.raises(ValueError, match="needs `inverse`"):
        out.sum().backward()


@pytest.mark.parametrize("device", ["cpu"])
def test_shapes_and_flops_without_a_kernel(device):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    (x, weight, offsets, token, _), inverse = make("balanced", 6, 2, 8, 12, torch.bfloat16, device)
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as counter:
        x, weight, offsets, token, inverse = map(mode.from_tensor, (x, weight, offsets, token, inverse))
        out = fused.gathered_mm(x.requires_grad_(), weight.requires_grad_(), offsets, token, inverse)
        out.sum().backward()
    assert (out.shape, x.grad.shape, weight.grad.shape) == ((12, 12), (6, 8), (5, 8, 12))
    assert counter.get_total_flops() == 3 * 2 * 12 * 8 * 12


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    tail=st.integers(0, 40),
    block=st.sampled_from([1, 2, 16]),
)
def test_every_tile_of_every_group_has_one_slot(counts, tail, block):
    """The rule at the head of fused_kernels.py, for the groups and the rows of none."""
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
    outer = fused.outer_tile(groups, inputs, outputs, dtype)
    for size in (*mm[:3], *outer[:3]):
        assert size >= 16
        assert size & (size - 1) == 0
    assert 1 <= fused.outer_parts(rows, groups, inputs, outputs, outer) <= 16
