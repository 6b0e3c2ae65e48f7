"""The travel model: its size, its forward by hand, what it refuses, and padding."""

import math

import pytest
import torch
from torch import nn

import intbmoe
from intbmoe.budget import match_budget
from intbmoe.models.recommender import Recommender, RecommenderConfig
from intbmoe.models.sequence import SequenceConfig
from intbmoe.models.travel import TravelConfig, TravelModel

SMALL = RecommenderConfig(dim=12, depth=2, heads=2, hidden=20, max_length=48)
CAUSAL = ["switch", "deepseek", "remoe", "dynmoe", "mass", "soft_causal", "smear_token", "lory"]
CAUSAL += ["mumoe_cp", "mumoe_tr", "intbmoe"]

# The released model has two things that this one lacks: input projections, which belong to the
# embedding, and seven of its eight output norms, which nothing uses.
PROJECTIONS, UNUSED_NORMS = (48 * 96 + 3 * 96) + (96 + 3 * 96), 7 * 2 * 96


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def small(method=None, config=SMALL, **options):
    torch.manual_seed(1)
    make_ffn = None if method is None else lambda: intbmoe.create(method, config.dim, 8, **options)
    return Recommender(config, make_ffn).double().eval()


def tokens(batch=2, length=9, seed=2):
    return torch.randn(batch, length, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(model, x):
    """One sequence (T, d) through the equations, token by token and head by head."""
    state, config = model.state_dict(), model.config

    def norm(z, name):
        variance = ((z - z.mean()) ** 2).mean()
        return (z - z.mean()) / torch.sqrt(variance + 1e-5) * state[f"{name}.weight"] + state[f"{name}.bias"]

    def linear(z, name):
        return state[f"{name}.weight"] @ z + state[f"{name}.bias"]

    def ffn(z, name):
        w1, b1, w2, b2 = (
            state[f"{name}.experts.{part}"][0] for part in ("up.weight", "up.bias", "down.weight", "down.bias")
        )
        inner = z @ w1 + b1
        return inner * (1 + torch.erf(inner / math.sqrt(2))) / 2 @ w2 + b2

    stream, width = list(x), config.dim // config.heads
    for i in range(config.depth):
        normed = [norm(z, f"blocks.{i}.norm1") for z in stream]
        q, k, v = ([linear(z, f"blocks.{i}.attn.{part}") for z in normed] for part in ("query", "key", "value"))
        table = state[f"blocks.{i}.attn.relative_bias"]
        for t in range(len(stream)):
            heads = []
            for head in range(config.heads):
                part = slice(head * width, (head + 1) * width)
                scores = [
                    q[t][part] @ k[s][part] / math.sqrt(width) + table[head, config.max_length - 1 - (t - s)]
                    for s in range(t + 1)
                ]
                heads.append(sum(p * v[s][part] for s, p in enumerate(torch.stack(scores).softmax(0))))
            stream[t] = stream[t] + linear(torch.cat(heads), f"blocks.{i}.attn.output")
        stream = [z + ffn(norm(z, f"blocks.{i}.norm2"), f"blocks.{i}.ffn") for z in stream]
    return torch.stack([ffn(norm(z, "norm"), "head") for z in stream])


def test_the_papers_sizes():
    with torch.device("meta"):
        dense = Recommender(RecommenderConfig())
        options = match_budget("intbmoe", 96, 384, experts=32)
        mixture = Recommender(RecommenderConfig(), lambda: intbmoe.create("intbmoe", 96, **options))
    assert count(dense) == 977_752 - PROJECTIONS - UNUSED_NORMS == 971_128
    module = 2_470_841 - 2 * 96  # without the LayerNorm that the released module never uses
    assert count(mixture.head) == count(mixture.blocks[3].ffn) == module
    assert count(mixture) == 22_547_449 - 9 * 2 * 96 - PROJECTIONS - UNUSED_NORMS
    assert dense.blocks[0].attn.relative_bias.numel() == 2 * 126 - 1


def test_the_forward_is_the_written_one():
    model, x = small(), tokens()
    with torch.no_grad():  # so that the bias table and the norms have an effect
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter))
        torch.testing.assert_close(model(x), torch.stack([by_hand(model, row) for row in x]), rtol=0, atol=1e-12)


def test_training_computes_the_same():
    """With gradients, attention uses another kernel; and only the biases of distances in use are learned."""
    model, x = small(), tokens()
    with torch.no_grad():
        expected = model(x)
    y = model(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    y.square().sum().backward()
    learned = model.blocks[0].attn.relative_bias.grad != 0
    used = torch.arange(2 * 48 - 1) - 47
    assert torch.equal(learned, ((used <= 0) & (used > -9)).expand(2, -1))


@pytest.mark.parametrize("method", [None, *CAUSAL])
def test_no_token_sees_a_later_one(method):
    model = small(method)
    first = tokens(length=40)
    second = first.clone()
    second[:, 23:] = tokens(length=17, seed=5)
    before, after = model(first), model(second)
    torch.testing.assert_close(before[:, :23], after[:, :23], rtol=0, atol=1e-12)
    assert (before[:, 23:] != after[:, 23:]).any()


@pytest.mark.parametrize("method", [None, *CAUSAL])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_valid_output(method, side):
    """Even if it is NaN. On the left it is as long as one of Lory's segments, which are counted by position."""
    model = small(method)
    x, padding = tokens(length=20), torch.full((2, 16, 12), torch.nan, dtype=torch.float64)
    valid, never = torch.ones(2, 20, dtype=torch.bool), torch.zeros(2, 16, dtype=torch.bool)
    mask = torch.cat((never, valid) if side == "left" else (valid, never), 1)
    padded = model(torch.cat((padding, x) if side == "left" else (x, padding), 1), mask)
    torch.testing.assert_close(padded[mask], model(x).flatten(0, 1), rtol=0, atol=1e-11)
    assert (padded[~mask] == 0).all()


def test_a_sequence_of_padding_breaks_nothing():
    model = small("intbmoe").train()
    mask = torch.tensor([[True] * 9, [False] * 9])
    model(tokens(), mask).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_every_ffn_and_the_head_are_mixtures():
    model = small("switch", experts=3)
    mask = torch.tensor([[True] * 4 + [False] * 5, [True] * 9])
    with intbmoe.record_routing(model) as log:
        model(tokens(), mask)
    assert set(log) == {"blocks.0.ffn", "blocks.1.ffn", "head"}
    for record in log.values():
        assert torch.equal(record.ids.view(2, 9) >= 0, mask)


@pytest.mark.parametrize("method", ["soft", "smear", "expert_choice"])
def test_a_method_that_looks_ahead_is_refused(method):
    reason = intbmoe.create(method, 12, 8).config.noncausal_reason()
    with pytest.raises(ValueError, match=f"'{method}'.* cannot be used in a causal model: ") as error:
        small(method)
    assert reason in str(error.value)


def test_the_head_may_not_look_ahead_either():
    made = iter([nn.Linear(12, 12), nn.Linear(12, 12), intbmoe.create("soft", 12, 8)])
    with pytest.raises(ValueError, match="'soft'"):
        Recommender(SMALL, lambda: next(made))


def test_bfloat16_autocast():
    model = small("intbmoe").float()
    x = tokens().float()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x, torch.ones(2, 9, dtype=torch.bool))
    torch.testing.assert_close(y.float(), model(x), rtol=0.1, atol=0.1)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="heads=5"):
        RecommenderConfig(heads=5)
    with pytest.raises(ValueError, match="at most 48 tokens"):
        small()(tokens(length=49))
    with pytest.raises(ValueError, match=r"expected \(batch, tokens, 12\)"):
        small()(tokens()[..., :5])
    with pytest.raises(ValueError, match=r"mask has shape \(2, 8\)"):
        small()(tokens(), torch.ones(2, 8, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"expected torch\.bool"):
        small()(tokens(), torch.ones(2, 9))


@pytest.mark.parametrize(("std", "expected"), [(None, 1 / (3 * 96) ** 0.5), (0.02, 0.02)])
def test_how_dense_ffns_start_is_a_setting(std, expected):
    config = TravelConfig(depth=1, ffn_std=std, place_rows=8, cell_rows=8, code_rows=8)
    backbone = TravelModel(config).backbone
    for ffn in (backbone.blocks[0].ffn, backbone.head):
        assert ffn.experts.up.weight.std().item() == pytest.approx(expected, rel=0.05)
        assert ffn.experts.up.bias.abs().max() == 0
    assert SequenceConfig(items=3, ffn_std=std).backbone().ffn_std == std
