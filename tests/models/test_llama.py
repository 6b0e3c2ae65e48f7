"""The decoder: its size, its forward by hand, what it refuses, padding, and weights under Hugging Face's names."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import intbmoe
from intbmoe.budget import match_budget
from intbmoe.models.llama import Llama, LlamaConfig
from intbmoe.registry import find_method

SMALL = LlamaConfig(vocabulary=11, dim=12, depth=2, heads=3, hidden=20)
CAUSAL = [name for name in intbmoe.list_methods() if find_method(name).noncausal_reason() is None]
DENSE = 152_006_400


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def small(method=None, depth=2, **options):
    torch.manual_seed(1)
    make_ffn = None if method is None else lambda: intbmoe.create(method, 12, 8, **options)
    return Llama(replace(SMALL, depth=depth), make_ffn).double().eval()


def ids(batch=2, tokens=9, seed=2):
    return torch.randint(11, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def random_state(config, seed=3):
    """A state dict under Hugging Face's names without the leading ``model.``, written out by hand."""
    generator = torch.Generator().manual_seed(seed)
    d, h = config.dim, config.hidden
    shapes = {"embed_tokens.weight": (config.vocabulary, d), "norm.weight": (d,)}
    for i in range(config.depth):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (d,),
            f"layers.{i}.self_attn.q_proj.weight": (d, d),
            f"layers.{i}.self_attn.k_proj.weight": (d, d),
            f"layers.{i}.self_attn.v_proj.weight": (d, d),
            f"layers.{i}.self_attn.o_proj.weight": (d, d),
            f"layers.{i}.post_attention_layernorm.weight": (d,),
            f"layers.{i}.mlp.gate_proj.weight": (h, d),
            f"layers.{i}.mlp.up_proj.weight": (h, d),
            f"layers.{i}.mlp.down_proj.weight": (d, h),
        }
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def by_hand(state, sequence, config):
    """One sequence through the published equations, token by token and head by head."""

    def rms(x, name):
        return x / torch.sqrt((x**2).mean() + config.norm_eps) * state[f"{name}.weight"]

    def turned(u, position):
        """Pairs of entries w/2 apart as complex numbers."""
        half = len(u) // 2
        turn = [position * config.rope_theta ** (-2 * i / len(u)) for i in range(half)]
        z = torch.complex(u[:half], u[half:]) * torch.exp(1j * torch.tensor(turn, dtype=torch.float64))
        return torch.cat([z.real, z.imag])

    def weight(layer, name):
        return state[f"layers.{layer}.{name}.weight"]

    stream = [state["embed_tokens.weight"][i] for i in sequence]
    width = config.dim // config.heads
    for layer in range(config.depth):
        normed = [rms(x, f"layers.{layer}.input_layernorm") for x in stream]
        q, k, v = ([weight(layer, f"self_attn.{p}_proj") @ x for x in normed] for p in "qkv")
        for t in range(len(stream)):
            heads = []
            for head in range(config.heads):
                part = slice(head * width, (head + 1) * width)
                query = turned(q[t][part], t)
                scores = torch.stack([query @ turned(k[s][part], s) / math.sqrt(width) for s in range(t + 1)])
                heads.append(sum(p * v[s][part] for s, p in enumerate(scores.softmax(0))))
            stream[t] = stream[t] + weight(layer, "self_attn.o_proj") @ torch.cat(heads)
        for t, x in enumerate(stream):
            z = rms(x, f"layers.{layer}.post_attention_layernorm")
            gate = weight(layer, "mlp.gate_proj") @ z
            inner = gate * torch.sigmoid(gate) * (weight(layer, "mlp.up_proj") @ z)
            stream[t] = x + weight(layer, "mlp.down_proj") @ inner
    return torch.stack([state["embed_tokens.weight"] @ rms(x, "norm") for x in stream])


def test_the_papers_sizes():
    with torch.device("meta"):
        assert count(Llama(LlamaConfig())) == DENSE
        backbone = {"experts": 8, "expert": "swiglu", "intbmoe_hidden": 2844}
        options = match_budget("intbmoe", 768, 2048, **backbone)
        model = Llama(LlamaConfig(), lambda: intbmoe.create("intbmoe", 768, **options))
    # Without one LayerNorm per layer, which the released module has but never uses.
    assert count(model) == 793_756_746 - 18 * 2 * 768


def test_the_forward_is_the_published_one():
    state, sequences = random_state(SMALL), ids()
    model = small()
    model.load_state_dict(state)
    expected = torch.stack([by_hand(state, sequence, SMALL) for sequence in sequences.tolist()])
    torch.testing.assert_close(model(sequences), expected, rtol=0, atol=1e-11)
    model.float()
    torch.testing.assert_close(model(sequences), expected.float(), rtol=1e-4, atol=1e-4)


def test_it_starts_as_said():
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocabulary=500, dim=128, depth=1, heads=2, hidden=256))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("method", [None, *CAUSAL])
def test_no_token_sees_a_later_one(method):
    model = small(method)
    first = ids(tokens=40)
    second = first.clone()
    second[:, 23:] = ids(tokens=17, seed=5)
    before, after = model(first), model(second)
    torch.testing.assert_close(before[:, :23], after[:, :23], rtol=0, atol=1e-12)
    assert (before[:, 23:] != after[:, 23:]).any()


@pytest.mark.parametrize("method", [None, *CAUSAL])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_valid_output(method, side):
    """Padding on the left is as long as one of Lory's segments, which are counted by position."""
    model = small(method)
    tokens, padding = ids(tokens=20), ids(tokens=16, seed=7)
    valid, never = torch.ones(2, 20, dtype=torch.bool), torch.zeros(2, 16, dtype=torch.bool)
    parts = (padding, tokens) if side == "left" else (tokens, padding)
    masks = (never, valid) if side == "left" else (valid, never)
    mask = torch.cat(masks, 1)
    padded = model(torch.cat(parts, 1), mask)
    assert padded.isfinite().all()
    torch.testing.assert_close(padded[mask], model(tokens).flatten(0, 1), rtol=0, atol=1e-11)


def test_a_sequence_of_padding_trains_nothing_and_breaks_nothing():
    model = small("intbmoe").train()
    mask = torch.tensor([[True] * 9, [False] * 9])
    model(ids(), mask)[mask].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def test_the_mixtures_are_told_which_tokens_are_valid():
    model = small("switch", experts=3)
    mask = torch.tensor([[True] * 4 + [False] * 5, [True] * 9])
    with intbmoe.record_routing(model) as log:
        model(ids(), mask)
    assert set(log) == {"layers.0.mlp", "layers.1.mlp"}
    for record in log.values():
        assert torch.equal(record.ids.view(2, 9) >= 0, mask)


@pytest.mark.parametrize("method", ["soft", "smear", "expert_choice"])
def test_a_method_that_looks_ahead_is_refused(method):
    reason = intbmoe.create(method, 12, 8).config.noncausal_reason()
    with pytest.raises(ValueError, match=f"'{method}'.* cannot be used in a causal model: ") as error:
        small(method)
    assert reason in str(error.value)


def test_an_option_that_looks_ahead_is_refused():
    with pytest.raises(ValueError, match=r"'lory'.*first_segment='uniform' is causal"):
        small("lory", first_segment="stop_gradient")


def test_any_module_can_be_the_ffn():
    torch.manual_seed(1)
    model = Llama(SMALL, lambda: nn.Linear(12, 12))
    assert model(ids(), torch.ones(2, 9, dtype=torch.bool)).shape == (2, 9, 11)
    with pytest.raises(ValueError, match="cannot be used"):
        Llama(SMALL, lambda: nn.Sequential(intbmoe.create("soft", 12, 8)))


def test_bfloat16_autocast():
    model = small("intbmoe").float()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids())
    torch.testing.assert_close(logits.float(), model(ids()), rtol=0.1, atol=0.02)


# tests/methods compiles every layer; this compiles the model around them.
@pytest.mark.parametrize(
    ("method", "backend"),
    [
        (None, "eager"),
        pytest.param(None, "aot_eager", marks=pytest.mark.slow),
        pytest.param("intbmoe", "aot_eager", marks=pytest.mark.slow),
        pytest.param("lory", "aot_eager", marks=pytest.mark.slow),
        pytest.param(None, "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_whole_it_is_the_same(method, backend):
    torch._dynamo.reset()
    model = small(method, depth=1)
    run = torch.compile(model, fullgraph=True, backend=backend)
    mask = torch.tensor([[True] * 9, [True] * 6 + [False] * 3])
    for valid in (None, mask):
        gradients = []
        for call in (model, run):
            model.zero_grad()
            logits = call(ids(), valid)
            logits[mask].square().sum().backward()
            gradients.append((logits[mask], [parameter.grad for parameter in model.parameters()]))
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depth": 0}, "depth=0"),
        ({"heads": 5}, "heads=5"),
        ({"dim": 9, "heads": 3}, "even width"),
        ({"rope_theta": 0}, "rope"),
    ],
)
def test_bad_sizes_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**fields)


def test_bad_inputs_are_named():
    with pytest.raises(ValueError, match=r"ids have shape \(9,\)"):
        small()(ids()[0])
    with pytest.raises(ValueError, match=r"mask has shape \(2, 8\): expected \(2, 9\)"):
        small()(ids(), torch.ones(2, 8, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"expected torch\.bool"):
        small()(ids(), torch.ones(2, 9))
