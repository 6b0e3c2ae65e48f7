"""ReMoE: against a loop over tokens, the L1 loss by hand, and λ's course over steps, layers and a resume."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import intbmoe
from intbmoe.methods.remoe import ReMoE
from ranks import run_ranks

DIM, HIDDEN = 6, 5


def make(**options):
    torch.manual_seed(1)
    return ReMoE(DIM, HIDDEN, **{"experts": 4, "router_std": None, **options}).double()


def expert(layer, e, x):
    up, down = layer.experts.up, layer.experts.down
    return F.gelu(x @ up.weight[e] + up.bias[e]) @ down.weight[e] + down.bias[e]


def naive(layer, x, mask):
    """The equations of the file, token by token: output and sparsity loss."""
    c = layer.config
    y = torch.zeros_like(x)
    scores = []
    for b, t in mask.nonzero().tolist():
        r = F.relu(layer.router.weight @ x[b, t])
        y[b, t] = sum(r[e] * expert(layer, e, x[b, t]) for e in range(c.experts) if r[e] > 0)
        scores.append(r)
    n = len(scores)
    f = [c.experts / (c.top_k * n) * sum(int(r[e] > 0) for r in scores) for e in range(c.experts)]
    return y, layer.strength * sum(f[e] * r[e] for r in scores for e in range(c.experts)) / n


@pytest.mark.parametrize("options", [{}, {"top_k": 2, "experts": 5}, {"expert": "gelu", "router_std": 0.3}], ids=str)
def test_outputs_losses_and_gradients_agree_with_a_loop(options):
    layer = make(sparsity_strength=0.7, **options)
    with torch.no_grad():
        for bias in (layer.experts.up.bias, layer.experts.down.bias):
            bias.normal_()
    x = torch.randn(3, 5, DIM, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(3, 5) > 0.3
    results = []
    for form in ("layer", "naive"):
        y, loss = (layer(x, mask), intbmoe.aux_loss(layer)) if form == "layer" else naive(layer, x, mask)
        total = y.square().sum() + loss
        results.append((y, loss, torch.autograd.grad(total, [x, *layer.parameters()])))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)


def test_routing_lists_the_active_experts_heaviest_first():
    layer = make()
    x = torch.randn(1, 20, DIM, dtype=torch.float64)
    with intbmoe.record_routing(layer) as log:
        layer(x)
    scores = F.relu(x[0] @ layer.router.weight.t())
    ids, weights = log[""].ids, log[""].weights
    assert torch.equal((ids >= 0).sum(1), (scores > 0).sum(1))
    assert torch.equal(weights, scores.sort(1, descending=True).values)
    assert torch.equal(ids >= 0, weights > 0)
    chosen = ids >= 0
    assert torch.equal(scores.gather(1, ids.clamp(min=0))[chosen], weights[chosen])


def test_a_token_without_an_active_expert_gives_zero():
    layer = make()
    x = torch.randn(1, 1, DIM, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        layer.router.weight.copy_(-x[0].expand(4, DIM))
    y = layer(x)
    assert (y == 0).all()
    (y.sum() + intbmoe.aux_loss(layer)).backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_output_is_continuous_where_a_score_crosses_zero():
    layer = make().eval()
    x = torch.randn(DIM, dtype=torch.float64)
    w = layer.router.weight[0].detach()
    x = x - w * (w @ x) / (w @ w)  # on the border of expert 0
    jumps = []
    for eps in (1e-3, 1e-6, 1e-9):
        sides = layer(torch.stack([x - eps * w, x + eps * w]).unsqueeze(0))[0]
        jumps.append((sides[0] - sides[1]).abs().max().item())
    assert jumps[0] > 0
    assert jumps[1] < 2e-3 * jumps[0]
    assert jumps[2] < 2e-3 * jumps[1]


def test_twice_the_router_gives_twice_the_output():
    layer = make().eval()
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    y = layer(x)
    with torch.no_grad():
        layer.router.weight *= 2
    torch.testing.assert_close(layer(x), 2 * y)


def test_at_the_target_load_the_loss_is_the_plain_l1_norm():
    layer = make(sparsity_strength=0.5)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(4, DIM))
    x = torch.eye(4, DIM, dtype=torch.float64).unsqueeze(0) * torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1)
    layer(x)  # each expert is active for one of four tokens: f = 1
    torch.testing.assert_close(intbmoe.aux_loss(layer).item(), 0.5 * (1 + 2 + 3 + 4) / 4)


def test_an_uneven_load_costs_more_than_an_even_one():
    layer = make(sparsity_strength=0.5)
    losses = []
    for weight in (torch.eye(4, DIM), torch.zeros(4, DIM).index_fill(0, torch.tensor(0), 1.0)):
        with torch.no_grad():
            layer.router.weight.copy_(weight)
        layer(torch.eye(4, DIM, dtype=torch.float64).unsqueeze(0))
        losses.append(intbmoe.aux_loss(layer).item())
    assert losses[1] == pytest.approx(4 * losses[0])


def run_steps(model, x, steps, optimizer=None):
    values = []
    for _ in range(steps):
        loss = (model(x) - x).square().mean() + intbmoe.aux_loss(model)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        intbmoe.after_step(model)
        values.append(next(layer for _, layer in intbmoe.layer.moe_layers(model)).strength.item())
    return values


def always(count):
    """A layer in which ``count`` of 4 experts are active for every token of ones."""
    layer = make()
    with torch.no_grad():
        layer.router.weight.copy_(torch.where(torch.arange(4) < count, 1.0, -1.0).view(4, 1).expand(4, DIM))
    return layer


ONES = torch.ones(2, 3, DIM, dtype=torch.float64)


@pytest.mark.parametrize(("active", "rate"), [(3, 1.2), (0, 1 / 1.2), (1, 1 / 1.2)], ids=["denser", "sparser", "equal"])
def test_strength_grows_while_too_dense_and_shrinks_otherwise(active, rate):
    """In case of equality it shrinks, as in the authors' code."""
    values = run_steps(always(active), ONES, 5)
    torch.testing.assert_close(values, [1e-8 * rate**n for n in range(1, 6)], rtol=1e-6, atol=0)


def test_from_start_to_a_hundredth_takes_76_steps():
    values = run_steps(always(4), ONES, 76)
    assert values[74] < 1e-2 <= values[75]


def test_all_layers_of_a_model_share_one_strength_steered_by_their_mean():
    for counts, rate in (((3, 0), 1.2), ((2, 0), 1 / 1.2), ((1, 1), 1 / 1.2), ((0, 1), 1 / 1.2), ((4, 0), 1.2)):
        model = nn.Sequential(*(always(count) for count in counts))
        for layer in model:
            layer(ONES)
        intbmoe.aux_loss(model)
        intbmoe.after_step(model)
        strengths = [layer.strength.item() for layer in model]
        assert strengths[0] == strengths[1] == pytest.approx(1e-8 * rate, rel=1e-6), counts


def test_micro_batches_count_by_their_tokens_and_padding_does_not():
    """5 tokens with all 4 experts, 30 with none: 20/35 < 1 per token on average, though 2 per micro-batch."""
    layer = always(4)
    for x, valid in ((ONES[:1].repeat(1, 3, 1), 5), (-ONES[:1].repeat(1, 20, 1), 30)):
        layer(x, (torch.arange(x.shape[1]) < valid).unsqueeze(0))
        intbmoe.aux_loss(layer)
    intbmoe.after_step(layer)
    assert layer.strength.item() == pytest.approx(1e-8 / 1.2, rel=1e-6)


def test_a_step_without_tokens_moves_nothing():
    layer = always(4)
    before = layer.strength.clone()
    layer(ONES, torch.zeros(2, 3, dtype=torch.bool))
    intbmoe.aux_loss(layer)
    intbmoe.after_step(layer)
    assert torch.equal(layer.strength, before)


def test_strength_never_reaches_zero_or_infinity():
    layer = always(0).float()
    layer.strength.fill_(torch.finfo(torch.float32).tiny)
    run_steps(layer, ONES.float(), 3)
    assert layer.strength == torch.finfo(torch.float32).tiny
    layer = always(4).float()
    layer.strength.fill_(3e38)
    run_steps(layer, ONES.float(), 3)
    assert layer.strength.isfinite()


def test_the_controller_holds_the_target():
    """Starting with half of 8 experts active, it reaches about the target of one and stays there."""
    layer = make(experts=8, router_std=0.3, sparsity_strength=1e-2, sparsity_rate=1.05)
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
    x = torch.randn(4, 16, DIM, dtype=torch.float64)
    x[..., 0] = 1  # the router has no bias: without a mean in x, half of the scores are always positive
    run_steps(layer, x, 150, optimizer)
    intbmoe.load_statistics(layer)
    run_steps(layer, x, 50, optimizer)
    found = intbmoe.load_statistics(layer)[""]
    assert 0.9 < sum(found.counts) / found.tokens < 1.1


def test_a_resumed_run_repeats_the_uninterrupted_one():
    x = torch.randn(2, 6, DIM, dtype=torch.float64)
    layer = make(sparsity_strength=1e-2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    run_steps(layer, x, 3, optimizer)
    resumed = make()
    resumed.load_state_dict(layer.state_dict())
    again = torch.optim.SGD(resumed.parameters(), lr=0.1)
    values = run_steps(layer, x, 3, optimizer)
    assert values == run_steps(resumed, x, 3, again)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key


def test_strength_stays_float32_in_a_half_precision_layer():
    layer = make().float().bfloat16()
    assert layer.router.weight.dtype == torch.bfloat16
    assert layer.strength.dtype == torch.float32
    assert layer.strength == torch.tensor(1e-8)


def test_layers_that_disagree_on_the_rate_are_refused():
    model = nn.Sequential(make(), make(sparsity_rate=1.5))
    model(ONES)
    intbmoe.aux_loss(model)
    with pytest.raises(ValueError, match=r"sparsity_rate=\[1.2, 1.5\]"):
        intbmoe.after_step(model)


def _two_layers(rank, world):
    """Ranks with very different activity: only their joint mean is below the target."""
    model = nn.Sequential(always(4), always(4))
    sign = 1 if rank == 0 and world > 1 else -1
    x = sign * ONES if world > 1 else torch.cat([ONES, -ONES])
    for layer in model:
        layer(x)
    intbmoe.aux_loss(model)
    intbmoe.after_step(model)
    return [layer.strength for layer in model]


def test_all_ranks_move_to_the_same_strength():
    single = _two_layers(0, 1)
    for strengths in run_ranks(2, _two_layers):
        assert strengths == single
    assert single[0].item() == pytest.approx(1.2e-8, rel=1e-6)


def test_router_starts_with_the_given_deviation():
    torch.manual_seed(0)
    assert ReMoE(64, 8, experts=64).router.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert ReMoE(64, 8, experts=64, router_std=None).router.weight.abs().max() <= 1 / 8


def test_parameter_counts_are_those_of_the_paper_table():
    layer = ReMoE(192, 768, experts=17)
    assert 3_937_960 + 4 * sum(p.numel() for p in layer.parameters()) == 24_070_312
    assert 3_937_960 + 4 * (layer.active_parameters() - 295_872) == 3_951_016  # at k = 1, as Switch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, r"top_k=5.*experts \(4\)"),
        ({"sparsity_strength": 0.0}, "sparsity_strength=0.0"),
        ({"sparsity_rate": 1.0}, "sparsity_rate=1.0"),
        ({"router_std": -1.0}, "router_std=-1.0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
