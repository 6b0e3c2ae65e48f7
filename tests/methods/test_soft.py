"""Soft MoE and its causal form, against loops written from the equations."""

import pytest
import torch

import intbmoe
from small_methods import expert

DIM, HIDDEN, E = 6, 10, 3


def make(name, **options):
    layer = intbmoe.create(name, DIM, HIDDEN, experts=E, **options).double().eval()
    with torch.no_grad():
        layer.scale.fill_(3.0)
        for bias in (layer.experts.up.bias, layer.experts.down.bias):
            bias.normal_()
    return layer


def tokens(*shape):
    return torch.randn(*shape, DIM, dtype=torch.float64)


def masks():
    """Masks that are scattered, left-padded, complete, and empty."""
    mask = torch.ones(4, 7, dtype=torch.bool)
    mask[0, [2, 5]] = False
    mask[1, :3] = False
    mask[3] = False
    return mask


def unit(v):
    return v / (v.square().sum() + 1e-6).sqrt()


def logit(layer, x_t, e, s):
    return layer.scale * (unit(x_t) * unit(layer.phi[e, s])).sum()


def slot(layer, rows, e, s):
    """The softmax-weighted mean of some tokens."""
    weights = torch.stack([logit(layer, row, e, s) for row in rows]).softmax(0)
    return sum(weight * row for weight, row in zip(weights, rows, strict=True))


def naive(layer, x, mask, causal):
    """Token by token and slot by slot."""
    slots = range(layer.config.slots)
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            if not mask[b, t]:
                continue
            seen = [x[b, j] for j in range(t + 1 if causal else x.shape[1]) if mask[b, j]]
            combine = torch.stack([logit(layer, x[b, t], e, s) for e in range(E) for s in slots]).softmax(0)
            outputs = [expert(layer, e, slot(layer, seen, e, s)) for e in range(E) for s in slots]
            y[b, t] = sum(weight * output for weight, output in zip(combine, outputs, strict=True))
    return y


@pytest.mark.parametrize(("name", "slots"), [("soft", 1), ("soft", 3), ("soft_causal", 1)])
def test_outputs_and_gradients_are_those_of_the_equations(name, slots):
    layer = make(name, slots=slots)
    x, mask = tokens(4, 7).requires_grad_(), masks()
    leaves = [x, *layer.parameters()]
    found, expected = layer(x, mask), naive(layer, x, mask, layer.config.causal)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(x)
    grads = [torch.autograd.grad(y, leaves, upstream) for y in (found, expected)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-11)


def test_equal_tokens_make_every_slot_that_token():
    layer = make("soft", slots=2)
    row = tokens(1)
    combine = torch.stack([logit(layer, row[0], e, s) for e in range(E) for s in range(2)]).softmax(0).view(E, 2).sum(1)
    expected = sum(combine[e] * expert(layer, e, row[0]) for e in range(E))
    torch.testing.assert_close(layer(row.expand(1, 5, DIM)), expected.expand(1, 5, DIM), rtol=0, atol=1e-12)


def test_soft_is_equivariant_to_the_order_of_tokens():
    layer, x, order = make("soft", slots=2), tokens(2, 9), torch.randperm(9)
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order], rtol=0, atol=1e-12)


def test_the_causal_form_ends_where_the_whole_form_does():
    whole, causal = make("soft"), make("soft_causal")
    causal.load_state_dict(whole.state_dict())
    x = tokens(2, 9)
    torch.testing.assert_close(causal(x)[:, -1], whole(x)[:, -1], rtol=0, atol=1e-12)
    assert (causal(x)[:, 0] - whole(x)[:, 0]).abs().max() > 1e-3


def test_causality_is_bit_for_bit():
    layer, x = make("soft_causal"), tokens(2, 9)
    changed = torch.cat([x[:, :5], tokens(2, 4)], 1)
    assert torch.equal(layer(x)[:, :5], layer(changed)[:, :5])


@pytest.mark.parametrize("chunks", [(1,) * 7, (3, 1, 3), (0, 7, 0), (2, 5)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_decoding_in_pieces_is_the_whole_at_once(chunks, masked):
    layer, x = make("soft_causal"), tokens(4, 7).requires_grad_()
    mask = masks() if masked else None
    state = layer.new_state(4)
    pieces = [None] * len(chunks) if mask is None else mask.split(chunks, 1)
    decoded = torch.cat([layer(part, m, state) for part, m in zip(x.split(chunks, 1), pieces, strict=True)], 1)
    whole = layer(x, mask)
    torch.testing.assert_close(decoded, whole, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]) for y in (decoded, whole)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-11)


def test_state_belongs_to_its_batch_and_to_a_causal_layer():
    layer = make("soft_causal")
    with pytest.raises(ValueError, match=r"state was made for 3 sequences, but x holds 2"):
        layer(tokens(2, 4), state=layer.new_state(3))
    with pytest.raises(ValueError, match=r"cannot decode token by token.*later ones too"):
        make("soft").new_state(2)


@pytest.mark.parametrize("name", ["soft", "soft_causal"])
def test_sequences_without_a_valid_token_give_zero_and_finite_gradients(name):
    layer = make(name).float()
    x = tokens(2, 4).float().requires_grad_()
    y = layer(x, torch.zeros(2, 4, dtype=torch.bool))
    y.square().sum().backward()
    assert (y == 0).all()
    assert (x.grad == 0).all()
    assert all((parameter.grad == 0).all() for parameter in layer.parameters())


@pytest.mark.parametrize("scale", [-1.0, 1.0, 60.0, 70.0])
def test_running_sums_hold_in_float32_for_large_scales(scale):
    """At |scale| = 70 the exponents span 2·70, within what float32 holds."""
    layer = make("soft_causal")
    layer.scale.data.fill_(scale)
    common = tokens()
    layer.phi.data.mul_(0.1).add_(common)
    x = tokens(2, 9)
    x[:, 0] = -scale * common  # no expert prefers the first token, yet it alone fills all slots
    exact = layer(x)
    torch.testing.assert_close(layer.float()(x.float()).double(), exact, rtol=1e-3, atol=1e-3)


def test_absurd_scales_stay_finite():
    layer = make("soft_causal").float()
    layer.scale.data.fill_(1e4)
    x = tokens(2, 9).float().requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert all(leaf.grad.isfinite().all() for leaf in (x, *layer.parameters()))


def test_it_starts_as_the_authors_do():
    torch.manual_seed(0)
    layer = intbmoe.create("soft", 192, 8, experts=17, slots=11)
    assert layer.scale == 1
    assert layer.phi.shape == (17, 11, 192)
    assert layer.phi.std().item() == pytest.approx(192**-0.5, rel=0.02)


def test_parameters_of_the_table():
    """17 experts of 295,872 and 187 slots of 192, and the one scale, which the table's digits cannot show."""
    layer = intbmoe.create("soft", 192, 768, experts=17, slots=11)
    assert layer.active_parameters() == 17 * 295_872 + 187 * 192 + 1


def test_bad_options():
    with pytest.raises(ValueError, match=r"slots=2.*1 when causal=True"):
        intbmoe.create("soft_causal", DIM, HIDDEN, slots=2)
    with pytest.raises(ValueError, match="slots=0"):
        intbmoe.create("soft", DIM, HIDDEN, slots=0)


def test_a_trained_model_brings_its_number_of_slots():
    """Runs of earlier versions have another number of slots than the budget gives now."""
    old = intbmoe.create("soft", 8, 6, experts=3, slots=2).double().eval()
    new = intbmoe.create("soft", 8, 6, experts=3, slots=4).double().eval()
    new.load_state_dict(old.state_dict())
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    assert torch.equal(new(x), old(x))
    assert new.config.slots == 2
    training = intbmoe.create("soft", 8, 6, experts=3, slots=4).double()
    with pytest.raises(RuntimeError, match="size mismatch for phi"):
        training.load_state_dict(old.state_dict())
