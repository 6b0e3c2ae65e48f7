"""The specification itself, against numbers computed by hand."""

import torch

from intbmoe.ops.blocks import Blocks, naive


def blocks(weight, **parts):
    missing = {"gains": (), "scale": None, "norms": (), "token_filter": None, "block_filter": None}
    return Blocks(weights=(weight,), biases=(torch.zeros(weight.shape[0], weight.shape[2]),), **{**missing, **parts})


def test_tokens_visit_the_blocks_they_chose():
    doubled_and_negated = torch.tensor([[[2.0]], [[-1.0]]])
    x = torch.tensor([[1.0], [10.0], [100.0]])
    ids = torch.tensor([[0, 1], [1, -1], [-1, -1]])
    weights = torch.tensor([[0.5, 0.25], [1.0, 0.0], [0.0, 0.0]])
    y = naive.run_blocks(x, ids, weights, blocks(doubled_and_negated))
    assert torch.equal(y, torch.tensor([[0.5 * 2 - 0.25], [-10.0], [0.0]]))


def test_a_filter_with_a_large_negative_term_closes_a_block():
    identity = torch.eye(2).expand(2, 2, 2)
    closed = torch.tensor([[0.0, 0.0], [-200.0, -200.0]])
    filtered = blocks(identity, token_filter=torch.zeros(2, 2), block_filter=closed)
    x = torch.tensor([[3.0, 4.0]])
    assert torch.equal(naive.run_block(x, filtered, 0), x / 2)
    assert naive.run_block(x, filtered, 1).abs().max() < 1e-30


def test_gate_of_one_scales_by_one_plus_silu_of_one():
    value_and_gate = torch.ones(1, 1, 2)
    gated = blocks(value_and_gate, gains=(torch.ones(1),), scale=torch.tensor([2.0]))
    silu = 1 / (1 + torch.exp(torch.tensor(-1.0)))
    torch.testing.assert_close(naive.run_block(torch.tensor([[5.0]]), gated, 0), (5 * (1 + 2 * silu)).view(1, 1))
