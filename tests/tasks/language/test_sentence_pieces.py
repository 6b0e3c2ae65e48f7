"""sentencepiece tokenizers: the ids are the same as its own, and later commands need only ``tokenizer.json``."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from intbmoe.recipes import load_recipe
from intbmoe.tasks import make_task
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.language.sentence_pieces import convert
from intbmoe.tasks.language.vocabulary import BytePairs

WORDS = ["a", "the", "cat", "sat", "on", "Größe", "naïve", "def", "x=1", "ﬁne", "東京", "½", "don't", "", "</s0xAunk>"]
LINES = [" ".join(np.random.default_rng(n).choice(WORDS, 30)) for n in range(60)]
UNSEEN = [
    "",
    " ",
    "the  cat ",
    "zebra £ 🦓 quick",
    "</s> <0x0A> <unk>",
    "tab\tand\nline",
    "▁the▁cat",
    "def  f(x):\n    return",
]
KINDS = {
    "unigram": {"model_type": "unigram", "vocab_size": 120, "hard_vocab_limit": False},
    "bpe": {"model_type": "bpe", "vocab_size": 100},
    "bytes": {"model_type": "bpe", "vocab_size": 340, "byte_fallback": True, "split_digits": True},
    "unigram-bytes": {"model_type": "unigram", "vocab_size": 340, "byte_fallback": True, "hard_vocab_limit": False},
    # as Llama's: nothing normalised, pieces of white space
    "spaces": {
        "model_type": "bpe",
        "vocab_size": 340,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    folder = tmp_path_factory.mktemp("pieces")
    for name, options in KINDS.items():
        lines = iter([*LINES, *(f"    {line}  {line}" for line in LINES)])
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_prefix=str(folder / name), minloglevel=2, **options
        )
    return {
        name: (folder / f"{name}.model", sentencepiece.SentencePieceProcessor(str(folder / f"{name}.model")))
        for name in KINDS
    }


@pytest.mark.parametrize("name", KINDS)
def test_ids_are_those_of_sentencepiece(models, name):
    file, original = models[name]
    content = convert(file, LINES)
    tokenizer = BytePairs(content, original.eos_id())
    for text in [*LINES, *UNSEEN]:
        assert tokenizer.encode(text) == original.encode(text), text
    assert Tokenizer.from_str(content).token_to_id("</s>") == original.eos_id()
    decoder = tokenizer.new_decoder()
    ids = tokenizer.encode(LINES[0])
    assert "".join([*map(decoder.add, ids), decoder.end()]).strip() == original.decode(ids).strip()


def test_text_that_would_become_other_ids_is_refused(models, monkeypatch):
    file, original = models["bpe"]
    monkeypatch.setattr(type(original), "encode", lambda self, text: [7] if "cat" in text else self.EncodeAsIds(text))
    with pytest.raises(DataError, match=r"bpe\.model cannot be read exactly: .* differ in 'the cat'"):
        convert(file, ["a mat\nthe cat"])


def test_a_text_is_read_with_it(models, tmp_path, monkeypatch):
    monkeypatch.setenv("INTBMOE_CACHE", str(tmp_path / "cache"))
    file, original = models["unigram"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    recipe = load_recipe("text")
    data = replace(recipe.data, path=str(tmp_path / "a.jsonl"), tokenizer=str(file), length=16)
    task = make_task(replace(recipe, data=data))
    assert task.resolve().model.vocabulary == original.vocab_size()
    assert task.catalogue().about["end_of_text"] == original.eos_id()
    tokens = task._source.splits["train"]
    first = tokens[: np.flatnonzero(tokens == original.eos_id())[0]].tolist()
    assert first in [original.encode(line) for line in LINES]


def test_without_sentencepiece_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "llama.model").write_bytes(b"\n\x0e")
    with pytest.raises(ModuleNotFoundError, match=r"llama\.model is a sentencepiece model: pip install sentencepiece"):
        convert(tmp_path / "llama.model", [])


def test_a_damaged_file_is_named(tmp_path):
    pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    (tmp_path / "llama.model").write_bytes(b"\n\x0e")
    with pytest.raises(DataError, match=r"llama\.model is not a sentencepiece model"):
        convert(tmp_path / "llama.model", [])
