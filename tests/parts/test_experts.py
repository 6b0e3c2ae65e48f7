"""The four ways of running stacked experts give the same network."""

import pytest
import torch

from intbmoe.parts.dispatch import dispatch, to_rows
from intbmoe.parts.experts import FFNExperts, StackedLinear, SwiGLU, SwiGLUExperts

E, D, H = 4, 6, 8


def experts(kind):
    made = kind(E, D, H).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def one(made, e, z):
    """Expert e alone, straight from the equations."""
    if isinstance(made, FFNExperts):
        inner = torch.nn.functional.gelu(z @ made.up.weight[e] + made.up.bias[e])
        return inner @ made.down.weight[e] + made.down.bias[e]
    inner = torch.nn.functional.silu(z @ made.gate.weight[e]) * (z @ made.up.weight[e])
    return inner @ made.down.weight[e]


kinds = pytest.mark.parametrize("kind", [FFNExperts, SwiGLUExperts])


@kinds
def test_route_is_the_weighted_sum_over_chosen_experts(kind):
    made, x = experts(kind), torch.randn(7, D, dtype=torch.float64)
    ids = torch.randint(-1, E, (7, 2))
    weights = torch.where(ids < 0, 0, torch.rand(7, 2, dtype=torch.float64))
    y, load = made.route(x, ids, weights)
    expected = torch.stack(
        [
            sum(weights[n, j] * one(made, ids[n, j], x[n]) for j in range(2) if ids[n, j] >= 0) + torch.zeros(D)
            for n in range(7)
        ]
    )
    torch.testing.assert_close(y, expected)
    assert load.tolist() == [(ids == e).sum() for e in range(E)]


@kinds
def test_batch_runs_each_expert_on_its_own(kind):
    made, z = experts(kind), torch.randn(E, 5, D, dtype=torch.float64)
    torch.testing.assert_close(made.batch(z), torch.stack([one(made, e, z[e]) for e in range(E)]))


@kinds
def test_merged_is_the_expert_of_averaged_parameters_for_groups_and_for_single_tokens(kind):
    made, x = experts(kind), torch.randn(3, 5, D, dtype=torch.float64)
    a = torch.rand(3, E, dtype=torch.float64).softmax(-1)
    averaged = kind(3, D, H).double()
    with torch.no_grad():
        for target, source in zip(averaged.parameters(), made.parameters(), strict=True):
            target.copy_(torch.einsum("ge,e...->g...", a, source))
    expected = averaged.batch(x)
    torch.testing.assert_close(made.merged(x, a), expected)
    per_token = a.unsqueeze(1).expand(3, 5, E).reshape(15, E)
    torch.testing.assert_close(made.merged(x.view(15, 1, D), per_token), expected.view(15, 1, D))


@kinds
def test_rows_of_starved_experts_give_zero_gradients_not_none(kind):
    made = experts(kind)
    plan = dispatch(torch.zeros(3, 1, dtype=torch.int64), E, "tiled", complete=True)
    made.rows(to_rows(torch.randn(3, D, dtype=torch.float64), plan), plan).sum().backward()
    for parameter in made.parameters():
        assert (parameter.grad[1:] == 0).all()
        assert parameter.grad[0].abs().sum() > 0


def test_each_slice_starts_as_a_linear_layer_with_zero_bias():
    stacked = StackedLinear(64, 16, 200, bias=True)
    assert (stacked.bias == 0).all()
    assert stacked.weight.abs().max() <= 1 / 4
    assert stacked.weight.std().item() == pytest.approx(1 / 4 / 3**0.5, rel=0.01)


def test_one_expert_counts_its_own_parameters():
    assert FFNExperts(5, 192, 768).expert_parameters() == 295_872
    assert SwiGLUExperts(5, 192, 512).expert_parameters() == 294_912
    assert sum(p.numel() for p in SwiGLU(192, 512).parameters()) == 294_912


@pytest.mark.parametrize("change", ["forward", "hook", "subclass"])
def test_a_shared_expert_calls_maps_that_somebody_has_changed(change):
    torch.manual_seed(0)
    expert, x = SwiGLU(8, 16), torch.randn(3, 8)
    before = expert(x)
    match change:
        case "forward":  # as accelerate installs its hooks
            expert.down.forward = lambda z: 2 * torch.nn.Linear.forward(expert.down, z)
        case "hook":
            expert.down.register_forward_hook(lambda module, inputs, output: 2 * output)
        case "subclass":
            expert.down.__class__ = type(
                "Doubled", (torch.nn.Linear,), {"forward": lambda self, z: 2 * z @ self.weight.T}
            )
    torch.testing.assert_close(expert(x), 2 * before)
