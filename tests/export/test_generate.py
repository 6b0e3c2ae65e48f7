"""Generation with a cache: what reading the whole text each time gives, each request as if alone, piece by piece."""

import hashlib
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from small_predictors import LENGTH, predictor, requests, travel_catalogue

from intbmoe import cli
from intbmoe.export.golden import ask
from intbmoe.models import sampling
from intbmoe.recipes import load_recipe, recipe_to_dict
from intbmoe.tasks import make_task
from intbmoe.tasks.language.serving import GeneratePredictor
from intbmoe.tasks.language.vocabulary import BytePairs, ByteVocabulary


def choose(logits, temperatures, chances):
    return sampling.choose(logits, *(torch.tensor(one, dtype=torch.float64) for one in (temperatures, chances)))


def uncached(asked, request):
    """New ids by reading everything again for each, with the same random numbers."""
    encoded = asked.encode(request)
    ids, random = encoded.payload["ids"].tolist(), np.random.Generator(np.random.Philox(request["seed"]))
    new = []
    with torch.no_grad():
        while len(new) < request["max_tokens"]:
            logits = asked.model(torch.tensor([[*ids, *new]]))[:, -1]
            token = int(choose(logits, [request["temperature"]], [random.random()]))
            if token == asked.vocabulary.end_of_text:
                break
            new.append(token)
    return new


@pytest.mark.parametrize("method", ["dense", "intbmoe", "lory", "soft_causal"])
def test_the_cache_changes_nothing(method):
    asked = predictor("generate", method)
    pool = [{**request, "max_tokens": 6} for request in requests("generate", 5)]
    continuation = asked.stream([asked.encode(request) for request in pool])
    for _ in continuation:
        pass
    assert continuation.ids == [uncached(asked, request) for request in pool]


def test_the_score_is_the_log_probability_of_what_was_written():
    asked = predictor("generate")
    for request in requests("generate", 6):
        new = uncached(asked, request)
        prompt = asked.encode(request).payload["ids"].tolist()
        ended = [asked.vocabulary.end_of_text] if len(new) < request["max_tokens"] else []
        written = torch.tensor([*new, *ended])
        logits = asked.model(torch.tensor([[*prompt, *new]]))[0, len(prompt) - 1 :][: len(written)]
        expected = logits.log_softmax(-1).gather(1, written.unsqueeze(1)).sum().item()
        assert ask(asked, request)["score"] == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("method", ["intbmoe", "lory"])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_who_leaves_changes_nothing_for_who_stays(method, data):
    asked = predictor("generate", method)
    pool = requests("generate", 6, seed=4)
    leaves = data.draw(st.dictionaries(st.integers(0, 5), st.integers(0, 4), max_size=5))
    continuation = asked.stream([asked.encode(request) for request in pool])
    texts, ended = [""] * len(pool), set()
    for step, pieces in enumerate(continuation):
        for piece in pieces:
            assert leaves.get(piece.index, step + 1) > step or step == 0
            assert piece.index not in ended
            texts[piece.index] += piece.text
            if piece.finished is not None:
                ended.add(piece.index)
        for index, when in leaves.items():
            if when <= step + 1:
                continuation.drop(index)
    for index, request in enumerate(pool):
        if index not in leaves:
            assert index in ended
            assert texts[index] == ask(asked, request)["text"]


def test_ended_requests_are_not_computed_any_more():
    asked = predictor("generate")
    short, long = ({"prompt": "ab", "max_tokens": count, "temperature": 1.0} for count in (1, 6))
    read = []
    forward = asked.model.next_logits
    counted = GeneratePredictor(asked.vocabulary, LENGTH).with_model(asked.model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asked.model, "next_logits", lambda ids, *rest: read.append(len(ids)) or forward(ids, *rest))
        counted.answer([counted.encode(request) for request in (short, short, long)])
    assert read[0] == 3
    assert set(read[1:]) <= {1}


def in_service(method="intbmoe", texts=4):
    """A predictor that writes all texts together, with what is read in each call."""
    asked = predictor("generate", method)
    served = GeneratePredictor(asked.vocabulary, LENGTH).with_model(asked.model)
    served.record_graphs(texts)
    return served


@pytest.mark.parametrize("method", ["intbmoe", "lory"])
def test_texts_join_those_that_are_being_written(method, monkeypatch):
    """One call of the model per step for all batches, and every text as if it were alone."""
    served, read = in_service(method), []
    pool = [{**request, "max_tokens": 5} for request in requests("generate", 4, seed=4)]
    expected = [uncached(served, request) for request in pool]
    forward = served.model.next_logits
    monkeypatch.setattr(served.model, "next_logits", lambda ids, *rest: read.append(len(ids)) or forward(ids, *rest))
    first = served.stream([served.encode(request) for request in pool[:2]])
    next(first)
    second = served.stream([served.encode(request) for request in pool[2:]])
    for _ in range(4):
        read.clear()
        pieces = next(first, None), next(second)
        assert sum(read) == 4 - (pieces[0] is None) * 2 or any(len(new) < 5 for new in expected)
        assert method == "lory" or len(read) <= 2
    for _ in second:
        pass
    assert first.ids + second.ids == expected


def test_more_texts_than_slots_wait_and_who_is_forgotten_makes_room():
    served = in_service(texts=2)
    pool = [{**request, "max_tokens": 4} for request in requests("generate", 5, seed=4)]
    forgotten = served.stream([served.encode({**request, "max_tokens": LENGTH}) for request in pool[:2]])
    next(forgotten)
    waiting = served.stream([served.encode(request) for request in pool])
    del forgotten
    steps = sum(1 for _ in waiting)
    assert waiting.ids == [uncached(served, request) for request in pool]
    assert steps <= 3 * 4


def test_a_step_that_fails_ends_all_texts_and_no_later_one(monkeypatch):
    served = in_service()
    request = served.encode(requests("generate", 1)[0])
    going = served.stream([request]), served.stream([request])
    next(going[0])

    def fail(*_):
        raise RuntimeError("the model failed")

    with monkeypatch.context() as patch:
        patch.setattr(served.model, "next_logits", fail)
        with pytest.raises(RuntimeError, match="the model failed"):
            next(going[0])
    assert next(going[1], None) is not None  # the piece it had before
    assert next(going[1], None) is None
    assert list(served.stream([request]))


def test_chances_choose_by_probability():
    """Over many evenly spread chances each token is drawn as often as it is likely, and lower temperatures sharpen."""
    logits = torch.tensor([[0.0, 1.0, -2.0, 3.0]], dtype=torch.float64)
    count = 4000
    chance = ((np.arange(count) + 0.5) / count).tolist()
    for temperature in (0.5, 1.0, 3.0):
        drawn = choose(logits.expand(count, -1), [temperature] * count, chance)
        share = torch.bincount(drawn, minlength=4) / count
        torch.testing.assert_close(share.double(), (logits[0] / temperature).softmax(0), rtol=0, atol=2 / count)
    assert choose(logits, [0.0], [0.999]).item() == 3
    assert choose(logits, [1e-320], [0.999]).item() == 3
    assert choose(logits, [10.0], [1 - 1e-16]).item() in range(4)


def test_seeds_decide_and_zero_temperature_ignores_them():
    asked = predictor("generate")
    warm = {"prompt": "abc", "max_tokens": 12, "temperature": 1.5}
    texts = {seed: ask(asked, {**warm, "seed": seed})["text"] for seed in range(5)}
    assert len(set(texts.values())) > 1
    assert texts == {seed: ask(asked, {**warm, "seed": seed})["text"] for seed in range(5)}
    assert len({ask(asked, {**warm, "temperature": 0, "seed": seed})["text"] for seed in range(5)}) == 1


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=30))
def test_bytes_come_back_as_the_text_they_were(text):
    vocabulary = ByteVocabulary(256)
    decoder = vocabulary.new_decoder()
    pieces = [decoder.add(token) for token in vocabulary.encode(text)]
    assert "".join(pieces) + decoder.end() == text
    assert decoder.end() == ""


def test_half_a_character_at_the_end_is_said_to_be_one():
    decoder = ByteVocabulary(256).new_decoder()
    assert decoder.add(0xC3) == ""
    assert decoder.end() == "\ufffd"


def byte_pairs():
    pytest.importorskip("tokenizers")
    from intbmoe.tasks.language.tokenizer import train_bpe

    return BytePairs(train_bpe(["to be or not to be, that is the question"] * 20, 290), 0)


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=20))
def test_byte_pairs_come_back_as_the_text_they_were(text):
    vocabulary = byte_pairs()
    decoder = vocabulary.new_decoder()
    assert "".join(map(decoder.add, vocabulary.encode(text))) + decoder.end() == text


def test_the_end_of_text_cannot_be_written_into_a_prompt():
    assert 0 not in byte_pairs().encode("<|endoftext|>")


def write_artifact(folder, recipe, catalogue, tensors):
    """As an export writes one; these tests need no trained run."""
    folder.mkdir()
    save_file(make_task(recipe).make_model().state_dict(), folder / "model.safetensors")
    (folder / "catalogue.json").write_text(json.dumps(catalogue))
    if tensors:
        save_file(tensors, folder / "catalogue.safetensors")
    about = {"format_version": 1, "task": recipe.task, "method": recipe.moe.name, "recipe": recipe_to_dict(recipe)}
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    about |= {"dtype": "float32", "precomposed": False, "files": files}
    (folder / "artifact.json").write_text(json.dumps(about))
    return folder


@pytest.fixture
def language(tmp_path):
    return write_artifact(tmp_path / "language", load_recipe("stdlib"), {"tokenizer": None, "end_of_text": 256}, {})


def test_the_command_continues_a_prompt(language, capsys):
    cli.main(["generate", str(language), "--prompt", "def ", "--max-tokens", "7", "--temperature", "2", "--seed", "3"])
    first = capsys.readouterr().out
    assert first.endswith("\n")
    assert 1 < len(first) <= 8
    cli.main(["generate", str(language), "--prompt", "def ", "--max-tokens", "7", "--temperature", "2", "--seed", "3"])
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "x" * 129], "prompt"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens=0"),
        (["--prompt", "x", "--temperature", "-1"], "temperature=-1"),
        (["--prompt", "x", "--device", "foo"], "device='foo' is not a device: use cpu, cuda or"),
        (["--prompt", "x", "--device", "cuda:99"], "device='cuda:99' does not exist"),
    ],
)
def test_the_command_says_what_is_wrong(language, options, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(["generate", str(language), *options])
    assert message in caught.value.code


def test_the_command_wants_a_language_model(tmp_path):
    with pytest.raises(SystemExit, match="not an artifact"):
        cli.main(["generate", str(tmp_path), "--prompt", "x"])
    about, tensors = travel_catalogue()
    folder = write_artifact(tmp_path / "travel", load_recipe("journeys"), about, tensors)
    with pytest.raises(SystemExit, match="'travel'"):
        cli.main(["generate", str(folder), "--prompt", "x"])
