"""MiniPile (Kaddour, 2023) from Hugging Face's parquet files, with a byte-level BPE of 32,000 tokens trained on it.

    data/train-*.parquet, data/validation-*.parquet, data/test-*.parquet      a column ``text``, one document per row

The tokenizer is trained on every tenth document of the training split, about 600 MB of text.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.language.packing import Corpus, Malformed, Part, Report, pack, usable
from intbmoe.tasks.language.tokenizer import train_bpe
from intbmoe.tasks.parquet import find_parquet, open_parquet, read_batches
from intbmoe.tasks.workers import ALONE, Progress, Workers

NAME = "minipile"
FILES = {"train": "train", "valid": "validation", "test": "test"}
COLUMN = "text"
VOCABULARY = 32_000
TRAIN_EVERY = 10
READ_ROWS = 256
BUFFER_BYTES = 2**20


def prepare(
    source: Path, target: Path, *, skip_bad: bool, progress: Progress, workers: Workers = ALONE
) -> Mapping[str, Any]:
    parts = [Part(split, file) for split, name in FILES.items() for file in find_parquet(source, name)]

    def make_tokenizer(skip_bad: bool, progress: Progress) -> str:
        train = [part.file for part in parts if part.split == "train"]
        return train_bpe(_sample(train, skip_bad, progress), VOCABULARY)

    corpus = Corpus(NAME, parts, read_documents, make_tokenizer)
    return pack(corpus, target, skip_bad=skip_bad, progress=progress, workers=workers)


def _sample(files: list[Path], skip_bad: bool, progress: Progress) -> Iterator[str]:
    stage = f"tokenizer of {VOCABULARY:,}: files read"
    for index, file in enumerate(files):
        progress(stage, index, len(files))
        documents = read_documents(file, lambda done, total: None, every=TRAIN_EVERY)
        yield from usable(documents, skip_bad)
    progress(stage, len(files), len(files))


def read_documents(file: Path, report: Report, every: int = 1, column: str = COLUMN) -> Iterator[str | Malformed]:
    """Yield the rows of a parquet file, one at a time; with ``every``, only the first of that many rows."""
    opened = _open(file, column)
    row, total = 0, opened.metadata.num_rows
    for batch in read_batches(opened, file, [column], READ_ROWS):
        for value in batch.column(0):
            if row % every == 0:
                yield _text(value, file, row, column)
            row += 1
        report(row, total)
    report(total, total)


def _open(file: Path, column: str) -> Any:
    # Without these options a whole row group, which may be the whole file, would be in memory.
    opened = open_parquet(file, [column], "text", buffer_size=BUFFER_BYTES, pre_buffer=False)
    from pyarrow import types

    kind = opened.schema_arrow.field(column).type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise DataError(f"{file}: the column {column!r} holds {kind}, expected text")
    return opened


def _text(value: Any, file: Path, row: int, column: str) -> str | Malformed:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        return Malformed(f"{file}, row {row}: {column!r} is not UTF-8 ({error.reason} at byte {error.start} of it)")
    return Malformed(f"{file}, row {row}: {column!r} is null, expected text") if text is None else text
