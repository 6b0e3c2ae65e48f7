"""SMEAR at both levels, against loops written from the equations."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import intbmoe

DIM, HIDDEN, E = 6, 10, 3
NAMES = ("smear", "smear_token")
kinds = pytest.mark.parametrize("kind", ["gelu", "swiglu"])
both = pytest.mark.parametrize("name", NAMES)


def make(name, **options):
    layer = intbmoe.create(name, DIM, HIDDEN, experts=E, **options).double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def tokens(*shape):
    return torch.randn(*shape, DIM, dtype=torch.float64)


def merged_expert(layer, a, z):
    """One token through the expert whose every parameter is the weighted mean."""
    theta = {name: sum(a[e] * value[e] for e in range(len(value))) for name, value in layer.experts.named_parameters()}
    if layer.config.expert == "gelu":
        inner = torch.nn.functional.gelu(z @ theta["up.weight"] + theta["up.bias"])
        return inner @ theta["down.weight"] + theta["down.bias"]
    inner = torch.nn.functional.silu(z @ theta["gate.weight"]) * (z @ theta["up.weight"])
    return inner @ theta["down.weight"]


def naive(layer, x, mask):
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        valid = [x[b, t] for t in range(x.shape[1]) if mask[b, t]]
        for t in range(x.shape[1]):
            if mask[b, t]:
                routed = sum(valid) / len(valid) if layer.config.level == "example" else x[b, t]
                y[b, t] = merged_expert(layer, (layer.router.weight @ routed).softmax(0), x[b, t])
    return y


@both
@kinds
def test_outputs_and_gradients_are_those_of_the_equations(name, kind):
    layer = make(name, expert=kind)
    x = tokens(4, 5).requires_grad_()
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[0, 1:4] = False
    mask[3] = False
    leaves = [x, *layer.parameters()]
    found, expected = layer(x, mask), naive(layer, x, mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(x)
    grads = [torch.autograd.grad(y, leaves, upstream) for y in (found, expected)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-11)


def test_more_sequences_than_are_merged_at_once():
    layer, x = make("smear"), tokens(70, 2)
    torch.testing.assert_close(layer(x), naive(layer, x, torch.ones(70, 2, dtype=torch.bool)), rtol=0, atol=1e-12)


@both
def test_an_undecided_router_runs_the_mean_expert(name):
    layer, x = make(name), tokens(2, 4)
    layer.router.weight.data.zero_()
    expected = torch.stack(
        [merged_expert(layer, torch.full((E,), 1 / E, dtype=x.dtype), row) for row in x.view(-1, DIM)]
    )
    torch.testing.assert_close(layer(x).view(-1, DIM), expected, rtol=0, atol=1e-12)


@both
def test_a_certain_router_runs_one_expert(name):
    layer = make(name)
    x = tokens(2, 4)
    x[..., 0] = 1
    layer.router.weight.data.zero_()
    layer.router.weight.data[1, 0] = 800.0  # exp(−800) is zero
    expected = layer.experts.batch(x.view(1, -1, DIM).expand(E, -1, DIM))[1]
    torch.testing.assert_close(layer(x).view(-1, DIM), expected, rtol=0, atol=1e-12)


@both
def test_identical_experts_do_not_feel_the_router(name):
    layer, x = make(name), tokens(2, 4)
    for parameter in layer.experts.parameters():
        parameter.data.copy_(parameter.data[:1].expand_as(parameter))
    before = layer(x)
    layer.router.weight.data.normal_()
    torch.testing.assert_close(layer(x), before, rtol=0, atol=1e-12)


def test_levels_agree_on_sequences_of_one_token_and_only_there():
    example, token = make("smear"), make("smear_token")
    token.load_state_dict(example.state_dict())
    one, many = tokens(3, 1), tokens(3, 4)
    torch.testing.assert_close(example(one), token(one), rtol=0, atol=1e-12)
    assert (example(many) - token(many)).abs().max() > 1e-3


def test_merging_parameters_is_not_mixing_outputs():
    layer, x = make("smear"), tokens(1, 4)
    a = (layer.router.weight @ x[0].mean(0)).softmax(0)
    mixed = torch.einsum("e,etd->td", a, layer.experts.batch(x.expand(E, -1, -1)))
    assert (layer(x)[0] - mixed).abs().max() > 1e-3


@both
def test_expert_dropout_drops_entries_alone_and_renormalises(name):
    layer = make(name, expert_dropout=0.3).train()
    layer.router.weight.data.zero_()
    a = layer._coefficients(tokens(20_000))
    torch.testing.assert_close(a.sum(-1), torch.ones(20_000).double())
    kept = (a > 1e-6).sum(-1)
    # If no expert is kept, the constant added before renormalising makes the weights uniform.
    full = (a - 1 / E).abs().amax(-1) < 1e-12
    assert full.double().mean().item() == pytest.approx(0.7**3 + 0.3**3, abs=0.015)
    assert (kept == 2).double().mean().item() == pytest.approx(3 * 0.7**2 * 0.3, abs=0.015)
    torch.testing.assert_close(a[kept == 2].amax(-1), torch.full_like(a[kept == 2, 0], 0.5), rtol=0, atol=1e-9)


@both
def test_expert_dropout_is_for_training_and_can_be_off(name):
    x = tokens(30, 4)
    layer = make(name, expert_dropout=0.5)
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))
    quiet = make(name, expert_dropout=0.0).train()
    assert torch.equal(quiet(x), quiet(x))


@both
def test_dropping_everything_leaves_finite_gradients(name):
    layer = make(name, expert_dropout=0.999999).train()
    (layer(tokens(2, 3)).square().sum()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_the_router_starts_small():
    layer = intbmoe.create("smear", 256, 8, experts=64)
    assert layer.router.weight.std().item() == pytest.approx(0.01, rel=0.05)


def test_parameters_and_flops_of_the_table():
    """One merge of 17 experts of 295,872, one run of the merged one on 196 tokens, one call of the router."""
    layer = intbmoe.create("smear", 192, 768, experts=17).eval()
    assert layer.active_parameters() == 17 * 295_872 + 192 * 17
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.randn(1, 196, 192))
    assert counter.get_total_flops() == 2 * (17 * 295_872 + 196 * 2 * 192 * 768 + 192 * 17)


def test_the_token_level_builds_no_weight_set_for_a_token():
    layer = make("smear_token")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        layer(tokens(1, 200))
    assert max(kept) <= 200 * E * max(DIM, HIDDEN) < 200 * DIM * HIDDEN


def test_bad_options():
    with pytest.raises(ValueError, match=r"level='word'.*'example' or 'token'"):
        intbmoe.create("smear", DIM, HIDDEN, level="word")
    with pytest.raises(ValueError, match=r"expert_dropout=1"):
        intbmoe.create("smear", DIM, HIDDEN, expert_dropout=1)


# The authors' router.


def layer_norm(x, norm):
    spread = (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    return (x - x.mean(-1, keepdim=True)) / spread * norm.weight + norm.bias


@both
def test_the_official_router_normalises_its_input_and_its_rows(name):
    layer, x = make(name, router_norm=True), tokens(3, 5).requires_grad_()
    routed = x.mean(1) if name == "smear" else x.view(-1, DIM)
    logits = layer_norm(routed, layer.input_norm) @ layer_norm(layer.router.weight, layer.row_norm).t()
    a = logits.softmax(-1)
    rows = a.repeat_interleave(5, 0) if name == "smear" else a
    expected = torch.stack([merged_expert(layer, row, z) for row, z in zip(rows, x.view(-1, DIM), strict=True)])
    found = layer(x).view(-1, DIM)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    leaves = [x, *layer.parameters()]
    grads = [torch.autograd.grad(y.square().sum(), leaves) for y in (found, expected)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-11)
    assert (found - make(name)(x).view(-1, DIM)).abs().max() > 1e-3


def test_the_official_router_starts_with_a_gain_of_a_hundredth_and_is_an_option():
    layer = intbmoe.create("smear", 192, 8, experts=17, router_norm=True)
    assert (layer.row_norm.weight == 0.01).all()
    assert (layer.input_norm.weight == 1).all()
    plain = intbmoe.create("smear", 192, 8, experts=17)
    assert not hasattr(plain, "row_norm")
    extra = sum(p.numel() for p in layer.parameters()) - sum(p.numel() for p in plain.parameters())
    assert extra == 4 * 192  # in four layers 24.070 M become 24.073 M, which the paper does not print
