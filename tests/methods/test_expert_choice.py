"""Expert Choice: against a loop over experts, exact loads, padding, and the dense mixture as its limit."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import intbmoe
from intbmoe.methods.expert_choice import ExpertChoice
from small_methods import expert

DIM, HIDDEN = 6, 5


def make(**options):
    torch.manual_seed(1)
    return ExpertChoice(DIM, HIDDEN, **{"experts": 4, **options}).double()


def tokens(*shape, seed=2):
    return torch.randn(*shape, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def naive(layer, x, mask):
    """The equations of the file: each expert of each sequence takes its tokens; output and which tokens were taken."""
    c = layer.config
    y, taken = torch.zeros_like(x), torch.zeros(*mask.shape, c.experts, dtype=torch.bool)
    for b in range(len(x)):
        valid = mask[b].nonzero().flatten().tolist()
        gates = (x[b] @ layer.router.weight.t()).softmax(-1)
        capacity = math.ceil(c.capacity_factor * len(valid) / c.experts)
        for e in range(c.experts):
            for t in sorted(valid, key=lambda t: (-gates[t, e].item(), t))[:capacity]:
                y[b, t] = y[b, t] + gates[t, e] * expert(layer, e, x[b, t])
                taken[b, t, e] = True
    return y, taken


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0, 3.5, 9.0])
@pytest.mark.parametrize("masked", [False, True])
def test_outputs_choices_and_gradients_agree_with_a_loop(factor, masked):
    layer = make(capacity_factor=factor)
    with torch.no_grad():
        for bias in (layer.experts.up.bias, layer.experts.down.bias):
            bias.normal_()
    x = tokens(4, 7).requires_grad_()
    mask = torch.rand(4, 7) > 0.3 if masked else torch.ones(4, 7, dtype=torch.bool)
    if masked:
        mask[3] = False
    with intbmoe.record_routing(layer) as log:
        y = layer(x, mask if masked else None)
    expected, taken = naive(layer, x, mask)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    wanted = [x, *layer.parameters()]
    gradients = [torch.autograd.grad(out.square().sum(), wanted) for out in (y, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)

    ids, weights = log[""].ids, log[""].weights
    assert ids.shape == weights.shape == (28, 4)
    found = torch.zeros(28, 5, dtype=torch.bool).scatter(1, torch.where(ids < 0, 4, ids), True)[:, :4]
    assert torch.equal(found.view_as(taken), taken)
    gates = (x @ layer.router.weight.t()).softmax(-1).flatten(0, 1)
    torch.testing.assert_close(weights, torch.where(ids < 0, 0, gates.gather(1, ids.clamp(min=0))))
    assert (weights.diff(dim=1) <= 0).all()
    assert ((ids >= 0).int().diff(dim=1) <= 0).all()  # −1 only at the end


def test_every_expert_takes_exactly_c_distinct_tokens():
    """The paper's images: 196 tokens, 17 experts, factor 2 make C = 24 and 408 assignments."""
    layer = make(experts=17)
    x = tokens(3, 196)
    with intbmoe.record_routing(layer) as log:
        layer(x)
    for ids in log[""].ids.view(3, 196, 17):
        chosen = ids[ids >= 0]
        assert torch.equal(torch.bincount(chosen, minlength=17), torch.full((17,), 24))
        assert len(chosen) == 408
        for row in ids:
            assert len(set(row[row >= 0].tolist())) == (row >= 0).sum()
    intbmoe.aux_loss(layer)
    assert layer.statistics.pending["load"].tolist() == [3 * 24] * 17
    assert layer.statistics.pending["untaken"] == (log[""].ids[:, 0] < 0).sum()
    assert layer.statistics.pending["untaken"] > 0


def test_an_untaken_token_gives_zero():
    layer = make(experts=17)
    x = tokens(1, 196)
    with intbmoe.record_routing(layer) as log:
        y = layer(x)
    nothing = log[""].ids[:, 0] < 0
    assert (y[0][nothing] == 0).all()
    assert (y[0][~nothing].abs().sum(1) > 0).all()


@pytest.mark.parametrize("factor", [4.0, 100.0])
def test_full_capacity_is_the_dense_soft_mixture_and_causal(factor):
    layer = make(capacity_factor=factor).eval()
    x = tokens(2, 5)
    gates = (x @ layer.router.weight.t()).softmax(-1)
    dense = sum(gates[..., e : e + 1] * expert(layer, e, x) for e in range(4))
    torch.testing.assert_close(layer(x), dense)
    assert layer.config.noncausal_reason() is None
    assert "displace" in make().config.noncausal_reason()


def test_permuting_tokens_permutes_outputs():
    layer = make().eval()
    x, order = tokens(2, 9), torch.randperm(9)
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order], rtol=0, atol=1e-12)


def test_a_padded_sequence_gives_what_it_gives_alone():
    """7 valid tokens among 16: C = ⌈2·7/4⌉ = 4, though the padded length alone would give 8."""
    layer = make()
    x = tokens(1, 7)
    where = torch.tensor([0, 2, 3, 7, 8, 12, 15])
    padded = tokens(1, 16, seed=8).index_copy(1, where, x)
    mask = torch.zeros(1, 16, dtype=torch.bool).index_fill(1, where, True)
    torch.testing.assert_close(layer(padded, mask)[:, where], layer(x), rtol=0, atol=1e-12)
    layer(padded, mask)
    intbmoe.aux_loss(layer)
    assert layer.statistics.pending["load"].tolist() == [4] * 4


def test_ties_go_to_the_earlier_token():
    layer = make(capacity_factor=1.0)
    with intbmoe.record_routing(layer) as log:
        layer(tokens(1, 1).expand(1, 8, DIM))
    assert (log[""].ids[:2] >= 0).all()
    assert (log[""].ids[2:] < 0).all()


def test_capacity_is_exact_where_floating_point_is_not():
    layer = make(experts=11, capacity_factor=1.1)  # 1.1 · 10 / 11 is 1.0000000000000002 in float64
    layer(tokens(1, 10))
    intbmoe.aux_loss(layer)
    assert layer.statistics.pending["load"].tolist() == [1] * 11


def test_a_masked_layer_compiles_whole():
    for factor in (1.1, 2.0):  # a second value is compiled as a symbol
        layer, x = make(capacity_factor=factor), tokens(2, 12)
        mask = torch.arange(12).expand(2, 12) < torch.tensor([[12], [7]])
        compiled = torch.compile(layer, fullgraph=True, backend="eager")  # gradients: test_contract.py
        torch.testing.assert_close(compiled(x, mask), layer(x, mask))


def test_parameter_counts_are_those_of_the_paper_table():
    layer = ExpertChoice(192, 768, experts=17)
    assert 3_937_960 + 4 * sum(p.numel() for p in layer.parameters()) == 24_070_312
    assert 3_937_960 + 4 * (layer.active_parameters() - 295_872) == 5_134_504


def test_flops_are_those_of_the_filled_places():
    """408 rows per image through one expert each, plus the router: the paper's 1.958 G follow from this."""
    layer = ExpertChoice(192, 768, experts=17).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(torch.randn(1, 196, 192))
    assert counter.get_total_flops() == 408 * 2 * 2 * 192 * 768 + 196 * 2 * 192 * 17


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), "2"])
def test_bad_options_are_named(factor):
    with pytest.raises(ValueError, match="capacity_factor="):
        make(capacity_factor=factor)
