"""Any text files: where documents go, which tokenizer, what is kept, and the mistakes people make."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer

from intbmoe.recipes import load_recipe
from intbmoe.tasks import DataError, make_task
from intbmoe.tasks.language import own_text
from intbmoe.tasks.language.files import FEW
from intbmoe.tasks.language.own_text import pieces
from intbmoe.tasks.language.tokenizer import train_bpe

WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "an",
    "old",
    "dog",
    "run",
    "by",
    "the",
    "sea",
    "in",
    "spring",
)


def document(number, words=60):
    chosen = np.random.default_rng(number).choice(WORDS, words)
    return f"{number}: {' '.join(chosen)}\n"


DOCUMENTS = [document(number) for number in range(40)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("INTBMOE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "text"


def task_of(path, vocabulary=None, length=16, **data):
    recipe = load_recipe("text")
    model = replace(recipe.model, vocabulary=vocabulary, dim=8, heads=2, hidden=8, depth=1)
    data = {"length": length, "tokenizer": "bytes", "valid_fraction": 0.1, "test_fraction": 0.2, **data}
    return make_task(replace(recipe, model=model, data=replace(recipe.data, path=path and str(path), **data)))


def documents_of(task, split):
    """The documents of a split, decoded from its bytes."""
    tokens = task._source.splits[split]
    ends = np.flatnonzero(tokens == 256)
    parts = np.split(tokens, ends + 1)
    assert len(parts[-1]) == 0
    return [bytes(part[:-1].astype(np.uint8)).decode() for part in parts[:-1]]


def write_jsonl(file, documents=DOCUMENTS, field="text"):
    file.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in documents), encoding="utf-8")
    return file


def write_parquet(file, documents=DOCUMENTS, column="text"):
    pa.parquet.write_table(pa.table({"id": list(range(len(documents))), column: documents}), file)
    return file


def write_folder(folder, documents=DOCUMENTS):
    for number, text in enumerate(documents):
        (folder / f"part{number % 3}").mkdir(parents=True, exist_ok=True)
        (folder / f"part{number % 3}" / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("write", [write_jsonl, write_parquet, write_folder])
def test_whole_documents_are_held_out(tmp_path, write):
    name = {write_jsonl: "a.jsonl", write_parquet: "a.parquet", write_folder: "texts"}[write]
    task = task_of(write(tmp_path / name))
    recipe = task.resolve()
    assert recipe.model.vocabulary == 257
    found = {split: documents_of(task, split) for split in ("train", "valid", "test")}
    assert {split: len(texts) for split, texts in found.items()} == {"train": 28, "valid": 4, "test": 8}
    assert sorted(text for texts in found.values() for text in texts) == sorted(DOCUMENTS)
    other = task_of(tmp_path / name, split_seed=1)
    assert set(documents_of(other, "test")) != set(found["test"])


@pytest.mark.parametrize("count", [1, FEW - 1])
def test_of_few_documents_the_ends_are_held_out(tmp_path, count):
    texts = ["".join(DOCUMENTS[number:]) for number in range(count)]
    task = task_of(write_folder(tmp_path / "texts", texts))
    found = [documents_of(task, split) for split in ("train", "valid", "test")]
    assert sorted(map("".join, zip(*found, strict=True))) == sorted(texts)
    assert all(text.endswith("\n") for texts in found for text in texts)
    sizes = np.array([sum(map(len, texts)) for texts in found])
    assert sizes / sizes.sum() == pytest.approx([0.7, 0.1, 0.2], abs=0.05)


def test_files_named_after_splits_are_those(tmp_path):
    for name, part in {"train-00": DOCUMENTS[:9], "train-01": DOCUMENTS[9:20], "test": DOCUMENTS[35:]}.items():
        write_jsonl(tmp_path / f"{name}.jsonl", part)
    (tmp_path / "val").mkdir()
    write_parquet(tmp_path / "val" / "a.parquet", DOCUMENTS[20:35])
    task = task_of(tmp_path)
    assert documents_of(task, "train") == DOCUMENTS[:20]
    assert documents_of(task, "valid") == DOCUMENTS[20:35]
    assert documents_of(task, "test") == DOCUMENTS[35:]
    (tmp_path / "test.jsonl").unlink()
    task = task_of(tmp_path)  # the only other part is the test split
    assert documents_of(task, "test") == DOCUMENTS[20:35]
    assert len(documents_of(task, "valid")) == 2
    assert len(documents_of(task, "train")) == 18


def test_a_trained_tokenizer_saw_the_training_text_alone(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", DOCUMENTS[:30])
    write_jsonl(tmp_path / "valid.jsonl", ["xylophone " * 90])
    write_jsonl(tmp_path / "test.jsonl", ["zzyzx " * 90])
    task = task_of(tmp_path, tokenizer="bpe", tokenizer_size=300)
    assert task.resolve().model.vocabulary == 300
    catalogue = task.catalogue()
    assert catalogue.about == {"tokenizer": "tokenizer.json", "end_of_text": 0}
    tokenizer = Tokenizer.from_str(catalogue.files["tokenizer.json"].decode())
    assert len(tokenizer.encode("the cat").ids) < 4
    assert len(tokenizer.encode("xylophone").ids) == 9
    tokens = task._source.splits["train"]
    first = tokens[: np.flatnonzero(tokens == 0)[0]].tolist()
    assert tokenizer.decode(first) == DOCUMENTS[0]


def test_a_small_text_gives_fewer_tokens_than_asked_for(tmp_path):
    recipe = task_of(write_jsonl(tmp_path / "a.jsonl"), tokenizer="bpe", tokenizer_size=50_000).resolve()
    assert 257 < recipe.model.vocabulary < 1000


def test_a_given_tokenizer_with_an_end_of_its_own(tmp_path):
    content = train_bpe(DOCUMENTS, 300).replace("<|endoftext|>", "</s>")
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    file = write_jsonl(tmp_path / "a.jsonl")
    task = task_of(file, tokenizer=str(tmp_path / "tokenizer.json"))
    assert task.resolve().model.vocabulary == 300
    assert task.catalogue().about["end_of_text"] == 0
    assert (task._source.splits["train"] == 0).sum() == 28
    (tmp_path / "tokenizer.json").write_text(content.replace("</s>", "<fin>"), encoding="utf-8")
    with pytest.raises(DataError, match=r"json has no token '<\|endoftext\|>' or .*name yours: data\.end_of_text"):
        task_of(file, tokenizer=str(tmp_path / "tokenizer.json")).resolve()
    named = task_of(file, tokenizer=str(tmp_path / "tokenizer.json"), end_of_text="<fin>")
    assert named.resolve().model.vocabulary == 300


def test_the_prompt_of_a_request_is_read_with_the_same_tokenizer(tmp_path):
    for tokenizer in ("bytes", "bpe"):
        task = task_of(write_jsonl(tmp_path / "a.jsonl"), tokenizer=tokenizer, tokenizer_size=300)
        task.resolve()
        found = task.catalogue()
        for name, content in found.files.items():
            (tmp_path / name).write_bytes(content)
        artifact = SimpleNamespace(recipe=task.recipe, catalogue=found.about, file=lambda name: tmp_path / name)
        predictor = task.find_predictor().encoder(artifact)
        split = task.split("valid")
        for index, request in enumerate(task.golden_requests(predictor, len(split))):
            ids = predictor.encode(request).payload["ids"].tolist()
            assert ids == split.batch([index], 0, 0)["ids"][0, : len(ids)].tolist()
        assert len(task.views()) == 2
        assert task.shown(split).describe(split.batch([0], 0, 0), 0, 0).tokens


def test_tokens_are_made_once_and_again_when_they_are_damaged(tmp_path, cache, monkeypatch):
    file = write_jsonl(tmp_path / "a.jsonl")
    recipe = task_of(file).resolve()
    made = []
    make = own_text._make
    monkeypatch.setattr(own_text, "_make", lambda *given: (made.append(1), make(*given)))
    assert task_of(file).resolve() == recipe
    assert make_task(recipe).resolve() == recipe
    assert not made
    [tokens] = cache.glob("*/tokens-train.bin")
    tokens.write_bytes(b"")
    assert make_task(recipe).resolve() == recipe
    assert len(made) == 1


def test_changed_text_is_another_fingerprint_and_is_refused(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl")
    recipe = task_of(file).resolve()
    moved = file.rename(tmp_path / "b.jsonl")
    assert task_of(moved).resolve().data.fingerprint == recipe.data.fingerprint
    write_jsonl(file, [*DOCUMENTS[:-1], DOCUMENTS[-1].replace("a", "o")])  # of the same size
    with pytest.raises(DataError, match=r"a\.jsonl is not what this run was trained on"):
        make_task(recipe).split("valid")


def test_a_long_text_is_encoded_in_pieces():
    text = "".join(f"line {number}\n" for number in range(300_000))
    parts = list(pieces(text))
    assert "".join(parts) == text
    assert len(parts) > 3
    assert all(part.endswith("\n") and len(part) <= 2**20 for part in parts)
    assert list(pieces("x" * (2**20 + 1))) == ["x" * 2**20, "x"]


def write_lines(file, *lines):
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


TEXT = json.dumps({"text": DOCUMENTS[0]})


@pytest.mark.parametrize(
    ("name", "make", "data", "message"),
    [
        ("a.txt", lambda file: None, {}, r"a\.txt does not exist: data\.path must be a \.txt, \.jsonl or"),
        ("a.pdf", lambda file: file.write_text("x"), {}, r"a\.pdf ends in '\.pdf': data\.path must be a \.txt"),
        ("a", lambda file: file.write_text("x"), {}, r"a has no suffix: data\.path must be a \.txt"),
        ("a", lambda file: file.mkdir(), {}, r"a has no text, nothing: expected files ending in \.txt, \.jsonl"),
        ("a", lambda file: (file.mkdir(), (file / "b.doc").touch()), {}, r"a has no text, only b\.doc"),
        ("a.txt", lambda file: file.write_text(" \n"), {}, r"a\.txt holds no text: all documents are empty"),
        ("a.txt", lambda file: file.write_bytes(b"caf\xe9 " * 9), {}, r"a\.txt is not UTF-8 \(.* at byte 3\): convert"),
        ("a.jsonl", lambda file: write_lines(file, TEXT, "{"), {}, r"a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", lambda file: write_lines(file, "[1]"), {}, r"a\.jsonl, line 1: 'text' is list, expected text"),
        ("a.jsonl", lambda file: write_lines(file, '{"text": null}'), {}, r"line 1: 'text' is NoneType, expected text"),
        ("a.jsonl", write_jsonl, {"column": "txt"}, r"line 1 has no field 'txt', only id, text: .*did you mean 'text'"),
        ("a.parquet", write_parquet, {"column": "body"}, r"has no column 'body', only id, text: .*--data\.column NAME"),
        ("a.parquet", write_parquet, {"column": "id"}, r"the column 'id' holds int64, expected text"),
        ("a.parquet", lambda file: file.write_bytes(b"no"), {}, r"a\.parquet cannot be read as parquet"),
        ("a.jsonl", write_jsonl, {"length": 2000}, r"the valid split has \d+ tokens, an example takes 2001: lower"),
        ("a.jsonl", write_jsonl, {"tokenizer": "none.json"}, r"'none\.json' is not a file: expected 'bpe', 'bytes', a"),
        ("a.jsonl", write_jsonl, {"tokenizer": __file__}, r"test_own_text\.py is not a tokenizer of Hugging Face"),
        ("a.jsonl", write_jsonl, {"tokenizer": "bpe", "tokenizer_size": 99}, r"byte-level BPE has 257 tokens or more"),
        ("a.jsonl", write_jsonl, {"vocabulary": 99}, r"a\.jsonl gives model\.vocabulary=257, not 99: set it to"),
    ],
)  # fmt: skip
def test_mistakes_are_named(tmp_path, name, make, data, message):
    make(tmp_path / name)
    with pytest.raises(DataError, match=message):
        task_of(tmp_path / name, **data).resolve()


def test_more_mistakes(tmp_path):
    with pytest.raises(DataError, match=r"text needs a \.txt.*: set data\.path"):
        task_of(None).resolve()
    write_jsonl(tmp_path / "train.jsonl")
    (tmp_path / "notes.txt").write_text("read me")
    with pytest.raises(DataError, match=r"has files for train, but notes\.txt belong to no split"):
        task_of(tmp_path).resolve()
    with pytest.raises(ValueError, match=r"model\.vocabulary comes from the data"):
        task_of(tmp_path / "train.jsonl").make_model()
    with pytest.raises(ValueError, match="column='body' is not allowed: only source='files' reads column"):
        replace(load_recipe("stdlib").data, column="body")
