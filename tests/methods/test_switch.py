"""Switch: the equations against a loop, the loss by hand, capacity and what it drops."""

import pytest
import torch

import intbmoe
from intbmoe.methods.switch import Switch

E, D = 4, 6


def make(**options):
    torch.manual_seed(1)
    layer = Switch(D, 8, **{"experts": E, "jitter": 0.0, **options}).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def tokens(*shape):
    return torch.randn(*shape, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def loop(layer, x, mask):
    """Output and loss of valid tokens, straight from the equations."""
    rows, probabilities, winners = [], [], []
    for token, valid in zip(x.reshape(-1, D), mask.reshape(-1), strict=True):
        if not valid:
            rows.append(torch.zeros(D, dtype=x.dtype))
            continue
        p = (layer.router.weight @ token).softmax(-1)
        e = int(p.argmax())
        up, down = layer.experts.up, layer.experts.down
        inner = torch.nn.functional.gelu(token @ up.weight[e] + up.bias[e])
        rows.append(p[e] * (inner @ down.weight[e] + down.bias[e]))
        probabilities.append(p)
        winners.append(e)
    share = torch.bincount(torch.tensor(winners), minlength=E).double() / len(winners)
    loss = layer.config.balance * E * (share * torch.stack(probabilities).mean(0)).sum()
    return torch.stack(rows).view(x.shape), loss


def test_outputs_loss_and_gradients_are_the_equations():
    x, mask = tokens(2, 7), torch.rand(2, 7) > 0.3
    results = []
    for run in (lambda layer: (layer(x, mask), intbmoe.aux_loss(layer)), lambda layer: loop(layer, x, mask)):
        layer = make()
        y, loss = run(layer)
        (y.square().sum() + 100 * loss).backward()
        results.append([y.detach(), loss.detach(), *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("bias", "expected"), [(0.0, 1.0), (50.0, float(E))])
def test_the_loss_is_one_in_balance_and_e_in_collapse(bias, expected):
    """Router rows ± e_i send token ± e_i evenly; a large common push sends all to expert 0."""
    layer = make(balance=1.0)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:, :E] = 1e-9 * torch.eye(E)
        layer.router.weight[0] += bias
    x = torch.cat([torch.eye(E, dtype=torch.float64), torch.ones(E, D - E, dtype=torch.float64) * bool(bias)], 1)
    layer(x.unsqueeze(0))
    assert intbmoe.aux_loss(layer).item() == pytest.approx(expected, rel=1e-6)


def test_tokens_over_capacity_get_nothing_and_are_reported():
    layer = make(capacity_factor=1.0)
    with torch.no_grad():
        layer.router.weight.zero_()  # a tie: everything goes to expert 0
    y = layer(tokens(2, 20))  # capacity ⌊20 / 4⌋ = 5 a sequence
    assert (y[:, :5].abs().sum(-1) > 0).all()
    assert (y[:, 5:] == 0).all()
    intbmoe.aux_loss(layer)
    intbmoe.after_step(layer)
    with pytest.warns(UserWarning, match="no token of 40 went to experts or blocks 1, 2, 3 "):
        statistics = intbmoe.load_statistics(layer)[""]
    assert statistics.counts == (10, 0, 0, 0)
    assert statistics.dropped == pytest.approx(30 / 40)


def test_a_padded_sequence_drops_as_it_would_alone():
    layer = make(eval_capacity_factor=1.0).eval()
    x = tokens(1, 40)
    padded = torch.cat([x[:, :24], torch.zeros(1, 16, D, dtype=torch.float64)], 1)
    mask = torch.arange(40).unsqueeze(0) < 24
    torch.testing.assert_close(layer(padded, mask)[:, :24], layer(x[:, :24]), rtol=0, atol=1e-12)


def test_capacity_is_at_least_four():
    layer = make(eval_capacity_factor=0.01).eval()
    with torch.no_grad():
        layer.router.weight.zero_()
    assert (layer(tokens(1, 9)).abs().sum(-1) > 0).sum() == 4


def test_jitter_is_noise_on_the_router_in_training_only():
    layer, x = make(jitter=0.5), tokens(2, 30)
    with intbmoe.record_routing(layer) as log:
        layer(x)
        layer(x)
    first, second = log[""].weights.chunk(2)
    assert not torch.equal(first, second)
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jitter": 1.0}, r"jitter=1.0.*\[0, 1\)"),
        ({"balance": float("nan")}, "balance=nan"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0.*positive"),
        ({"experts": 0}, "experts=0"),
        ({"expert": "relu"}, "expert='relu'.*'gelu' or 'swiglu'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
