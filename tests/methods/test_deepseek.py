"""DeepSeek-V3: against a loop over tokens, hand values of the loss, and the bias over steps and a resume."""

import copy

import pytest
import torch

import intbmoe
from intbmoe.methods.deepseek import DeepSeek, sequence_balance
from small_methods import expert

DIM, HIDDEN = 6, 5


def make(**options):
    torch.manual_seed(1)
    return DeepSeek(DIM, HIDDEN, **{"experts": 4, **options}).double()


def naive(layer, x, mask):
    """The equations of the file, token by token: output and balance loss."""
    c = layer.config
    y, losses = torch.zeros_like(x), []
    for b, row in enumerate(x):
        valid = [t for t in range(len(row)) if mask[b, t]]
        counts, shares = [0] * c.experts, [0.0] * c.experts
        for t in valid:
            s = torch.sigmoid(layer.router.weight @ row[t])
            order = sorted(range(c.experts), key=lambda e: (-(s[e] + layer.bias[e]).item(), e))
            chosen = order[: c.top_k]
            total = sum(s[e] for e in chosen)
            y[b, t] = sum(c.route_scale * s[e] / total * expert(layer, e, row[t]) for e in chosen)
            if layer.shared is not None:
                y[b, t] = y[b, t] + layer.shared(row[t])
            for e in sorted(range(c.experts), key=lambda e: (-s[e].item(), e))[: c.top_k]:
                counts[e] += 1
            shares = [shares[e] + s[e] / s.sum() for e in range(c.experts)]
        if valid:
            n = len(valid)
            terms = (c.experts / (c.top_k * n) * counts[e] * shares[e] / n for e in range(c.experts))
            losses.append(sum(terms))
    return y, c.balance * sum(losses) / len(losses)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 3},
        {"top_k": 1, "route_scale": 2.5},
        {"shared_experts": 0},
        {"shared_experts": 2, "shared_hidden": 3},
    ],
    ids=str,
)
def test_outputs_losses_and_gradients_agree_with_a_loop(options):
    layer = make(balance=0.7, **options)
    layer.bias += torch.tensor([0.3, -0.2, 0.0, 0.1])
    x = torch.randn(3, 5, DIM, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(3, 5) > 0.3
    mask[2] = False  # a sequence of padding only is no sequence
    results = []
    for form in ("layer", "naive"):
        y, loss = (layer(x, mask), intbmoe.aux_loss(layer)) if form == "layer" else naive(layer, x, mask)
        total = y.square().sum() + loss
        results.append((y, loss, torch.autograd.grad(total, [x, *layer.parameters()])))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)


def test_weights_of_a_token_sum_to_the_route_scale_whatever_the_bias():
    layer = make(experts=6, top_k=3, route_scale=2.5)
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    for bias in (torch.zeros(6), torch.randn(6) * 5):
        layer.bias.copy_(bias)
        with intbmoe.record_routing(layer) as log:
            layer(x)
        torch.testing.assert_close(log[""].weights.sum(1), torch.full((14,), 2.5, dtype=torch.float64))


def test_a_large_bias_draws_every_token_but_stays_out_of_the_weight():
    layer = make().eval()
    layer.bias[3] = 10
    x = torch.randn(1, 9, DIM, dtype=torch.float64)
    with intbmoe.record_routing(layer) as log:
        layer(x)
    ids, weights = log[""].ids, log[""].weights
    assert (ids[:, 0] == 3).all()
    s = torch.sigmoid(x[0] @ layer.router.weight.t())
    torch.testing.assert_close(weights[:, 0], s[:, 3] / s.gather(1, ids).sum(1))


def test_scores_that_underflow_give_finite_weights_and_gradients():
    layer = make().float()
    x = torch.ones(1, 3, DIM, requires_grad=True)
    with torch.no_grad():
        layer.router.weight.fill_(-60.0)
    (layer(x).sum() + intbmoe.aux_loss(layer)).backward()
    assert x.grad.isfinite().all()
    assert layer.router.weight.grad.isfinite().all()


def test_even_choices_with_even_scores_cost_one_and_collapse_costs_more():
    even = torch.full((2, 4, 4), 0.25, dtype=torch.float64)
    in_turn = torch.eye(4, dtype=torch.int64).expand(2, 4, 4)
    assert sequence_balance(even, in_turn, None, 1) == 1
    collapsed = torch.zeros(2, 4, 4, dtype=torch.int64)
    collapsed[..., 0] = 1
    assert sequence_balance(even, collapsed, None, 1) == 1  # P is even, so the loss is
    assert sequence_balance(collapsed.double(), collapsed, None, 1) == 4


def test_the_loss_is_per_sequence():
    """Two sequences, each on its own expert: even over the batch, collapsed in each sequence."""
    chosen = torch.tensor([[[1, 0], [1, 0]], [[0, 1], [0, 1]]])
    assert sequence_balance(chosen.double(), chosen, None, 1) == 2


def step(layer, optimizer, batches):
    optimizer.zero_grad()
    for x in batches:
        (layer(x).square().mean() + intbmoe.aux_loss(layer)).backward()
    intbmoe.before_step(layer, optimizer)
    optimizer.step()
    intbmoe.after_step(layer, optimizer)


def test_bias_moves_by_its_speed_towards_an_even_load():
    layer = make(bias_speed=0.125, top_k=1)
    with torch.no_grad():
        layer.router.weight.zero_()  # a tie: everything goes to expert 0
    x = torch.randn(2, 4, DIM, dtype=torch.float64)
    layer(x)
    intbmoe.aux_loss(layer)
    intbmoe.after_step(layer)
    assert layer.bias.tolist() == [-0.125, 0.125, 0.125, 0.125]


def test_an_even_load_and_evaluation_leave_the_bias_alone():
    layer = make(bias_speed=0.125, top_k=4)
    layer(torch.randn(2, 4, DIM, dtype=torch.float64))
    intbmoe.aux_loss(layer)
    intbmoe.after_step(layer)
    assert layer.bias.tolist() == [0, 0, 0, 0]
    layer.eval()(torch.randn(2, 4, DIM, dtype=torch.float64))
    intbmoe.after_step(layer)
    assert layer.bias.tolist() == [0, 0, 0, 0]


def test_accumulated_micro_batches_move_the_bias_once():
    x = torch.randn(4, 6, DIM, dtype=torch.float64)
    biases = []
    for batches in ([x], x.chunk(4)):
        layer = make(bias_speed=0.125, top_k=1)
        step(layer, torch.optim.SGD(layer.parameters(), lr=0.0), batches)
        biases.append(layer.bias)
    assert torch.equal(*biases)
    assert set(biases[0].abs().tolist()) <= {0.0, 0.125}


def test_the_bias_evens_out_a_skewed_router():
    layer = make(bias_speed=0.002, top_k=1, balance=0.0)
    x = torch.randn(8, 16, DIM, dtype=torch.float64) + 1
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    with intbmoe.record_routing(layer) as before:
        layer(x)
    for _ in range(200):
        step(layer, optimizer, [x])
    with intbmoe.record_routing(layer) as after:
        layer(x)
    assert after[""].load_statistics().worst_case < before[""].load_statistics().worst_case
    assert after[""].load_statistics().worst_case < 1.3


def test_a_resumed_run_repeats_the_uninterrupted_one():
    batches = torch.randn(5, 2, 6, DIM, dtype=torch.float64)
    layer = make(bias_speed=0.05)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    for x in batches[:3]:
        step(layer, optimizer, [x])
    saved = {key: value.clone() for key, value in layer.state_dict().items()}
    assert saved["bias"].abs().sum() > 0
    resumed = make(bias_speed=0.05)
    resumed.load_state_dict(saved)
    again = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # it keeps what it is given
    for x in batches[3:]:
        step(layer, optimizer, [x])
        step(resumed, again, [x])
    for key, value in layer.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key


def test_the_bias_stays_float32_in_a_half_precision_layer():
    layer = make().float()
    layer.bias[0] = 0.501
    half = layer.bfloat16()
    assert half.router.weight.dtype == torch.bfloat16
    assert half.bias.dtype == torch.float32
    assert half.bias[0] == torch.tensor(0.501)


def test_parameter_counts_are_those_of_the_paper_table():
    layer = DeepSeek(192, 512)
    assert 3_937_960 + 4 * sum(p.numel() for p in layer.parameters()) == 24_004_264
    assert 3_937_960 + 4 * (layer.active_parameters() - 295_872) == 6_305_704


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, r"top_k=5.*experts \(4\)"),
        ({"expert": "gelu"}, "expert='gelu'"),
        ({"shared_experts": -1}, "shared_experts=-1"),
        ({"shared_hidden": 0}, "shared_hidden=0"),
        ({"bias_speed": -1.0}, "bias_speed=-1.0"),
        ({"balance": float("nan")}, "balance=nan"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
