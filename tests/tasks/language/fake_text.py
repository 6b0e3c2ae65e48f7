"""Small corpora in the forms that the preparations read."""

import json
import lzma
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from intbmoe.tasks.language.tokenizer import END_OF_TEXT, train_bpe

WORDS = [
    "the",
    "river",
    "of",
    "a",
    "small",
    "town",
    "where",
    "people",
    "sell",
    "fish,",
    "ink",
    "&",
    "paper:",
    "\t",
    "x",
]
WORDS += ["über-naïve", "東京", "☂", "12", "1,024", "=", "f(y)"]


def document(number):
    """A text that contains its number; sometimes empty, long, or with the end-of-text token in it."""
    if number % 17 == 5:
        return ""
    words = [WORDS[(number * 7 + place * place) % len(WORDS)] for place in range(3 + number * 13 % 60)]
    return f"document {number}\n{' '.join(words)}" + (f" {END_OF_TEXT}\n" if number % 19 == 4 else "")


def plain_document(number):
    """A document for files in which end-of-text tokens separate documents."""
    return document(number).replace(END_OF_TEXT, "the end") or f"document {number}"


WIKIPEDIA = {"wiki_train_a": (0, 60), "wiki_train_b": (60, 110), "wiki_valid": (110, 125), "wiki_test": (125, 140)}


def write_wikipedia(root: Path, optional=True):
    """The four xz files and a tokenizer."""
    root.mkdir(parents=True, exist_ok=True)
    for name, (first, end) in WIKIPEDIA.items():
        if optional or name != "wiki_train_b":
            write_xz(root / f"{name}.txt.xz", [plain_document(number) for number in range(first, end)])
    (root / "bpe16k_tokenizer.json").write_text(train_bpe(map(document, range(100)), 400), encoding="utf-8")
    return root


def write_xz(path, documents):
    path.write_bytes(lzma.compress("".join(f"{text}{END_OF_TEXT}\n" for text in documents).encode()))


MINIPILE = {
    "train-00000-of-00002-abc": (0, 60),
    "train-00001-of-00002-def": (60, 110),
    "validation-00000-of-00001": (110, 125),
    "test-00000-of-00001": (125, 140),
}


def write_minipile(root: Path):
    """Parquet files with several row groups each."""
    (root / "data").mkdir(parents=True, exist_ok=True)
    for name, (first, end) in MINIPILE.items():
        write_parquet(root / "data" / f"{name}.parquet", [document(number) for number in range(first, end)])
    return root


def write_parquet(path, texts, column="text"):
    pq.write_table(pa.table({column: pa.array(texts), "other": list(range(len(texts)))}), path, row_group_size=16)


def files_of(folder):
    """Name → bytes of all files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def texts_of(folder, split):
    """The documents of a packed split, decoded."""
    meta = json.loads((folder / "meta.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = np.fromfile(folder / f"tokens-{split}.bin", dtype=meta["dtype"])
    ends = np.flatnonzero(tokens == meta["end_of_text"])
    assert ends[-1] == len(tokens) - 1, "every document is ended"
    pieces = np.split(tokens, ends + 1)[:-1]
    return [tokenizer.decode(piece[:-1].tolist(), skip_special_tokens=False) for piece in pieces]
