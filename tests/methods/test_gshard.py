"""GShard's top-2 gating against its equations written as loops, and against lingvo's tensors of one-hot masks."""

import math

import pytest
import torch
import torch.nn.functional as F

import intbmoe
from intbmoe.methods.gshard import top2_gating
from small_methods import make, tokens

E, T = 4, 13


def logits_of(seed=0, batch=2):
    return torch.randn(batch, T, E, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def uniforms_of(*shape):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def loops(logits, capacity=None, uniforms=None, threshold=0.5, renormalize="before"):
    """One sequence (T, E), token by token: (T, E) weights."""
    gates = logits.softmax(-1)
    order = [sorted(range(E), key=lambda e: (-row[e], e)) for row in gates.tolist()]
    first, second = [o[0] for o in order], [o[1] for o in order]
    pairs = []
    for t in range(T):
        one, two = gates[t, first[t]], gates[t, second[t]]
        total = one + two + 1e-9 if renormalize == "before" else 1
        pairs.append([one / total, two / total])
    kept = torch.zeros(T, E, dtype=torch.float64)
    filled = [0] * E
    for rank, chosen in enumerate((first, second)):
        for t in range(T):
            if rank == 1 and uniforms is not None and not uniforms[t] < pairs[t][1] / threshold:
                continue
            if capacity is None or filled[chosen[t]] < capacity:
                kept[t, chosen[t]] = pairs[t][rank]
                filled[chosen[t]] += 1
    if renormalize == "after":
        kept = kept / kept.sum(-1, keepdim=True).clamp(min=1e-300)
    return kept


def dense(ids, weights):
    return (F.one_hot(ids.clamp(min=0), E) * weights.unsqueeze(-1)).sum(-2)


@pytest.mark.parametrize("capacity", [None, 4, 1])
@pytest.mark.parametrize("renormalize", ["before", "after"])
@pytest.mark.parametrize("random", [False, True])
def test_the_gating_is_the_loop(capacity, renormalize, random):
    logits = logits_of()
    uniforms = uniforms_of(2, T) if random else None
    second = "random" if random else "all"
    ids, weights, wanted = top2_gating(
        logits, capacity=capacity, second=second, uniforms=uniforms, renormalize=renormalize
    )
    for b in range(2):
        expected = loops(logits[b], capacity, None if uniforms is None else uniforms[b], renormalize=renormalize)
        torch.testing.assert_close(dense(ids, weights)[b], expected, rtol=0, atol=1e-14)
    assert random == bool((wanted[..., 1] < 0).any())
    assert (capacity is None) == torch.equal(ids, wanted)


def test_it_is_lingvo_s_with_masks_and_exclusive_sums():
    """Written after Top2GatingOnLogits (legacy form, policy random): one-hot masks, and places by cumulative sums."""
    logits, uniforms, capacity, threshold = logits_of(3), uniforms_of(2, T), 4, 0.5
    gates = logits.softmax(-1)
    mask_1 = F.one_hot(gates.argmax(-1), E).double()
    others = gates * (1 - mask_1)
    mask_2 = F.one_hot(others.argmax(-1), E).double()
    gate_1, gate_2 = (gates * mask_1).sum(-1), (others * mask_2).sum(-1)
    total = gate_1 + gate_2 + 1e-9
    gate_1, gate_2 = gate_1 / total, gate_2 / total
    places_1 = mask_1.cumsum(-2) - mask_1
    mask_1 = mask_1 * (places_1 < capacity)
    mask_2 = mask_2 * (uniforms < gate_2 / threshold).unsqueeze(-1)
    places_2 = mask_2.cumsum(-2) - mask_2 + mask_1.sum(-2, keepdim=True)
    mask_2 = mask_2 * (places_2 < capacity)
    expected = gate_1.unsqueeze(-1) * mask_1 + gate_2.unsqueeze(-1) * mask_2
    ids, weights, _ = top2_gating(logits, capacity=capacity, second="random", uniforms=uniforms)
    torch.testing.assert_close(dense(ids, weights), expected, rtol=0, atol=1e-15)


def test_a_sampled_second_choice_is_the_gumbel_maximum_of_the_others():
    logits, uniforms = logits_of(), uniforms_of(2, T, E)
    ids, _, _ = top2_gating(logits, second="sample", uniforms=uniforms)
    first = logits.argmax(-1)
    assert torch.equal(ids[..., 0], first)
    noisy = logits - (-uniforms.log()).log()
    noisy.scatter_(-1, first.unsqueeze(-1), -math.inf)
    assert torch.equal(ids[..., 1], noisy.argmax(-1))


def test_the_layer_is_the_equation_and_its_loss_counts_first_choices():
    layer, x = make("gshard", second="all"), tokens(2, 6)
    logits = layer.router(x)
    weights = dense(*top2_gating(logits)[:2])
    outputs = layer.experts.batch(x.flatten(0, 1).expand(4, -1, -1)).view(4, 2, 6, -1)
    torch.testing.assert_close(layer(x), torch.einsum("bte,ebtd->btd", weights, outputs), rtol=0, atol=1e-12)
    # As lingvo's, but over all tokens, where lingvo averages over groups.
    gates = logits.flatten(0, 1).softmax(-1)
    first = F.one_hot(gates.argmax(-1), 4).double()
    loss = (first.mean(0) * gates.mean(0)).mean() * 4 * 4
    torch.testing.assert_close(intbmoe.aux_loss(layer), 0.01 * loss, rtol=0, atol=1e-14)


def test_capacity_is_lingvo_s():
    layer = make("gshard", capacity_factor=2, eval_capacity_factor=2)
    assert [layer._capacity(torch.zeros(1, n, 8), None) for n in (1, 8, 9, 16, 17)] == [4, 4, 4, 8, 8]
    assert "later ones too" in layer.config.noncausal_reason()
