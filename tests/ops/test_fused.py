"""Triton's kernels over tokens and rows against their specifications in float64, outputs and gradients.

The interpreter runs them where there is no GPU (``tests/interpreter.py``).
"""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from intbmoe.ops.backend import TRITON
from interpreter import INTERPRETING, on_device
from near import gradients_near, near, pairs

if not TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from intbmoe.ops import tiles
from intbmoe.ops.blocks import fused_gate
from intbmoe.ops.blocks import naive as blocks_naive
from intbmoe.ops.blocks.fused_combine import gated_combine
from intbmoe.ops.blocks.fused_filter import filter_rows
from intbmoe.ops.blocks.fused_gate import gated_rows
from intbmoe.ops.choose import fused as choose_fused
from intbmoe.ops.choose import naive as choose_naive
from intbmoe.ops.combine import fused as combine_fused
from intbmoe.ops.combine import naive as combine_naive
from intbmoe.ops.combine import sum_rows
from intbmoe.ops.permute import fused as permute_fused
from intbmoe.ops.permute import naive as permute_naive
from intbmoe.ops.permute import permute, sort
from intbmoe.ops.scores import fused as scores_fused
from intbmoe.ops.scores import naive as scores_naive
from intbmoe.ops.scores import router_scores
from intbmoe.ops.swiglu.fused import swiglu_network
from intbmoe.ops.tiles import Tiling

GROUPS = 5
# The interpreter takes a tenth of a millisecond per operation, so it gets only the cases that differ most.
TOKENS = (0, 1, 70) if INTERPRETING else (0, 1, 7, 8192)
FEW = [("zipf", 0), ("zipf", 1), ("nothing", 1), ("zipf", 24), ("empty", 24), ("masked", 24)]
# Routings are data: how a kernel is compiled and tiled depends only on the number of tokens.
ALL = [("zipf", 0), ("zipf", 1), ("nothing", 1), *product(("balanced", "zipf", "one", "masked", "nothing"), [7])]
ALL += [("zipf", 8192), ("masked", 8192)]
routed_tokens = pytest.mark.parametrize(("routing", "tokens"), FEW if INTERPRETING else ALL)
tokens_ = pytest.mark.parametrize("tokens", TOKENS)
# The interpreter runs narrow rows with a single routing.
WIDTHS = [*((*one, 37) for one in FEW), ("masked", 24, 12)]
if not INTERPRETING:
    # Kernels tile rows of up to 512, up to 1024 and more columns differently.
    WIDTHS = [*((*one, width) for one, width in product(ALL, (37, 2844))), ("zipf", 1000, 300), ("zipf", 1000, 700)]
routed_widths = pytest.mark.parametrize(("routing", "tokens", "width"), WIDTHS)
# The interpreter runs the first form of a kernel with every routing, and the others with those that differ most.
DIFFERENT = [("zipf", 0, 37), ("zipf", 1, 37), ("zipf", 24, 37), ("masked", 24, 12)] if INTERPRETING else WIDTHS


def routed_forms(names, first, *others):
    cases = [(*case, *first) for case in WIDTHS] + [(*case, *form) for form in others for case in DIFFERENT]
    return pytest.mark.parametrize(("routing", "tokens", "width", *names), cases)


if INTERPRETING:

    @pytest.fixture(autouse=True)
    def _several_tiles_a_program(monkeypatch):
        """As on a GPU with many rows: a program has two tiles of wide rows, and a large group has two programs."""
        monkeypatch.setattr(tiles, "ENOUGH_WARPS", 2)


def choices(routing, tokens, k, groups=GROUPS):
    """The group of each assignment, (tokens, k); −1 for none."""
    weights = {"zipf": 1 / torch.arange(1.0, groups + 1) ** 1.5, "one": torch.eye(groups)[groups // 2]}
    weights["empty"] = (torch.arange(groups) % 2).float()
    probability = weights.get(routing, torch.ones(groups))
    if tokens == 0:
        return torch.zeros(0, k, dtype=torch.int64)
    ids = torch.multinomial(probability, tokens * k, replacement=True).view(tokens, k)
    if routing == "masked":
        ids = torch.where(torch.rand(tokens, 1) < 0.3, -1, ids)
    return torch.full_like(ids, -1) if routing == "nothing" else ids


@on_device
@routed_tokens
@pytest.mark.parametrize("k", [1, 2, 3])
def test_counting_sorts_like_the_loop(device, routing, tokens, k):
    ids = choices(routing, tokens, k)
    found, expected = permute_fused.permute(ids.to(device), GROUPS), permute_naive.permute(ids, GROUPS)
    for a, b, c in zip(found, expected, sort(ids, GROUPS), strict=True):
        assert torch.equal(a.cpu(), b)
        assert torch.equal(b, c)
        assert a.dtype == c.dtype


@on_device
@pytest.mark.parametrize("programs", [256, 6, 1], ids="at most {} programs".format)
def test_counting_sorts_over_many_tiles_and_groups(device, programs, monkeypatch):
    monkeypatch.setattr(permute_fused, "MOST_PROGRAMS", programs)
    ids = torch.randint(-1, 64, (1250 if INTERPRETING else 5000, 2))  # 40 tiles are two chunks of counts
    for a, b in zip(permute_fused.permute(ids.to(device), 64), sort(ids, 64), strict=True):
        assert torch.equal(a.cpu(), b)


@on_device
@tokens_
@pytest.mark.parametrize(("choices_", "k"), [(8, 2), (1, 1), (5, 5), (33, 3)])
def test_routing_is_softmax_of_the_best(device, tokens, choices_, k):
    scores = torch.randn(tokens, choices_)
    scores[: tokens // 2] = scores[: tokens // 2].round()  # ties
    (quick,), (exact,) = pairs(device, scores)
    ids, weights = choose_fused.choose(quick, k)
    expected_ids, expected = choose_naive.choose(exact, k)
    assert torch.equal(ids.cpu(), expected_ids)
    near(weights, expected)
    probe = torch.randn(tokens, k)
    weights.backward(probe.to(device))
    expected.backward(probe.double())
    gradients_near([quick], [exact])


@on_device
def test_a_score_of_minus_infinity_is_chosen_last(device):
    scores = torch.tensor([[-torch.inf, 1.0, -torch.inf, 0.0]])
    ids, weights = choose_fused.choose(scores.to(device), 3)
    assert ids.tolist() == [[1, 3, 0]]
    assert weights[0, 2] == 0


def filter_exactly(x, token_term, block_term, token, group):
    return blocks_naive.filter_tokens(x[token], token_term[token], block_term[group])


@on_device
@routed_forms(["filtered"], [True], [False])
def test_filtered_rows(device, routing, tokens, width, filtered):
    ids = choices(routing, tokens, 2)
    plan = permute(ids, GROUPS, "tiled")
    count = int(plan.ends[-1])
    terms = (torch.randn(tokens, width), torch.randn(GROUPS, width)) if filtered else (None, None)
    quick, exact = pairs(device, torch.randn(tokens, width), *terms)
    rows = filter_rows(*quick, permute(ids.to(device), GROUPS, "fused"))
    token, group = plan.token[:count], plan.group[:count]
    expected = filter_exactly(*exact, token, group) if filtered else exact[0][token]
    near(rows[:count], expected)
    probe = torch.full((tokens * 2, width), torch.nan)  # rows without a group are not read
    probe[:count] = torch.randn(count, width)
    rows.backward(probe.to(device))
    expected.backward(probe[:count].double())
    gradients_near(quick, exact)


def block_tensors(rows, width, gate, device):
    """Rows of a grouped product, biases, gain and λ."""
    paths = 2 if gate else 1
    gain, scale = (torch.rand(width), torch.tensor([0.7])) if gate else (None, None)
    return torch.randn(rows, paths * width), torch.randn(GROUPS, paths * width), gain, scale


def exact_gate(rows, bias, gain, scale, group):
    rows = rows[: len(group)] + bias[group]
    return rows if gain is None else blocks_naive.dprg(*rows.chunk(2, -1), gain, scale)


@on_device
@routed_forms(["gate"], [True], [False])
def test_gated_rows(device, routing, tokens, width, gate):
    plan = permute(choices(routing, tokens, 2), GROUPS, "tiled")
    count = int(plan.ends[-1])
    norm = torch.rand(width), torch.randn(width)
    quick, exact = pairs(device, *block_tensors(2 * tokens, width, gate, device), *norm)
    z = gated_rows(*quick[:4], quick[4:], plan.ends.to(device), 1e-5)
    expected = exact_gate(*exact[:4], plan.group[:count])
    expected = F.layer_norm(expected, (width,), *exact[4:], 1e-5)
    near(z[:count], expected)
    probe = torch.full((2 * tokens, width), torch.nan)
    probe[:count] = torch.randn(count, width)
    z.backward(probe.to(device))
    expected.backward(probe[:count].double())
    gradients_near(quick, exact, count)


@on_device
@pytest.mark.parametrize("scale", [0.0, 1e-3])
def test_variances_of_rows_far_from_zero(device, scale):
    """The variance is not the difference of two large numbers: with a mean of 100, only three digits would be left."""
    rows, ends = torch.randn(6, 88) + 100 * (torch.arange(88) < 44), torch.tensor([2, 6], dtype=torch.int32)
    bias, gain, norm, shift = torch.zeros(2, 88), torch.ones(44), torch.ones(44), torch.zeros(44)
    quick, exact = pairs(device, rows, bias, gain, torch.tensor([scale]), norm, shift)
    z = gated_rows(*quick[:4], quick[4:], ends.to(device), 1e-5)
    value, gate = exact[0].chunk(2, 1)
    near(z, F.layer_norm(blocks_naive.dprg(value, gate, exact[2], exact[3]), (44,)))


@on_device
@pytest.mark.parametrize(("pieces", "gate"), [(2, True), (3, True), (3, False)])
def test_rows_in_pieces(device, pieces, gate, monkeypatch):
    tiling = Tiling(elements=48, per_lane=1, tiles=2, stages=2, pieces=(pieces,))
    monkeypatch.setattr(fused_gate, "FORWARD", {None: tiling})
    monkeypatch.setattr(fused_gate, "BACKWARD", {None: tiling})
    monkeypatch.setattr(fused_gate, "FEW_ROWS", 0)
    test_gated_rows(device, "masked", 5, 44, gate)


@on_device
@pytest.mark.parametrize(
    ("routing", "tokens", "width", "gate"),
    [("masked", 37, 44, True), ("one", 5, 700, True), ("masked", 37, 44, False)]
    + ([] if INTERPRETING else [("one", 5, 700, False)]),
)
def test_rows_too_wide_for_registers(device, gate, routing, tokens, width, monkeypatch):
    monkeypatch.setattr(fused_gate, "WIDE", 0)
    test_gated_rows(device, routing, tokens, width, gate)


def check_router_scores(device, tokens, half, hidden, choices, dim=70):
    maps = torch.randn(hidden, dim), torch.randn(hidden), torch.randn(choices, hidden), torch.randn(choices)
    quick, exact = pairs(device, torch.randn(tokens, dim), *maps)
    dtype = torch.float16 if half else torch.float32
    scores, cast = router_scores(quick[0], quick[1:3], quick[3:], dtype, "fused")
    wanted, _ = scores_naive.router_scores(exact[0], exact[1:3], exact[3:], torch.float64)
    near(scores, wanted)
    assert torch.equal(cast, quick[0].to(dtype))
    probe, token_probe = torch.randn(tokens, choices), torch.randn(tokens, dim).to(dtype)
    torch.autograd.backward([scores, cast], [probe.to(device), token_probe.to(device)])
    torch.autograd.backward([wanted, exact[0]], [probe.double(), token_probe.double()])
    gradients_near(quick, exact)


@on_device
@tokens_
@pytest.mark.parametrize("half", [True, False], ids=["half", "float32"])
def test_router_scores(device, tokens, half):
    check_router_scores(device, tokens, half, hidden=20, choices=5)


@on_device
@pytest.mark.parametrize(("hidden", "choices"), [(64, 96), (100, 40)])
def test_scores_of_a_large_router(device, hidden, choices):
    check_router_scores(device, 150, False, hidden, choices)


@on_device
@pytest.mark.parametrize(("dim", "hidden", "choices"), [(300, 16, 1), (40, 100, 20)])
def test_router_gradients_in_several_steps(device, dim, hidden, choices, monkeypatch):
    """Three programs sum over two steps each, the last over less; with 300 inputs, tokens have two programs each."""
    monkeypatch.setattr(scores_fused, "ENOUGH_PROGRAMS", 1)
    monkeypatch.setattr(scores_fused, "STEPS", 2)
    check_router_scores(device, 150, False, hidden, choices, dim)


@on_device
def test_a_nan_token_has_nan_scores(device):
    x, maps = torch.randn(3, 8), [torch.randn(shape).to(device) for shape in ((4, 8), (4,), (3, 4), (3,))]
    x[1, 5] = torch.nan
    scores, _ = router_scores(x.to(device), maps[:2], maps[2:], torch.float32, "fused")
    assert scores.isnan().all(1).tolist() == [False, True, False]


@on_device
def test_tokens_of_a_router_that_only_casts(device):
    (x, *maps), _ = pairs(device, torch.randn(6, 8), *(torch.randn(s) for s in ((4, 8), (4,), (3, 4), (3,))))
    cast = router_scores(x, maps[:2], maps[2:], torch.float16, "fused")[1]
    (grad,) = torch.autograd.grad(cast.sum(), [x])
    assert torch.equal(grad, torch.ones_like(x))


@on_device
@routed_forms(["gate", "shared"], [True, True], [True, False], [False, True], [False, False])
def test_gated_combine(device, routing, tokens, width, gate, shared):
    ids = choices(routing, tokens, 2)
    plan = permute(ids, GROUPS, "tiled")
    count = int(plan.ends[-1])
    beside = torch.randn(tokens, width) if shared else None
    tensors = (*block_tensors(2 * tokens, width, gate, device), torch.rand(tokens, 2), beside)
    quick, exact = pairs(device, *tensors)
    y = gated_combine(*quick, permute(ids.to(device), GROUPS, "fused"), torch.float32)
    z = exact_gate(*exact[:4], plan.group[:count])
    expected = combine_naive.combine(z, exact[4], plan.inverse) if tokens < 100 else _gather_sum(z, exact[4], plan)
    expected = expected + exact[5] if shared else expected
    near(y, expected)
    probe = torch.randn(tokens, width)
    y.backward(probe.to(device))
    if expected.requires_grad:
        expected.backward(probe.double())
    gradients_near(quick, exact, count)


@on_device
@pytest.mark.parametrize("routing", ["zipf", "masked"])
def test_the_shared_experts_gradient_has_its_type(device, routing):
    ids, width = choices(routing, 24, 2).to(device), 37
    plan = permute(ids, GROUPS, "fused", complete=routing != "masked")
    (*tensors, shared), _ = pairs(
        device, *block_tensors(48, width, True, device), torch.rand(24, 2), torch.randn(24, width)
    )
    shared = shared.detach().half().requires_grad_()
    probe = torch.randn(24, width, device=device)
    gated_combine(*tensors, shared, plan, torch.float32).backward(probe)
    assert torch.equal(shared.grad, probe.half())


def _gather_sum(rows, weights, plan):
    """The same as ``combine_naive``, fast enough for many tokens."""
    rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return (rows[plan.inverse.clamp(max=len(rows) - 1)] * weights.unsqueeze(-1)).sum(1)


@on_device
@routed_widths
def test_combine(device, routing, tokens, width):
    plan = permute(choices(routing, tokens, 2), GROUPS, "tiled")
    quick, exact = pairs(device, torch.randn(2 * tokens, width), torch.rand(tokens, 2))
    rest = (tensor.to(device) for tensor in (plan.token, plan.choice, plan.inverse))
    y = combine_fused.combine(*quick, *rest, None)
    expected = _gather_sum(*exact, plan)
    if tokens < 100:
        torch.testing.assert_close(expected, combine_naive.combine(*exact, plan.inverse))
    near(y, expected)
    probe = torch.randn(tokens, width)
    y.backward(probe.to(device))
    expected.backward(probe.double())
    gradients_near(quick, exact)


@on_device
@routed_tokens
@pytest.mark.parametrize("trimmed", [False, True], ids=["all", "trimmed"])
def test_sum_rows(device, routing, tokens, trimmed):
    plan = permute(choices(routing, tokens, 2), GROUPS, "tiled")
    count = int(plan.ends[-1]) if trimmed else 2 * tokens  # rows without a group may be there or not
    (rows,), exact = pairs(device, torch.randn(count, 37))
    token, inverse = plan.token[:count].to(device), plan.inverse.clamp(max=count).to(device)
    y = sum_rows(rows, token, inverse, "fused")
    ones = torch.ones(tokens, 2, dtype=torch.float64)
    expected = combine_naive.combine(*exact, ones, inverse.cpu()) if tokens < 100 else _gather_sum(*exact, ones, plan)
    near(y, expected)
    near(sum_rows(rows, token, inverse, "tiled"), expected)
    if expected.requires_grad:
        probe = torch.randn(tokens, 37)
        y.backward(probe.to(device))
        expected.backward(probe.double())
        gradients_near((rows,), exact)
    if routing == "masked" and tokens < 100:
        torch.library.opcheck(torch.ops.intbmoe.sum_rows.default, (rows.detach(), token, inverse, "fused", None))


@on_device
@pytest.mark.parametrize("choices_", [6, 8])
def test_a_nan_spoils_its_own_token_alone(device, choices_):
    scores = torch.randn(4, choices_)
    scores[1] = torch.nan
    scores[2, 3] = torch.nan
    ids, weights = choose_fused.choose(scores.to(device), 2)
    expected, _ = choose_naive.choose(scores, 2)
    assert torch.equal(ids.cpu(), expected)
    assert weights.isnan().any(1).tolist() == [False, True, True, False]


@on_device
def test_an_id_out_of_range_takes_no_other_ones_row(device):
    plan = permute(torch.tensor([[0], [8], [2], [3]], device=device), 6, "fused")
    assert sorted(plan.inverse.flatten().tolist()) == [0, 1, 2, 3]
    assert plan.counts.tolist() == [1, 0, 1, 1, 0, 0]


@on_device
def test_second_derivatives_are_refused(device):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    maps = [torch.randn(8, 8, device=device, requires_grad=True) for _ in range(3)]
    for wanted in (x, *maps):
        y = swiglu_network(x, *maps)
        for whole in (y.sum(), 0):  # with the network's own gradient, and without
            (grad,) = torch.autograd.grad(y.square().sum(), wanted, create_graph=True)
            with pytest.raises(RuntimeError, match=r"second derivatives.*INTBMOE_TRITON=0"):
                (grad.square().sum() + whole).backward(retain_graph=True)
