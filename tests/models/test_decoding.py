"""Decoding with a cache gives the same as the whole sequence, for every causal method; prompts, sampling, stopping."""

import copy
from functools import cache

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import intbmoe
from intbmoe.models.llama import Llama, LlamaConfig
from intbmoe.models.sampling import Sampling
from intbmoe.registry import find_method

VOCABULARY = 31
SIZES = LlamaConfig(vocabulary=VOCABULARY, dim=12, depth=2, heads=3, hidden=20, init_std=0.5)
# Options that make a method small, and a sequence of a few tokens long enough to show what it remembers.
TINY = {
    "intbmoe": {"experts": 3, "blocks": 4, "top_k": 2, "code_dim": 3, "router_dim": 5, "hyper_dim": 4},
    "lory": {"segment": 3},
    "ple": {"levels": 1},  # weights are enlarged below: with two levels, bfloat16 would be too coarse
}
OWN, PRECOMPOSED = "Llama's own", "intbmoe precomposed"
CAUSAL = [name for name in intbmoe.list_methods() if find_method(name).noncausal_reason() is None]
MODELS = [OWN, *CAUSAL, PRECOMPOSED]


def make(name):
    if name == PRECOMPOSED:
        return intbmoe.precompose(make("intbmoe"))
    torch.manual_seed(1)
    make_ffn = None if name == OWN else lambda: intbmoe.create(name, 12, 8, **TINY.get(name, {}))
    model = Llama(SIZES, make_ffn).double().eval()
    with torch.no_grad():
        for layer in model.layers:  # so that the FFN decides which token comes next
            for parameter in layer.mlp.parameters():
                parameter.mul_(4 if parameter.dim() > 1 else 1)
    return model


shared = cache(make)
"""Models that tests do not change."""


def ids(batch=2, tokens=9, seed=2):
    return torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def left_padded(lengths, seed=2):
    """Prompts of these lengths as one batch, and each alone."""
    longest = max(lengths)
    tokens = ids(len(lengths), longest, seed)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths).unsqueeze(1)
    alone = [row[longest - length :].unsqueeze(0) for row, length in zip(tokens, lengths, strict=True)]
    return tokens, mask, alone


@torch.no_grad()
def uncached_greedy(model, tokens, steps):
    """New ids and the logits they were chosen from, reading the whole sequence for each."""
    chosen, logits = tokens, []
    for _ in range(steps):
        logits.append(model(chosen)[:, -1])
        chosen = torch.cat([chosen, logits[-1].argmax(-1, keepdim=True)], 1)
    return chosen[:, tokens.shape[1] :], torch.stack(logits, 1)


@pytest.mark.parametrize("name", MODELS)
def test_cached_decoding_is_uncached_decoding(name):
    model, tokens = shared(name), ids()
    expected, expected_logits = uncached_greedy(model, tokens, 16)
    memory = model.new_cache(2, 24)
    logits = [model(tokens, cache=memory)[:, -1]]
    for _ in range(15):
        logits.append(model(logits[-1].argmax(-1, keepdim=True), cache=memory)[:, -1])
    logits = torch.stack(logits, 1)
    assert memory.held == 24
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-10)
    assert torch.equal(logits.argmax(-1), expected)
    assert torch.equal(model.generate(tokens, max_new_tokens=16), expected)
    assert len(expected.unique()) > 2  # a model stuck on one token would show little


@st.composite
def cut_sequences(draw):
    """Token ids, padding anywhere or none, and the sizes of the pieces they arrive in."""
    pieces = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    shape, seed = (draw(st.integers(1, 3)), sum(pieces)), draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    padded = draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)))
    mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.3, 0.8]))
    return ids(*shape, seed), mask, pieces, padded


@settings(max_examples=60)
@given(name=st.sampled_from(MODELS), sequence=cut_sequences())
def test_reading_in_pieces_is_reading_at_once(name, sequence):
    """Also with padding anywhere, and if only some of the pieces have a mask."""
    model, (tokens, mask, pieces, padded) = shared(name), sequence
    memory = model.new_cache(*tokens.shape)
    logits, valid = [], []
    for piece, part, with_mask in zip(tokens.split(pieces, 1), mask.split(pieces, 1), padded, strict=True):
        logits.append(model(piece, part if with_mask else None, memory))
        valid.append(part if with_mask else torch.ones_like(part))
    logits, valid = torch.cat(logits, 1), torch.cat(valid, 1)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[valid], model(tokens, valid)[valid], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_every_piece_of_one_token_and_of_two(name):
    """The same for every method by name: hypothesis may not draw each."""
    model, tokens = shared(name), ids(tokens=11)
    for size in (1, 2, 11):
        memory = model.new_cache(2, 11)
        logits = torch.cat([model(piece, cache=memory) for piece in tokens.split(size, 1)], 1)
        torch.testing.assert_close(logits, model(tokens), rtol=0, atol=1e-10)


@settings(max_examples=12)
@given(
    name=st.sampled_from(MODELS),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    seed=st.integers(0, 2**16),
)
def test_a_prompt_is_continued_as_if_alone(name, lengths, seed):
    assert_continued_as_if_alone(name, lengths, seed)


@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_three_lengths_are_continued_as_if_alone(name):
    """The same for every method by name: hypothesis may not draw each."""
    assert_continued_as_if_alone(name, lengths=(4, 1, 9), seed=2)


def assert_continued_as_if_alone(name, lengths, seed):
    model = shared(name)
    tokens, mask, alone = left_padded(lengths, seed)
    together = model.generate(tokens, mask, max_new_tokens=7)
    single = torch.cat([model.generate(prompt, max_new_tokens=7) for prompt in alone])
    assert torch.equal(together, single)
    assert torch.equal(model.generate(tokens.where(mask, 0), mask, max_new_tokens=7), single)


@pytest.mark.parametrize("name", MODELS)
def test_each_token_is_read_once(name):
    model, read = make(name), []
    model.embed_tokens.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].shape))
    model.generate(ids(), max_new_tokens=4)
    assert read == [(2, 9), (2, 1), (2, 1), (2, 1)]


@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_ends_with_the_stop_id_and_is_filled_with_it(name):
    model, tokens = shared(name), ids(4)
    free = model.generate(tokens, max_new_tokens=12)
    stop = int(free[1, 5])
    stopped = model.generate(tokens, max_new_tokens=12, stop=stop)
    ends = [(row == stop).nonzero().flatten().tolist() for row in free]
    lengths = [end[0] + 1 if end else 12 for end in ends]
    assert stopped.shape == (4, max(lengths))
    for row, length, expected in zip(stopped, lengths, free, strict=True):
        assert torch.equal(row[:length], expected[:length])
        assert (row[length:] == stop).all()


def test_generation_ends_when_all_sequences_have():
    model = shared(OWN)
    tokens = ids(1)
    free = model.generate(tokens, max_new_tokens=6)[0].tolist()
    stopped = model.generate(tokens.expand(3, -1), max_new_tokens=1000, stop=free[3])
    assert stopped.shape == (3, free.index(free[3]) + 1)


def test_the_stream_gives_each_step_as_it_is_made():
    model, steps = make("intbmoe"), []
    model.norm.register_forward_hook(lambda *step: steps.append(step))
    stream = model.stream(ids(), max_new_tokens=5)
    assert not steps
    for made, chosen in enumerate(stream, 1):
        assert len(steps) == made
        assert chosen.shape == (2,)
        assert torch.equal(chosen, model.generate(ids(), max_new_tokens=made)[:, -1])
        del steps[made:]
    assert made == 5


# Choosing.


def test_sampling_repeats_with_its_generator():
    model, tokens = shared("switch"), ids()

    def run(seed):
        options = {"temperature": 1.5, "generator": torch.Generator().manual_seed(seed)}
        return model.generate(tokens, max_new_tokens=20, **options)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_choices_so_narrow_that_they_are_greedy():
    model, tokens = shared(OWN), ids()
    greedy = model.generate(tokens, max_new_tokens=9)
    for narrow in ({"top_k": 1}, {"top_p": 1e-9}):
        assert torch.equal(model.generate(tokens, max_new_tokens=9, temperature=5.0, **narrow), greedy)
    assert torch.equal(model.generate(tokens, max_new_tokens=9, temperature=1e-6), greedy)


@settings(max_examples=40)
@given(
    logits=st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=8),
    temperature=st.floats(0.2, 4),
    top_k=st.none() | st.integers(1, 10),
    top_p=st.none() | st.floats(0.05, 1),
)
def test_draws_follow_the_distribution(logits, temperature, top_k, top_p):
    """Against the definition, id by id: frequencies within five standard deviations."""
    draws, logits = 4000, torch.tensor(logits)
    kept = sorted(range(len(logits)), key=lambda i: (-logits[i].item(), i))[:top_k]
    weights = torch.tensor([logits[i] for i in kept], dtype=torch.float64).div(temperature).softmax(0).tolist()
    sums = [sum(weights[:n]) for n in range(1, len(kept) + 1)]
    if top_p is not None:
        assume(all(abs(mass - top_p) > 1e-5 for mass in sums))  # nearer than that, float32 may round either way
        reached = next((n for n, mass in enumerate(sums, 1) if mass >= top_p), len(kept))
        weights = [weight / sums[reached - 1] for weight in weights[:reached]]
    expected = dict(zip(kept, weights, strict=False))
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    chosen = sampling.choose(logits.expand(draws, -1), torch.Generator().manual_seed(5))
    counts = torch.bincount(chosen, minlength=len(logits)) / draws
    for i, frequency in enumerate(counts.tolist()):
        p = expected.get(i, 0.0)
        assert abs(frequency - p) <= 5 * (p * (1 - p) / draws) ** 0.5 + 1e-3 * (p > 0)


def test_equals_go_to_the_lower_id():
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0]]).expand(200, -1)
    assert (Sampling().choose(logits) == 1).all()
    assert set(Sampling(temperature=1.0, top_k=2).choose(logits).tolist()) == {1, 2}


# Types.


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_runs(name):
    tokens, mask, _ = left_padded([9, 4])
    model = make(name).float()
    with torch.autocast("cpu", torch.bfloat16):
        memory = model.new_cache(2, 10)
        assert memory.layers[0].keys.dtype == torch.bfloat16
        assert model.generate(tokens, mask, max_new_tokens=6).shape == (2, 6)
        near = model(tokens, mask, memory)
    torch.testing.assert_close(near.float()[mask], model(tokens, mask)[mask], rtol=0.2, atol=0.5)
    assert model(tokens[:, :1], cache=memory).isfinite().all()  # a cache outlives the autocast that it was created in
    half = intbmoe.precompose(make("intbmoe").float(), torch.bfloat16) if name == PRECOMPOSED else model.bfloat16()
    memory = half.new_cache(2, 9)
    assert memory.layers[0].keys.dtype == torch.bfloat16
    assert half(tokens, mask, memory).dtype == torch.bfloat16
    assert half.generate(tokens, mask, max_new_tokens=6).shape == (2, 6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_continues_as_the_cpu_does(name):
    model, (tokens, mask, _) = make(name), left_padded([9, 4, 9, 1])
    expected = model.generate(tokens, mask, max_new_tokens=12)
    assert torch.equal(model.cuda().generate(tokens.cuda(), mask.cuda(), max_new_tokens=12).cpu(), expected)


@torch.no_grad()
def test_lory_composes_once_for_a_request_where_that_is_asked_for():
    """Each layer's expert is chosen by the mean of the prompt's inputs to it, and stays for the whole continuation."""
    torch.manual_seed(1)
    model = Llama(SIZES, lambda: intbmoe.create("lory", 12, 8, segment=3, generation="prompt")).double().eval()
    (tokens, mask, alone), composed = left_padded([9, 4]), []

    def watch(layer, arguments, y):
        composed.append(arguments[2].experts["up"][0])

    watchers = [layer.mlp.register_forward_hook(watch) for layer in model.layers]
    for prompt in alone:
        composed.clear()
        model.generate(prompt, max_new_tokens=6)
        assert len(composed) == 6 * len(model.layers)
        assert {id(weight) for weight in composed[:2]} == {id(weight) for weight in composed}
    for watcher in watchers:
        watcher.remove()
    together = model.generate(tokens, mask, max_new_tokens=6)
    assert together.tolist() == [model.generate(prompt, max_new_tokens=6)[0].tolist() for prompt in alone]
    by_segment = Llama(SIZES, lambda: intbmoe.create("lory", 12, 8, segment=3)).double().eval()
    by_segment.load_state_dict(model.state_dict())
    for layer in (*model.layers, *by_segment.layers):
        layer.mlp.router.weight.mul_(30)
    torch.testing.assert_close(by_segment(tokens), model(tokens), rtol=0, atol=0)
    assert not torch.equal(by_segment.generate(tokens, max_new_tokens=20), model.generate(tokens, max_new_tokens=20))


# What decoding leaves unchanged.


def test_decoding_leaves_no_trace_on_the_model():
    model = make("lory")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(ids())
    model.generate(ids(), max_new_tokens=5)
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(copy.deepcopy(model)(ids()), expected)
    assert torch.equal(model(ids()), expected)
    assert expected.requires_grad
    assert not model(ids(), cache=model.new_cache(2, 9)).requires_grad


@pytest.mark.parametrize("name", MODELS)
def test_a_copied_cache_goes_its_own_way(name):
    model, tokens = shared(name), ids(tokens=12)
    memory = model.new_cache(2, 12)
    model(tokens[:, :7], cache=memory)
    other = copy.deepcopy(memory)
    model(ids(tokens=5, seed=8), cache=other)
    rest = model(tokens[:, 7:], cache=memory)
    torch.testing.assert_close(rest, model(tokens)[:, 7:], rtol=0, atol=1e-10)


# What is refused.


def test_a_full_cache_says_so():
    model = shared("lory")
    memory = model.new_cache(2, 10)
    model(ids(), cache=memory)
    with pytest.raises(ValueError, match=r"holds 9 tokens and has room for 10: 2 more .*length=11"):
        model(ids(tokens=2), cache=memory)
    model(ids(tokens=1), cache=memory)  # the refusal changed nothing
    assert memory.held == 10


def test_a_cache_of_another_batch_is_refused():
    model = shared("soft_causal")
    with pytest.raises(ValueError, match="for 3 sequences, but ids hold 2"):
        model(ids(), cache=model.new_cache(3, 9))
    with pytest.raises(ValueError, match="length=0"):
        model.new_cache(2, 0)


def test_training_mode_is_refused():
    model = make("switch").train()
    with pytest.raises(RuntimeError, match=r"model\.eval\(\)"):
        model.generate(ids(), max_new_tokens=2)


def test_a_memory_that_nothing_would_hand_on_is_refused():
    def wrapped(name):
        return Llama(SIZES, lambda: nn.Sequential(intbmoe.create(name, 12, 8))).eval()

    with pytest.raises(ValueError, match=r"Sequential holds Lory \('lory'\) as '0'"):
        wrapped("lory").generate(ids(), max_new_tokens=2)
    assert wrapped("dense").generate(ids(), max_new_tokens=2).shape == (2, 2)


@pytest.mark.parametrize("mask", [[True, True, False], [True, False, True], [False, False, False]], ids=str)
def test_padding_that_is_not_on_the_left_is_refused(mask):
    valid = torch.tensor([[False, True, True], mask])
    with pytest.raises(ValueError, match=r"mask of prompt 1 .* pad on the left"):
        shared(OWN).stream(ids(tokens=3), valid, max_new_tokens=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5"),
        ({"top_k": 5}, "temperature=0.0 .* positive with top_k"),
        ({"stop": VOCABULARY}, f"stop={VOCABULARY} .* 0 to {VOCABULARY - 1}"),
    ],
)
def test_bad_options_are_named_before_the_model_runs(options, message):
    with pytest.raises(ValueError, match=message):
        shared(OWN).stream(ids(), **{"max_new_tokens": 3, **options})


def test_bad_prompts_are_named():
    model = shared(OWN)
    with pytest.raises(ValueError, match=r"ids have shape \(2, 0\)"):
        model.generate(ids(tokens=0), max_new_tokens=3)
    with pytest.raises(TypeError, match="temprature"):
        model.generate(ids(), max_new_tokens=3, temprature=1.0)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 8\)"):
        model.generate(ids(), torch.ones(2, 8, dtype=torch.bool), max_new_tokens=3)
