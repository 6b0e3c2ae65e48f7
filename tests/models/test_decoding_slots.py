"""Decoding in slots gives the same as decoding with a cache, for every causal method; texts join, leave and move."""

import copy
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoding import MODELS, OWN, ids, left_padded, make, shared

import intbmoe
from intbmoe.models import slots as slots_of
from intbmoe.models.sampling import Sampling
from intbmoe.models.slots import Slots, Text, why_not_captured
from thinned import thinned

TOKENWISE = [name for name in MODELS if name not in ("lory", "soft_causal")]
GREEDY = Sampling()
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Read even short prompts in several parts, and prompts of three or more texts separately."""
    monkeypatch.setattr(slots_of, "CHUNKS", (2, 4))
    monkeypatch.setattr(slots_of, "READERS", (1, 2))


def both_ways(model, tokens, mask=None, device="cpu", **options):
    """Texts generated without slots and in slots, with the same random numbers; the model keeps its slots."""
    found = []
    for capture in (False, True):
        if "temperature" in options:
            options["generator"] = torch.Generator(device).manual_seed(7)
        found.append(model.generate(tokens, mask, capture=capture, **options))
    return found


def test_which_models_have_slots():
    for name in MODELS:
        assert (why_not_captured(shared(name)) is None) == (name in TOKENWISE)
    tokens = ids()
    with pytest.raises(ValueError, match=r"capture=True .*Lory \(layers\.0\.mlp\) keeps its own state"):
        shared("lory").generate(tokens, max_new_tokens=2, capture=True)
    model = make("switch").float()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        model.generate(tokens, max_new_tokens=2, capture=True)


WAYS = ({}, {"temperature": 2.0}, {"temperature": 3.0, "top_k": 9, "top_p": 0.9})


# Sampling from the scores does not depend on the method that made them.
@pytest.mark.parametrize(
    ("name", "options"),
    thinned(product(TOKENWISE, WAYS), lambda name, options: not options or name in ("switch", "intbmoe")),
    ids=str,
)
def test_slots_give_the_same_tokens(name, options):
    tokens, mask, _ = left_padded([9, 4, 1, 5, 8])
    expected, found = both_ways(make(name), tokens, mask, max_new_tokens=12, **options)
    assert torch.equal(found, expected)
    assert len(found.unique()) > 2


@pytest.mark.parametrize("name", TOKENWISE)
def test_slots_give_the_same_tokens_in_float32(name):
    tokens, mask, _ = left_padded([3, 7])
    expected, found = both_ways(make(name).float(), tokens, mask, max_new_tokens=6)
    assert torch.equal(found, expected)


def test_an_ended_text_between_others_needs_no_limits():
    """Its row of the table is empty: there are no most likely tokens to choose from."""
    model, tokens = make("switch"), ids(3)
    options = {"temperature": 3.0, "top_k": 5}
    [free, _] = both_ways(model, tokens, max_new_tokens=9, **options)
    expected, found = both_ways(model, tokens, max_new_tokens=9, stop=int(free[1, 0]), **options)
    assert torch.equal(found, expected)
    assert (found[1] == found[1, 0]).all()
    assert len(found[2].unique()) > 1


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(TOKENWISE),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    new=st.integers(1, 8),
    seed=st.integers(0, 2**16),
    stop=st.none() | st.integers(0, 30),
)
def test_any_prompts(name, lengths, new, seed, stop):
    """One token, several chunks, the end of a text in the middle; slots kept from an earlier call hold other keys."""
    tokens, mask, _ = left_padded(lengths, seed)
    expected, found = both_ways(shared(name), tokens, mask, max_new_tokens=new, stop=stop)
    assert torch.equal(found, expected)


def test_a_text_that_has_ended_is_not_read_on():
    model, read = make(OWN), []
    tokens = ids(3)
    stop = int(model.generate(tokens, max_new_tokens=1)[0])
    model.embed_tokens.register_forward_hook(lambda module, inputs, output: read.append(tuple(inputs[0].shape)))
    model.generate(tokens[:1], max_new_tokens=5, stop=stop, capture=True)
    assert read == [(1, 4), (1, 4), (1, 1)]


@pytest.mark.parametrize("name", ["intbmoe", "switch"])
def test_texts_join_leave_and_move(name):
    """Texts at different positions, one in a slot that another left, one that moves: each is as if it were alone."""
    model = shared(name)
    prompts = [row[: 3 + 2 * number].tolist() for number, row in enumerate(ids(3, 9))]
    alone = [model.generate(torch.tensor([prompt]), max_new_tokens=8)[0].tolist() for prompt in prompts]
    slots, found = Slots(model, 3, 16), [[], [], []]

    def run(call, texts):
        after = {}
        for number, one in zip(texts, call(list(texts.values())), strict=True):
            found[number].append(one.token)
            after[number] = texts[number].after(one.token)
        return after

    going = run(slots.read, {number: Text(number, prompts[number], 0, GREEDY) for number in (0, 1)})
    going = run(slots.step, going)
    going.pop(0)
    going = run(slots.step, going)  # slot 0 is free
    going |= run(slots.read, {2: Text(0, prompts[2], 0, GREEDY)})
    for _ in range(2):
        going = run(slots.step, going)
    slots.move(1, 2)
    going[1] = going[1]._replace(slot=2)
    for _ in range(3):
        going = run(slots.step, going)
    assert [len(tokens) for tokens in found] == [2, 8, 6]
    assert [tokens[: len(part)] for tokens, part in zip(alone, found, strict=True)] == found


def test_the_score_is_the_log_probability():
    model, tokens = shared("switch"), ids(1, 5)
    [one] = Slots(model, 2, 8).read([Text(1, tokens[0].tolist(), 0, GREEDY)])
    assert one.score == pytest.approx(model(tokens)[0, -1].log_softmax(-1)[one.token].item(), abs=1e-12)


def test_padding_reaches_no_mixture():
    """One of two texts has ended, and one of two prompts is shorter: only real tokens are counted."""
    model, counted = make("switch"), []
    with intbmoe.record_routing(model) as log:
        slots = Slots(model, 2, 16)
        slots.read([Text(0, [1, 2, 3], 0, GREEDY), Text(1, [4], 0, GREEDY)])
        slots.step([Text(1, [4], 1, GREEDY)])
        counted = [int((one.ids >= 0).sum()) for one in log.values()]
    assert counted == [5, 5]


def test_slots_are_kept_for_the_next_call_and_not_copied():
    model = make("switch")
    model.generate(ids(2), max_new_tokens=3, capture=True)
    kept = model.kept_slots
    first, second = model.stream(ids(2), max_new_tokens=3, capture=True), None
    assert model.kept_slots is None  # in use
    second = model.stream(ids(2, seed=5), max_new_tokens=3, capture=True)
    pairs = list(zip(first, second, strict=True))
    for which, seed in ((0, 2), (1, 5)):
        expected = model.generate(ids(2, seed=seed), max_new_tokens=3, capture=False)
        assert torch.equal(torch.stack([pair[which] for pair in pairs], 1), expected)
    assert copy.deepcopy(model).kept_slots is None
    model.kept_slots = kept
    model.generate(ids(2), max_new_tokens=2, capture=True)
    assert model.kept_slots is kept
    with torch.no_grad():
        model.embed_tokens.weight.data = model.embed_tokens.weight.data.clone()  # a graph would read the old one
    model.generate(ids(2), max_new_tokens=2, capture=True)
    assert model.kept_slots is not kept


def test_training_mode_is_refused_with_kept_slots_too():
    model = make("switch")
    model.generate(ids(), max_new_tokens=2, capture=True)
    with pytest.raises(RuntimeError, match=r"model\.eval\(\)"):
        model.train().generate(ids(), max_new_tokens=2, capture=True)


# On a GPU.


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", TOKENWISE)
def test_graphs_give_the_same_tokens(name):
    tokens, mask, _ = left_padded([9, 4, 1, 5, 8])
    model = make(name)
    cpu = model.generate(tokens, mask, max_new_tokens=12)
    model, tokens, mask = model.cuda(), tokens.cuda(), mask.cuda()
    for options in ({}, {"temperature": 2.0}, {"temperature": 3.0, "top_k": 9, "top_p": 0.9}):
        expected, found = both_ways(model, tokens, mask, "cuda", max_new_tokens=12, **options)
        assert torch.equal(found, expected)
        assert options or torch.equal(found.cpu(), cpu)
    for rows in (1, 2, 3):  # buckets of the kept slots
        expected, found = both_ways(model, tokens[:rows], mask[:rows], max_new_tokens=9, stop=int(cpu[0, 4]))
        assert torch.equal(found, expected)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", TOKENWISE)
def test_a_step_never_waits_for_the_device_and_counts_its_tokens(name):
    model = make(name).float().cuda()
    slots = Slots(model, 4, 20)
    slots.record()
    texts = [Text(slot, [1, 2, 3], 0, GREEDY) for slot in range(3)]
    found = slots.read(texts)
    if name != OWN:  # which has no mixture
        with intbmoe.record_routing(model) as log:
            slots.step([text.after(one.token) for text, one in zip(texts, found, strict=True)])
        assert all(one.ids is None or len(one.ids[(one.ids >= 0).any(1)]) <= 3 for one in log.values())
    graphs = list(slots.graphs.values())
    slots.input.device.zero_()  # none of their tables has a text
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for graph in graphs:
            graph()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
