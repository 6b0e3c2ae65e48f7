"""Reading: examples from tokens, incomplete folders, and the standard library."""

import json
import pickle
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_text import write_wikipedia
from hypothesis import given
from hypothesis import strategies as st

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.language import packed, stdlib, wikipedia
from intbmoe.tasks.language.packed import TokenExamples, token_type


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    source, target = write_wikipedia(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("packed")
    wikipedia.prepare(source, target, skip_bad=False, progress=lambda stage, done, total: None)
    return target


@given(tokens=st.integers(0, 60), length=st.integers(1, 12))
def test_every_token_but_the_first_is_a_target_once_up_to_the_last_whole_piece(tokens, length):
    stream = np.arange(tokens, dtype=np.uint16) + 3
    examples = TokenExamples(stream, length)
    assert len(examples) == max(0, (tokens - 1) // length)
    if len(examples):
        batch = examples.batch(range(len(examples)), epoch=3, seed=4)
        used = len(examples) * length
        assert batch["ids"].flatten().tolist() == stream[:used].tolist()
        assert batch["targets"].flatten().tolist() == stream[1 : used + 1].tolist()
        assert batch["ids"].dtype == batch["targets"].dtype == torch.int64
    with pytest.raises(IndexError, match="no example"):
        examples.batch([len(examples)], 0, 0)


def test_an_example_does_not_depend_on_the_batch_the_epoch_or_the_seed():
    examples = TokenExamples(np.arange(100, dtype=np.uint16), 9)
    whole = examples.batch(range(11), 0, 0)
    for row in range(11):
        alone = examples.batch([row], 5, 6)
        assert torch.equal(alone["ids"][0], whole["ids"][row])
        assert torch.equal(alone["targets"][0], whole["targets"][row])


@pytest.mark.parametrize(("vocabulary", "name"), [(2**16, "uint16"), (2**16 + 1, "uint32"), (257, "uint16")])
def test_the_type_is_as_small_as_the_vocabulary_allows(vocabulary, name):
    kind = token_type(vocabulary)
    assert kind.name == name
    assert kind.newbyteorder("<") == kind, "little-endian on every machine"
    assert np.iinfo(kind).max >= vocabulary - 1


def test_files_are_mapped_and_travel_to_other_processes_by_name(folder):
    source = packed.read(str(folder), "wikipedia")
    assert isinstance(source.splits["train"], np.memmap)
    examples = TokenExamples(source.splits["train"], 64)
    sent = pickle.dumps(examples)
    assert len(sent) < 1000
    again = pickle.loads(sent)
    everything = range(len(examples))
    assert torch.equal(again.batch(everything, 0, 0)["ids"], examples.batch(everything, 0, 0)["ids"])
    small = pickle.loads(pickle.dumps(TokenExamples(np.arange(9), 4)))
    assert len(small) == 2


def test_large_vocabularies_are_read_as_four_bytes(folder, tmp_path):
    meta = json.loads((folder / "meta.json").read_text()) | {"vocabulary": 70_000}
    for split in packed.SPLITS:
        content = np.array([69_999, 0, 3], dtype="<u4").tobytes() if split != "test" else b""
        (tmp_path / packed.tokens_name(split)).write_bytes(content)
        meta["splits"][split]["bytes"] = len(content)
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    source = packed.read(str(tmp_path), "wikipedia")
    assert source.splits["train"].tolist() == [69_999, 0, 3]
    assert len(source.splits["test"]) == 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: (root / "meta.json").unlink(), "has no meta.json.*interrupted; intbmoe prepare wikipedia SOURCE"),
        (lambda root: (root / "meta.json").write_text("{"), "meta.json is not what a preparation writes"),
        (lambda root: (root / "meta.json").write_text("{}"), "meta.json is not what a preparation writes"),
        (lambda root: change(root, version=0), "has version 0, but this program reads version 1: remove"),
        (lambda root: change(root, name="minipile"), "holds minipile, not wikipedia: set data.source=minipile"),
        (lambda root: (root / "tokens-test.bin").write_bytes(b"12"), "tokens-test.bin has 2 bytes, meta.json says"),
        (lambda root: (root / "tokens-train.bin").unlink(), "tokens-train.bin is missing, meta.json says"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_with_what_to_do(folder, tmp_path, spoil, message):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    spoil(tmp_path)
    with pytest.raises(DataError, match=message):
        packed.read(str(tmp_path), "wikipedia")


def change(root, **values):
    meta = json.loads((root / "meta.json").read_text())
    (root / "meta.json").write_text(json.dumps({**meta, **values}))


def test_a_path_is_needed(tmp_path):
    with pytest.raises(DataError, match=r"minipile needs the folder that intbmoe prepare minipile.*--data.path"):
        packed.read(None, "minipile")
    with pytest.raises(DataError, match=r"none does not exist: data.path must be .*intbmoe prepare minipile"):
        packed.read(str(tmp_path / "none"), "minipile")


# The standard library.


def library(root):
    """A few files, some of which are not read."""
    names = [f"module{number}.py" for number in range(200)] + ["email/parser.py", "json/__init__.py"]
    left_out = ["test/test_x.py", "idlelib/a.py", "site-packages/torch/a.py", "lib2to3/tests/b.py", "notes.txt"]
    left_out += ["_sysconfigdata__linux.py", "json/__pycache__/c.py", "dist-packages/d.py", "encodings/cp850.py"]
    for name in names + left_out:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n" * (1 + len(name) % 7))
    return sorted(names)


def test_files_are_found_in_order_without_tests_and_packages(tmp_path):
    names = library(tmp_path)
    assert stdlib.choose_files(tmp_path, None) == names
    sizes = {name: (tmp_path / name).stat().st_size for name in names}
    few = stdlib.choose_files(tmp_path, 3000)
    assert few == sorted(few)
    assert 2500 < sum(sizes[name] for name in few) <= 3000
    assert {name[0] for name in few} == {name[0] for name in names} or len(few) > 20


def test_a_file_is_in_one_split_by_its_path_alone(tmp_path, monkeypatch):
    names = library(tmp_path)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    source = stdlib.read(None, None)
    assert source.vocabulary == 257
    found = {}
    for split, tokens in source.splits.items():
        files = np.split(tokens, np.flatnonzero(tokens == stdlib.END_OF_TEXT) + 1)[:-1]
        for ids in files:
            text = ids[:-1].astype(np.uint8).tobytes().decode()
            found[text.split("\n")[0].removeprefix("# ")] = split
            assert ids[-1] == stdlib.END_OF_TEXT
    assert sorted(found) == names
    assert found == {name: stdlib.split_of(name) for name in names}
    # The same on every machine and in every version, because measured figures depend on them.
    assert [stdlib.split_of(name) for name in ("os.py", "ast.py", "json/decoder.py")] == SPLITS_OF_KNOWN_FILES


SPLITS_OF_KNOWN_FILES = ["test", "train", "train"]


def test_shares_of_the_splits():
    splits = [stdlib.split_of(f"package{number}/module.py") for number in range(4000)]
    assert splits.count("test") / 4000 == pytest.approx(0.10, abs=0.02)
    assert splits.count("valid") / 4000 == pytest.approx(0.05, abs=0.015)


def test_the_real_library_fills_every_split():
    source = stdlib.read(None, 1_200_000)
    sizes = {split: len(tokens) for split, tokens in source.splits.items()}
    assert 1_000_000 < sum(sizes.values()) < 1_250_000
    assert all(size > 20_000 for size in sizes.values())
    root = Path(sysconfig.get_paths()["stdlib"])
    assert not any(name.startswith("test/") for name in stdlib.choose_files(root, None))


def test_without_the_librarys_text_there_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match=r"too few .py files: expected Python's standard library as source text$"):
        stdlib.read(None, None)
    library(tmp_path)
    with pytest.raises(DataError, match=r"data.max_bytes=10 may be too few"):
        stdlib.read(None, 10)
    with pytest.raises(DataError, match=r"data.path='x': the standard library comes with Python and needs no path"):
        stdlib.read("x", None)
