"""``intbmoe prepare minipile`` and ``wikipedia``: what they write, what they refuse, and that they survive kills."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest
from fake_text import (
    MINIPILE,
    WIKIPEDIA,
    document,
    files_of,
    plain_document,
    texts_of,
    write_minipile,
    write_parquet,
    write_wikipedia,
    write_xz,
)

from intbmoe.tasks import list_preparations
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.language import minipile, packing, tokenizer, wikipedia

WRITE = {"minipile": write_minipile, "wikipedia": write_wikipedia}
FILES = {"minipile": MINIPILE, "wikipedia": WIKIPEDIA}
TEXT = {"minipile": document, "wikipedia": plain_document}
NAMES = sorted(WRITE)


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    """Give a small file as many batches, blocks and moments for a kill as a large one has."""
    monkeypatch.setattr(tokenizer, "BATCH_DOCUMENTS", 8)
    monkeypatch.setattr(minipile, "READ_ROWS", 8)
    monkeypatch.setattr(wikipedia, "READ_BYTES", 700)
    monkeypatch.setattr(packing, "COPIED_BYTES", 1000)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return {name: WRITE[name](tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.fixture(scope="module")
def whole(sources, tmp_path_factory):
    """The results of uninterrupted preparations: name → (folder, its files)."""
    made = {}
    for name in NAMES:
        folder = tmp_path_factory.mktemp(f"{name}-packed")
        prepare(name, sources[name], folder)
        made[name] = (folder, files_of(folder))
    return made


def silent(stage, done, total):
    pass


def prepare(name, source, target, skip_bad=False, progress=silent):
    return list_preparations()[name].run(source, target, skip_bad=skip_bad, progress=progress)


@pytest.mark.parametrize("name", NAMES)
def test_every_document_comes_back_in_order_and_in_its_split(name, whole):
    folder, files = whole[name]
    ranges = list(FILES[name].values())
    expected = {"train": (ranges[0][0], ranges[1][1]), "valid": ranges[2], "test": ranges[3]}
    for split, (first, end) in expected.items():
        assert texts_of(folder, split) == [TEXT[name](number) for number in range(first, end)]
    meta = json.loads(files["meta.json"])
    assert set(files) == {"meta.json", "tokenizer.json", *(f"tokens-{split}.bin" for split in expected)}
    for split, (first, end) in expected.items():
        content, said = files[f"tokens-{split}.bin"], meta["splits"][split]
        assert said == {
            "documents": end - first,
            "tokens": len(content) // 2,
            "skipped": 0,
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    assert meta["dtype"] == "uint16"
    assert np.frombuffer(files["tokens-train.bin"], "<u2").max() < meta["vocabulary"]


@pytest.mark.parametrize("name", NAMES)
def test_a_second_call_counts_the_same_and_touches_nothing(name, sources, whole, monkeypatch):
    folder, files = whole[name]
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    monkeypatch.setattr(packing, "Encoder", None)  # would raise if anything were encoded
    counted = prepare(name, sources[name], folder)
    assert counted["train documents"] == 110
    assert counted["train tokens"] == len(files["tokens-train.bin"]) // 2
    assert counted["skipped"] == 0
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def killed_at(name, source, target, moment):
    """Run a preparation in a process that kills itself at its n-th progress report; True if it finished before that."""
    child = os.fork()
    if child == 0:
        calls = 0

        def count(stage, done, total):
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            prepare(name, source, target, progress=count)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFEXITED(status)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_killed_in_the_middle_of_every_file_it_ends_with_the_same_bytes(name, sources, whole, tmp_path):
    kills = 0
    finished = {}
    # A later start may get further, because finished parts are not done again.
    for moment in (1, 2, 4, 3, 6, 2, 5, 3, 7, 4, 9, 6, 12, 8, 16, 10, 20, 40, 10**6):
        if killed_at(name, sources[name], tmp_path, moment):
            break
        kills += 1
        now = {path: path.stat().st_ino for path in (tmp_path / "unfinished").glob("*.json")}
        assert finished.items() <= now.items(), "a finished part was made again"
        finished = now
        with pytest.raises(DataError, match=rf"has no meta.json.*intbmoe prepare {name} SOURCE {tmp_path}"):
            packing.read_meta(tmp_path, name)
    assert kills >= 4
    assert files_of(tmp_path) == whole[name][1]


class _Stop(BaseException):
    """Like Ctrl-C, at a chosen moment."""


@pytest.mark.parametrize("name", NAMES)
def test_stopped_before_or_after_any_rename_it_ends_with_the_same_bytes(name, sources, whole, tmp_path, monkeypatch):
    """Files come into being by a rename, so these are the moments at which the folder's state changes."""
    replace, stops = os.replace, 0
    for moment in range(100):
        target, calls = tmp_path / str(moment), iter(range(1000))

        def stopping(old, new, calls=calls, moment=moment):
            call = next(calls)
            if call != moment // 2 or moment % 2:
                replace(old, new)
            if call == moment // 2:
                raise _Stop

        monkeypatch.setattr(os, "replace", stopping)
        try:
            prepare(name, sources[name], target)
            break
        except _Stop:
            stops += 1
        monkeypatch.setattr(os, "replace", replace)
        prepare(name, sources[name], target)
        assert files_of(target) == whole[name][1], moment
    assert stops == 2 * (2 + 2 * len(FILES[name]) + 3 + 2), "plan, tokenizer, parts, joined splits, tokenizer, meta"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_command_killed_at_random_moments_ends_with_the_same_bytes(name, sources, whole, tmp_path):
    target = tmp_path / "packed"
    command = [sys.executable, "-m", "intbmoe.cli", "prepare", name, str(sources[name]), str(target)]
    random = np.random.default_rng(0)
    for _ in range(6):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        process.stderr.readline()  # it has started to work, or there is nothing left to do
        time.sleep(random.uniform(0, 0.05))
        process.kill()
        process.communicate()
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.startswith("vocabulary: ")
    assert files_of(target) == whole[name][1]


@pytest.mark.parametrize("name", NAMES)
def test_only_one_process_at_a_time(name, sources, tmp_path):
    def meddle(stage, done, total):
        with pytest.raises(DataError, match="another process is preparing"):
            prepare(name, sources[name], tmp_path)

    prepare(name, sources[name], tmp_path, progress=meddle)


@pytest.mark.parametrize("name", sorted(list_preparations()))
def test_a_target_that_cannot_be_one_is_refused_before_anything_is_written(name, tmp_path):
    source, file = tmp_path / "source", tmp_path / "file"
    source.mkdir()
    file.write_text("in the way")
    for target, message in [
        (source, "is the source itself"),
        (tmp_path / "source" / ".." / "source", "is the source itself"),
        (file, f"{file} is not a folder"),
        (file / "below", f"{file} is not a folder"),
    ]:
        with pytest.raises(DataError, match=message):
            prepare(name, source, target)
    assert sorted(tmp_path.rglob("*")) == [file, source]


def test_other_files_than_before_are_refused(sources, whole, tmp_path):
    folder, _ = whole["wikipedia"]
    other = write_wikipedia(tmp_path / "other", optional=False)
    with pytest.raises(DataError, match=r"made from other files than these \(wiki_train_b.txt.xz differ\): remove it"):
        prepare("wikipedia", other, folder)
    with pytest.raises(DataError, match="holds wikipedia, not minipile"):
        prepare("minipile", sources["minipile"], folder)
    begun = tmp_path / "begun"
    (begun / "unfinished").mkdir(parents=True)
    plan = {"version": 1, "name": "minipile", "files": {}}
    (begun / "unfinished" / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(DataError, match=r"beginning of another preparation \(minipile, version 1\): remove it"):
        prepare("wikipedia", other, begun)
    with pytest.raises(DataError, match="other files than these"):
        prepare("minipile", sources["minipile"], begun)


def test_the_second_half_of_wikipedia_may_be_missing(tmp_path):
    source = write_wikipedia(tmp_path / "source", optional=False)
    assert prepare("wikipedia", source, tmp_path / "packed")["train documents"] == 60


def test_the_tokenizer_does_not_depend_on_how_many_cores_trained_it(whole, sources, tmp_path):
    code = f"""
from pathlib import Path
from intbmoe.tasks.language.minipile import prepare
prepare(Path({str(sources["minipile"])!r}), Path({str(tmp_path)!r}), skip_bad=False, progress=lambda *_: None)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "RAYON_NUM_THREADS": "4"})
    assert (tmp_path / "tokenizer.json").read_bytes() == whole["minipile"][1]["tokenizer.json"]


def invalid_utf8(count, bad):
    """A column of strings, one of which is not valid UTF-8."""
    content, offsets = b"", [0]
    for row in range(count):
        content += b"\xff\xfe" if row == bad else b"fine"
        offsets.append(len(content))
    buffers = [None, pa.py_buffer(np.array(offsets, dtype=np.int32).tobytes()), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.string(), count, buffers)


VALIDATION = "data/validation-00000-of-00001.parquet"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([*["fine"] * 11, None, "fine"], rf"{VALIDATION}, row 11: 'text' is null, expected text \(--skip-bad"),
        (invalid_utf8(13, 11), rf"{VALIDATION}, row 11: 'text' is not UTF-8 \(invalid start byte at byte 0 of it\)"),
    ],
)
def test_a_bad_row_of_minipile_stops_or_is_counted(texts, message, sources, tmp_path):
    source, target = tmp_path / "source", tmp_path / "packed"
    shutil.copytree(sources["minipile"], source)
    write_parquet(source / VALIDATION, texts)
    with pytest.raises(DataError, match=message):
        prepare("minipile", source, target)
    counted = prepare("minipile", source, target, skip_bad=True)
    assert (counted["skipped"], counted["valid documents"]) == (1, 12)
    assert texts_of(target, "valid") == ["fine"] * 12


def test_a_part_with_rows_left_out_is_not_taken_over_by_a_strict_call(sources, tmp_path):
    source, target = tmp_path / "source", tmp_path / "packed"
    shutil.copytree(sources["minipile"], source)
    write_parquet(source / "data" / "train-00000-of-00002-abc.parquet", ["fine", None] * 20)
    write_parquet(source / "data" / "test-00000-of-00001.parquet", ["fine"], column="txt")
    with pytest.raises(DataError, match="no column 'text'"):
        prepare("minipile", source, target, skip_bad=True)
    assert json.loads((target / "unfinished" / "train-00000.json").read_text())["skipped"] == 20
    with pytest.raises(DataError, match=r"train-00000-of-00002-abc.parquet, row 1: 'text' is null"):
        prepare("minipile", source, target)


def truncate(path, share=0.6):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def damage(path):
    """Overwrite some bytes of the first column's pages, and leave the rest as it was."""
    content = bytearray(path.read_bytes())
    content[40:400] = bytes(360)
    path.write_bytes(content)


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        (
            "minipile",
            lambda root: truncate(root / VALIDATION),
            rf"{VALIDATION} cannot be read as parquet.*get it again",
        ),
        ("minipile", lambda root: damage(root / VALIDATION), rf"{VALIDATION} is truncated or damaged after row \d+"),
        ("minipile", lambda root: (root / VALIDATION).unlink(), r"data has no validation-\*.parquet"),
        (
            "minipile",
            lambda root: write_parquet(root / VALIDATION, ["x"], "txt"),
            "has no column 'text', only txt, other",
        ),
        (
            "minipile",
            lambda root: write_parquet(root / VALIDATION, [1]),
            "the column 'text' holds int64, expected text",
        ),
        (
            "wikipedia",
            lambda root: truncate(root / "wiki_test.txt.xz"),
            "wiki_test.txt.xz is truncated or damaged after",
        ),
        ("wikipedia", lambda root: (root / "wiki_test.txt.xz").write_bytes(b"text"), "truncated or damaged after doc"),
        (
            "wikipedia",
            lambda root: (root / "wiki_valid.txt.xz").unlink(),
            "wiki_valid.txt.xz is missing: expected a fold",
        ),
        ("wikipedia", lambda root: (root / "bpe16k_tokenizer.json").unlink(), "bpe16k_tokenizer.json is missing"),
        (
            "wikipedia",
            lambda root: (root / "bpe16k_tokenizer.json").write_text("{}"),
            "json is not a tokenizer of Hugging",
        ),
    ],
)
def test_a_file_that_is_spoiled_as_a_whole_is_never_skipped(name, spoil, message, skip_bad, sources, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(sources[name], source)
    spoil(source)
    with pytest.raises(DataError, match=message):
        prepare(name, source, tmp_path / "packed", skip_bad=skip_bad)
    assert not (tmp_path / "packed" / "meta.json").exists()


def test_bad_documents_of_wikipedia(sources, tmp_path, monkeypatch):
    import lzma

    source, target = tmp_path / "source", tmp_path / "packed"
    shutil.copytree(sources["wikipedia"], source)
    end = b"<|endoftext|>\n"
    (source / "wiki_test.txt.xz").write_bytes(lzma.compress(b"one" + end + b"t\xffo" + end + b"three, not ended"))
    with pytest.raises(DataError, match=r"wiki_test.txt.xz, document 1 is not UTF-8: invalid start byte at byte 1"):
        prepare("wikipedia", source, target)
    assert prepare("wikipedia", source, target, skip_bad=True)["skipped"] == 1
    assert texts_of(target, "test") == ["one", "three, not ended"]
    monkeypatch.setattr(wikipedia, "LARGEST_DOCUMENT", 5000)
    write_xz(source / "wiki_test.txt.xz", ["x" * 9000])
    with pytest.raises(DataError, match=r"document 0 has more than 5000 bytes: expected documents with '<\|endof"):
        list(wikipedia.read_documents(source / "wiki_test.txt.xz", lambda done, total: None))


def test_a_separator_is_found_wherever_a_block_ends(tmp_path, monkeypatch):
    texts = ["", "a", "<|endoftext|> within a line", "b" * 40, "<", "\n"]
    write_xz(tmp_path / "x.xz", texts)
    for size in range(1, 60):
        monkeypatch.setattr(wikipedia, "READ_BYTES", size)
        assert list(wikipedia.read_documents(tmp_path / "x.xz", lambda done, total: None)) == texts


def test_progress_goes_forward_to_its_end(sources, tmp_path):
    for name in NAMES:
        stages = {}
        prepare(
            name,
            sources[name],
            tmp_path / name,
            progress=lambda *call, to=stages: to.setdefault(call[0], []).append(call[1:]),
        )
        assert len(stages) == (5 if name == "minipile" else 4)
        for calls in stages.values():
            assert [done for done, _ in calls] == sorted(done for done, _ in calls)
            assert calls[-1][0] == calls[-1][1]
