"""Counting by running: FLOPs of what experts compute, bytes of live tensors."""

import pytest
import torch
from torch import nn

import intbmoe
from intbmoe.counting import count_flops, formulation_difference, peak_memory, shares_of

DIM, HIDDEN, TOKENS = 8, 12, 6
ONE_EXPERT = 2 * 2 * DIM * HIDDEN
"""FLOPs of one expert on one token."""


def tokens(*shape):
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(1))


class Host(nn.Module):
    """A layer with a fixed mask, as a model that takes only tokens."""

    def __init__(self, layer, mask=None):
        super().__init__()
        self.layer, self.mask = layer, mask

    def forward(self, x):
        return self.layer(x, self.mask)


def test_experts_are_counted_on_the_tokens_they_compute():
    layer = intbmoe.create("switch", DIM, HIDDEN, experts=3).eval()
    router = 2 * TOKENS * DIM * 3
    assert count_flops(layer, tokens(1, TOKENS)).executed == router + TOKENS * ONE_EXPERT


def test_a_layer_that_gets_its_tokens_by_name_is_counted_alike():
    class ByName(Host):
        def forward(self, x):
            return self.layer(x=x)

    layer = intbmoe.create("lory", DIM, HIDDEN, experts=3, segment=2).eval()
    assert shares_of(ByName(layer), (tokens(1, TOKENS),)) == shares_of(Host(layer), (tokens(1, TOKENS),))


def test_choices_of_none_are_computed_by_no_expert():
    layer = intbmoe.create("switch", DIM, HIDDEN, experts=3).eval()
    mask = torch.tensor([[True, True, False, True, False, False]])
    router = 2 * TOKENS * DIM * 3
    assert count_flops(Host(layer, mask), tokens(1, TOKENS)).executed == router + 3 * ONE_EXPERT


@pytest.mark.parametrize("name", ["remoe", "dynmoe", "mass"])
@pytest.mark.parametrize("active", [1, 2.5])
def test_an_assumed_number_of_active_experts_replaces_the_untrained_routers(name, active):
    torch.manual_seed(0)
    layer = intbmoe.create(name, DIM, HIDDEN, experts=4).eval()
    router = 2 * TOKENS * DIM * 4
    counted = count_flops(layer, tokens(1, TOKENS), active=active).executed
    assert counted == router + round(active * TOKENS * ONE_EXPERT)


def test_attention_is_counted_apart_on_the_cpu_too():
    class Attention(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    flops = count_flops(Attention(), torch.randn(1, 2, 5, 4))
    assert (flops.executed, flops.attention) == (0, 2 * 2 * 2 * 5 * 5 * 4)


def test_the_filter_is_counted_as_the_paper_writes_it():
    """T·k rows of d + d_c inputs, although only T rows of d and K rows of d_c are run."""
    layer = intbmoe.create("intbmoe", DIM, HIDDEN, experts=3, blocks=4, top_k=2, code_dim=5)
    written, run = 2 * (TOKENS * 2) * (DIM + 5) * DIM, 2 * TOKENS * DIM * DIM
    assert formulation_difference(layer, TOKENS) == written - run - 2 * 4 * 5 * DIM
    assert formulation_difference(layer.precompose(), TOKENS) == written - run
    without = intbmoe.create("intbmoe", DIM, HIDDEN, experts=3, filter=False)
    assert formulation_difference(without, TOKENS) == 0
    assert count_flops(layer, tokens(2, TOKENS)).formulation == formulation_difference(layer, 2 * TOKENS)


def test_the_filter_as_written_is_the_filter_that_runs():
    layer = intbmoe.create("intbmoe", DIM, HIDDEN, experts=3, blocks=4, code_dim=5).double()
    blocks, x = layer.blocks(torch.float64, "tiled"), tokens(TOKENS).double()
    for b, code in enumerate(layer.codebook):
        written = layer.filter(torch.cat([x, code.expand(TOKENS, -1)], dim=1))
        torch.testing.assert_close(x @ blocks.token_filter.T + blocks.block_filter[b], written, rtol=0, atol=1e-12)


def test_mumoes_biases_are_counted_as_an_input_row():
    cp = intbmoe.create("mumoe_cp", DIM, HIDDEN, experts=3, rank=7)
    assert formulation_difference(cp, TOKENS) == 2 * (2 * TOKENS * 7)
    tr = intbmoe.create("mumoe_tr", DIM, HIDDEN, experts=3, rank=7, ring_ranks=(2, 3))
    assert formulation_difference(tr, TOKENS) == 2 * (2 * TOKENS * 3 * 7)


class Chain(nn.Module):
    """Holds 100 floats; makes three tensors of 1,000 floats, two of them alive at once, and a view of no new memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100))
        self.register_buffer("table", torch.zeros(10))

    def forward(self, x):
        x = x + 1
        x = x + 1
        x = x.view(10, 100)
        return x + self.weight


def test_peak_memory_counts_what_is_alive_at_once():
    held, given = 4 * (100 + 10), 4 * 1000
    assert peak_memory(Chain(), torch.zeros(1000)) == held + given + 2 * 4 * 1000


def test_parameters_that_share_storage_count_once():
    model = nn.Sequential(Chain(), Chain())
    model[1].weight = model[0].weight
    x = torch.zeros(10, 100)
    assert peak_memory(Chain(), x) + 4 * 10 <= peak_memory(model, x) <= peak_memory(Chain(), x) + 4 * (10 + 1000)


def test_float64_is_refused_because_its_tiles_would_count():
    layer = intbmoe.create("switch", 8, 12).double()
    with pytest.raises(ValueError, match=r"count model\.float\(\) instead"):
        count_flops(layer, torch.randn(1, 5, 8, dtype=torch.float64))
