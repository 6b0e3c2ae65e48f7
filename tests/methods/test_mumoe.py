"""μMoE: the factored layers against the experts they represent, the gate, and the initial values."""

import math

import pytest
import torch
import torch.nn.functional as F

import intbmoe

D, H, E, N = 6, 9, 5, 7
FORMS = ["mumoe_cp", "mumoe_cp_own", "mumoe_tr"]


def make(form, **options):
    options = {"experts": E, "rank": 4, **options}
    if form == "mumoe_tr":
        options = {"ring_ranks": (2, 3), **options}
    if form == "mumoe_cp_own":
        options["share_expert_factor"] = False
    layer = intbmoe.create(form.removesuffix("_own"), D, H, **options).double()
    torch.nn.init.normal_(layer.gate)  # it starts at zero, where all gates are equal
    return layer


def tokens(n=N):
    return torch.randn(1, n, D, dtype=torch.float64)


def expert_tensor(layer, which):
    """W (E, inputs + 1, outputs) of one of the two layers, built in full from its factors."""
    factors = getattr(layer, which)
    if hasattr(factors, "experts"):
        return torch.einsum("eab,ibc,oac->eio", factors.experts, factors.inputs, factors.outputs)
    a = layer.experts[0 if which == "first" else -1]
    return torch.einsum("er,ir,or->eio", a, factors.inputs, factors.outputs)


def entmax_by_bisection(z):
    half = z / 2
    low, high = half.max().item() - 1, half.max().item()
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if (half - middle).clamp(min=0).square().sum() > 1 else (low, middle)
    # One Newton step on the support, so that autograd sees how the threshold depends on z.
    inside = half > low
    gap = torch.where(inside, half - low, 0)
    threshold = low + (gap.square().sum() - 1) / (2 * gap.sum()).detach()
    return torch.where(inside, half - threshold, 0).square()


def naive(layer, x):
    """Straight from the equations: for each token, mix E explicit networks' layers."""
    first, second = expert_tensor(layer, "first"), expert_tensor(layer, "second")
    outputs = []
    for token in x[0]:
        scores = layer.gate.T @ token
        scores = (scores - scores.mean()) / torch.sqrt(scores.var(correction=0) + 1e-5)
        a = entmax_by_bisection(scores)
        h = sum(a[e] * (first[e, :-1].T @ token + first[e, -1]) for e in range(E))
        h = F.gelu(h)
        outputs.append(sum(a[e] * (second[e, :-1].T @ h + second[e, -1]) for e in range(E)))
    return torch.stack(outputs).unsqueeze(0)


@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_gradients_are_those_of_the_explicit_experts(form):
    layer, x = make(form), tokens()
    assert (layer.gate_weights(x[0]) == 0).any(), "the test should see sparse gates"
    names, parameters = zip(*layer.named_parameters(), strict=True)
    target = torch.randn_like(x)
    results = []
    for run in (layer, lambda x: naive(layer, x)):
        inputs = x.clone().requires_grad_()
        y = run(inputs)
        results.append((y.detach(), torch.autograd.grad((y * target).sum(), (inputs, *parameters))))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-10, atol=1e-12)
    for name, ours, theirs in zip(("x", *names), results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("form", FORMS)
def test_a_gate_on_one_expert_gives_that_expert(form):
    layer, x = make(form), tokens()[0]
    for expert in range(E):
        a = F.one_hot(torch.full((N,), expert), E).double()
        w1, w2 = expert_tensor(layer, "first")[expert], expert_tensor(layer, "second")[expert]
        h = F.gelu(x @ w1[:-1] + w1[-1])
        torch.testing.assert_close(layer.block(x, a), h @ w2[:-1] + w2[-1])


@pytest.mark.parametrize("form", FORMS)
def test_the_gate_starts_uniform_and_learns_at_once(form):
    layer, x = make(form), tokens()
    torch.nn.init.zeros_(layer.gate)
    torch.testing.assert_close(layer.gate_weights(x[0]), torch.full((N, E), 1 / E, dtype=torch.float64))
    layer(x).square().sum().backward()
    assert layer.gate.grad.isfinite().all()
    assert layer.gate.grad.abs().sum() > 0


def test_the_gate_does_not_see_the_scale_of_its_scores():
    layer, x = make("mumoe_cp"), tokens()[0]
    weights = layer.gate_weights(x)
    with torch.no_grad():
        layer.gate.mul_(100)
    torch.testing.assert_close(layer.gate_weights(x), weights, rtol=1e-3, atol=1e-4)


def test_gate_affine_starts_without_effect_and_scales_the_scores():
    layer, x = make("mumoe_tr", gate_affine=True), tokens()[0]
    plain = make("mumoe_tr")
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if not k.startswith("gate_norm")})
    torch.testing.assert_close(layer.gate_weights(x), plain.gate_weights(x))
    torch.nn.init.constant_(layer.gate_norm.weight, 50.0)
    assert ((layer.gate_weights(x) > 0).sum(-1) == 1).all()


def test_a_ring_of_rank_one_does_not_depend_on_the_gate():
    layer, x = make("mumoe_tr", ring_ranks=(1, 1), rank=3), tokens()
    for factors in (layer.first, layer.second):
        torch.nn.init.ones_(factors.experts)
    before = layer(x)
    torch.nn.init.normal_(layer.gate)
    torch.testing.assert_close(layer(x), before)


def test_sharing_the_expert_factor_saves_one():
    counts = [sum(p.numel() for p in make(form).parameters()) for form in ("mumoe_cp", "mumoe_cp_own")]
    assert counts[1] - counts[0] == E * 4
    assert counts[0] == D * E + 4 * (E + (D + 1 + H) + (H + 1 + D))


def test_the_start_of_every_factor():
    cp = intbmoe.create("mumoe_cp", 64, 96, experts=40, rank=300)
    assert abs(cp.experts[0].mean() - 1) < 0.05
    assert abs(cp.experts[0].std() - 1) < 0.05
    tr = intbmoe.create("mumoe_tr", 64, 96, experts=500, rank=50, ring_ranks=(4, 3))
    core = tr.first.experts
    diagonal = torch.eye(4, 3, dtype=torch.bool)
    assert (core[:, ~diagonal] == 0).all()
    assert abs(core[:, diagonal].mean() - 1) < 0.1
    assert abs(core[:, diagonal].std() - 1) < 0.1
    for factor, fan in (
        (cp.first.inputs, 64), (cp.second.inputs, 96), (cp.first.outputs, 300), (cp.second.outputs, 300),
        (tr.first.inputs, 64), (tr.second.inputs, 96), (tr.first.outputs, 200), (tr.second.outputs, 200),
    ):  # fmt: skip
        bound = 1 / math.sqrt(fan)
        assert 0.98 * bound < factor.abs().max() <= bound
    assert not cp.gate.any()
    assert not tr.gate.any()


def test_output_scale_at_the_start():
    """The spread of the whole block for unit inputs at d = 192, measured on the authors' code: 0.066 and 0.056."""
    x = torch.randn(1, 256, 192)
    with torch.no_grad():
        cp = intbmoe.create("mumoe_cp", 192, 768, experts=17, rank=256, share_expert_factor=False)(x).std().item()
        tr = intbmoe.create("mumoe_tr", 192, 768, experts=17, rank=64)(x).std().item()
    assert cp == pytest.approx(0.066, rel=0.25)
    assert tr == pytest.approx(0.056, rel=0.25)


def test_default_ranks_follow_the_width():
    assert intbmoe.create("mumoe_cp", 10, 8).first.inputs.shape == (11, 8)
    assert intbmoe.create("mumoe_tr", 10, 8).first.inputs.shape == (11, 4, 2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mumoe_cp", {"rank": 0}, "rank=0"),
        ("mumoe_cp", {"experts": 0}, "experts=0"),
        ("mumoe_cp", {"share_expert_factor": "yes"}, "share_expert_factor='yes'"),
        ("mumoe_tr", {"ring_ranks": 4}, "ring_ranks=4"),
        ("mumoe_tr", {"ring_ranks": (4, 0)}, r"ring_ranks\[1\]=0"),
        ("mumoe_tr", {"gate_affine": 1}, "gate_affine=1"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        intbmoe.create(name, D, H, **options)


def test_the_three_quantities():
    for form in FORMS:
        assert make(form).quantities() == (E, 1, 0)


# The authors' BatchNorm gate.


@pytest.mark.parametrize("form", FORMS)
def test_the_batch_norm_gate_is_torchs_batch_norm_over_valid_tokens(form):
    layer = make(form, gate_norm="batch")
    norm = torch.nn.BatchNorm1d(E, affine=False).double()
    for seed in range(3):
        x = torch.randn(2, N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        mask = torch.ones(2, N, dtype=torch.bool)
        mask[1, 4:] = False
        expected = norm(x[mask] @ layer.gate)
        found = layer.gate_weights(x.reshape(-1, D), mask)[mask.flatten()]
        for a, scores in zip(found, expected, strict=True):
            torch.testing.assert_close(a, entmax_by_bisection(scores), rtol=0, atol=1e-10)
        y = layer(x, mask)
        torch.testing.assert_close(y[mask], layer.block(x[mask], found), rtol=0, atol=1e-12)
        (y.square().sum() + intbmoe.aux_loss(layer)).backward()
        intbmoe.after_step(layer)
    torch.testing.assert_close(layer.gate_mean, norm.running_mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer.gate_variance, norm.running_var, rtol=1e-10, atol=1e-12)
    layer.eval(), norm.eval()
    x = tokens(4)
    expected = torch.stack([entmax_by_bisection(scores) for scores in norm(x[0] @ layer.gate)])
    torch.testing.assert_close(layer.gate_weights(x[0]), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("training", [True, False])
def test_the_batch_norm_gate_has_the_gradients_of_its_equations(training):
    layer = make("mumoe_cp", gate_norm="batch", gate_affine=True).train(training)
    x = tokens(6).requires_grad_()
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()), fast_mode=True)


def test_running_means_move_once_a_step_whatever_the_accumulation():
    whole, parts = make("mumoe_cp", gate_norm="batch"), make("mumoe_cp", gate_norm="batch")
    parts.load_state_dict(whole.state_dict())
    x = torch.randn(4, 5, D, dtype=torch.float64)
    for layer, pieces in ((whole, [x]), (parts, x.chunk(2))):
        for piece in pieces:
            layer(piece)
            intbmoe.aux_loss(layer)
        assert (layer.gate_mean == 0).all()  # a forward does not change it
        intbmoe.after_step(layer)
    assert (whole.gate_mean != 0).all()
    torch.testing.assert_close(parts.state_dict(), whole.state_dict())


def test_the_batch_norm_gate_is_not_for_causal_models_and_leaves_the_default_alone():
    assert "gate_norm='layer'" in make("mumoe_tr", gate_norm="batch").config.noncausal_reason()
    plain = make("mumoe_tr")
    assert plain.config.noncausal_reason() is None
    assert not [name for name, _ in plain.named_buffers()]
    half = make("mumoe_cp", gate_norm="batch").bfloat16()
    assert half.gate_mean.dtype == torch.float32
    assert half(tokens().bfloat16()).dtype == torch.bfloat16
