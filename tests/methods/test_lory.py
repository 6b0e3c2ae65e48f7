"""Lory, against a loop over segments written from the equations."""

import warnings

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import intbmoe
from intbmoe.budget import match_budget

DIM, HIDDEN, E, S = 6, 10, 3, 4
firsts = pytest.mark.parametrize("first", ["uniform", "stop_gradient"])


def make(first="uniform", **options):
    options = {"experts": E, "segment": S, "first_segment": first, **options}
    layer = intbmoe.create("lory", DIM, HIDDEN, **options).double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def tokens(*shape):
    return torch.randn(*shape, DIM, dtype=torch.float64)


def masks():
    """Masks that are scattered, left-padded past the first segment, missing one whole segment, and empty."""
    mask = torch.ones(5, 14, dtype=torch.bool)
    mask[0, [2, 5, 6]] = False
    mask[1, :6] = False
    mask[2, 3:9] = False
    mask[3] = False
    return mask


def merged_expert(layer, a, z):
    theta = {name: sum(a[e] * value[e] for e in range(E)) for name, value in layer.experts.named_parameters()}
    if layer.config.expert == "gelu":
        inner = torch.nn.functional.gelu(z @ theta["up.weight"] + theta["up.bias"])
        return inner @ theta["down.weight"] + theta["down.bias"]
    inner = torch.nn.functional.silu(z @ theta["gate.weight"]) * (z @ theta["up.weight"])
    return inner @ theta["down.weight"]


def naive(layer, x, mask):
    y = torch.zeros_like(x)
    for b in range(x.shape[0]):
        in_force = torch.full((E,), 1 / E, dtype=x.dtype)
        for begin in range(0, x.shape[1], S):
            places = [t for t in range(begin, min(begin + S, x.shape[1])) if mask[b, t]]
            handed_on = in_force
            if places:
                mean = sum(x[b, t] for t in places) / len(places)
                handed_on = (layer.router.weight @ mean).softmax(0)
            if begin == 0 and layer.config.first_segment == "stop_gradient":
                in_force = handed_on.detach()
            for t in places:
                y[b, t] = merged_expert(layer, in_force, x[b, t])
            in_force = handed_on
    return y


@firsts
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("masked", [False, True])
def test_outputs_and_gradients_are_those_of_the_equations(first, kind, masked):
    layer = make(first, expert=kind)
    x = tokens(5, 14).requires_grad_()
    mask = masks() if masked else torch.ones(5, 14, dtype=torch.bool)
    leaves = [x, *layer.parameters()]
    found, expected = layer(x, mask if masked else None), naive(layer, x, mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    upstream = torch.randn_like(x)
    grads = [torch.autograd.grad(y, leaves, upstream) for y in (found, expected)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-11)


def test_more_segments_than_are_merged_at_once():
    layer, x = make(), tokens(4, 50)
    torch.testing.assert_close(layer(x), naive(layer, x, torch.ones(4, 50, dtype=torch.bool)), rtol=0, atol=1e-12)


@firsts
def test_a_segment_is_routed_by_the_one_before_it(first):
    """A token reaches the end of its own segment only through the first one's stopped gradient."""
    layer, x = make(first), tokens(1, 3 * S)
    jacobian = torch.autograd.functional.jacobian(lambda x: layer(x).sum(-1)[0], x)[:, 0].abs().sum(-1)
    seen = jacobian > 1e-12
    for n in range(3):
        for m in range(3):
            block = seen[n * S : (n + 1) * S, m * S : (m + 1) * S]
            expected = torch.eye(S, dtype=torch.bool) if n == m else torch.full((S, S), m == n - 1)
            assert torch.equal(block, expected), (n, m)


def test_the_papers_first_segment_leaks_in_its_value_and_not_past_it():
    layer, x = make("stop_gradient"), tokens(1, 3 * S)
    changed = x.clone()
    changed[:, S - 1] += 1
    assert (layer(changed) - layer(x))[:, 0].abs().max() > 1e-3
    changed = torch.cat([x[:, : S + 1], tokens(1, 2 * S - 1)], 1)
    torch.testing.assert_close(layer(changed)[:, : S + 1], layer(x)[:, : S + 1], rtol=0, atol=1e-12)
    assert "first segment" in layer.config.noncausal_reason()
    assert make("uniform").config.noncausal_reason() is None


@firsts
def test_the_router_learns_from_the_second_segment_on(first):
    layer, x = make(first), tokens(1, 2 * S)
    (grad,) = torch.autograd.grad(layer(x)[:, :S].sum(), layer.router.weight, retain_graph=True)
    assert (grad == 0).all()
    (grad,) = torch.autograd.grad(layer(x)[:, S:].sum(), layer.router.weight)
    assert grad.abs().sum() > 0


def test_an_undecided_router_runs_the_mean_expert_everywhere():
    layer, x = make("stop_gradient"), tokens(2, 10)
    layer.router.weight.data.zero_()
    uniform = make("uniform")
    uniform.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), uniform(x))
    mean = torch.full((E,), 1 / E, dtype=torch.float64)
    expected = torch.stack([merged_expert(layer, mean, row) for row in x.view(-1, DIM)])
    torch.testing.assert_close(layer(x).view(-1, DIM), expected, rtol=0, atol=1e-12)


def test_one_segment_in_the_papers_form_is_smear_with_a_detached_gate():
    lory = make("stop_gradient", segment=9)
    smear = intbmoe.create("smear", DIM, HIDDEN, experts=E, expert="swiglu").double().eval()
    smear.load_state_dict(lory.state_dict())
    x = tokens(2, 9)
    torch.testing.assert_close(lory(x), smear(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunks", [(1,) * 14, (4, 4, 4, 2), (3, 0, 6, 5), (0, 14, 0), (4, 10)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_decoding_in_pieces_is_the_whole_at_once(chunks, masked):
    layer, x = make(), tokens(5, 14).requires_grad_()
    mask = masks() if masked else None
    state = layer.new_state(5)
    pieces = [None] * len(chunks) if mask is None else mask.split(chunks, 1)
    decoded = torch.cat([layer(part, m, state) for part, m in zip(x.split(chunks, 1), pieces, strict=True)], 1)
    whole = layer(x, mask)
    torch.testing.assert_close(decoded, whole, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]) for y in (decoded, whole)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-11)


def test_state_belongs_to_its_batch_and_to_a_causal_layer():
    layer = make()
    with pytest.raises(ValueError, match=r"state was made for 3 sequences, but x holds 2"):
        layer(tokens(2, 4), state=layer.new_state(3))
    with pytest.raises(ValueError, match=r"cannot decode.*stop_gradient"):
        make("stop_gradient").new_state(2)


@firsts
def test_one_segment_gives_the_router_a_gradient_of_zero(first):
    layer = make(first)
    layer(tokens(2, 3)).sum().backward()
    assert (layer.router.weight.grad == 0).all()


def test_parameters_and_flops_of_the_table():
    """196 tokens: 13 merges of 17 experts of 294,912, 208 padded tokens, 13 router rows."""
    layer = intbmoe.create("lory", 192, 512, experts=17).eval()
    assert layer.active_parameters() == 17 * 294_912 + 192 * 17
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.randn(1, 196, 192))
    assert counter.get_total_flops() == 2 * (13 * 17 * 294_912 + 208 * 294_912 + 13 * 192 * 17)


def test_training_keeps_no_merged_weights():
    layer = make()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        layer(tokens(8, 40))
    activations, pool = 8 * 40 * HIDDEN, E * DIM * HIDDEN
    assert max(kept) <= max(activations, pool) < 8 * 10 * DIM * HIDDEN


def test_bad_options():
    with pytest.raises(ValueError, match="segment=0"):
        intbmoe.create("lory", DIM, HIDDEN, segment=0)
    with pytest.raises(ValueError, match=r"first_segment='own'.*'uniform' or 'stop_gradient'"):
        intbmoe.create("lory", DIM, HIDDEN, first_segment="own")


# A segment longer than the input, and generation routed by the prompt.


def test_a_segment_that_swallows_the_input_is_told_in_training():
    layer = make(segment=8).train()
    with pytest.warns(UserWarning, match=r"segment=8 holds a whole input.*choose a segment shorter"):
        layer(tokens(2, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(tokens(2, 9))
        layer.eval()(tokens(2, 8))
        layer(tokens(2, 3), state=layer.new_state(2))


def test_the_budget_gives_short_inputs_segments_that_route():
    options = match_budget("lory", DIM, HIDDEN, experts=E, tokens=4)  # the patches of a digit
    layer = intbmoe.create("lory", DIM, **options).double()
    assert layer.segment == 2
    layer(tokens(3, 4)).square().sum().backward()
    assert layer.router.weight.grad.abs().max() > 0
    for count in (196, 17, None):
        options = match_budget("lory", DIM, HIDDEN, experts=E, tokens=count)
        assert intbmoe.create("lory", DIM, **options).segment == 16
    assert layer.quantities().materialization.tokens == layer.segment == 2


def test_a_trained_layer_keeps_the_segment_it_was_trained_with():
    """Runs of earlier versions kept a segment longer than the input; only the state shows which ones they are."""
    old, x = make(segment=16), tokens(2, 4)
    new = make(segment=16, tokens=4)
    new.load_state_dict(old.state_dict())
    assert torch.equal(new(x), old(x))
    cut = make(segment=16, tokens=4)
    again = make(segment=16, tokens=4)
    again.load_state_dict(cut.state_dict())
    assert again.segment == cut.segment == 2
    assert torch.equal(again(x), cut(x))
    assert not torch.equal(again(x), old(x))
    assert set(make(segment=2, tokens=4).state_dict()) == set(old.state_dict())


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_prompt_chooses_one_expert_for_all_that_follows(kind, masked):
    layer, prompt, rest = make(generation="prompt", expert=kind), tokens(3, 7), tokens(3, 5)
    mask = None
    valid = torch.ones(3, 7, dtype=torch.bool)
    if masked:
        valid[0, :4] = valid[2] = False
        mask = valid
    state = layer.new_state(3)
    found = [layer(prompt, mask, state), layer(rest[:, :1], None, state), layer(rest[:, 1:], None, state)]
    for b in range(3):
        chosen = prompt[b][valid[b]]
        mean = chosen.mean(0) if len(chosen) else torch.zeros(DIM, dtype=torch.float64)
        a = (layer.router.weight @ mean).softmax(0)
        read = torch.cat([prompt[b], rest[b]])
        expected = torch.stack([merged_expert(layer, a, z) for z in read])
        expected[:7] *= valid[b].unsqueeze(-1)
        torch.testing.assert_close(torch.cat([part[b] for part in found]), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer(prompt), make_twin(layer)(prompt), rtol=0, atol=0)  # scoring stays by segment


def make_twin(layer):
    twin = make(expert=layer.config.expert)
    twin.load_state_dict(layer.state_dict())
    return twin


def test_one_composition_serves_a_request(monkeypatch):
    layer, built = make(generation="prompt"), []
    compose = layer.experts.compose
    monkeypatch.setattr(layer.experts, "compose", lambda *arguments: built.append(1) or compose(*arguments))
    state = layer.new_state(2)
    for _ in range(4):
        layer(tokens(2, 3), state=state)
    assert built == [1]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(tokens(2, 1), state=state)
    assert counter.get_total_flops() == 2 * 2 * 3 * DIM * HIDDEN  # two dense SwiGLU tokens
    with pytest.raises(ValueError, match=r"state was made for 2 sequences, but x holds 3"):
        layer(tokens(3, 1), state=state)


def test_without_tokens():
    layer = intbmoe.create("lory", 8, 8, first_segment="stop_gradient")
    assert layer(torch.zeros(2, 0, 8), torch.zeros(2, 0, dtype=torch.bool)).shape == (2, 0, 8)
