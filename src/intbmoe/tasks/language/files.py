"""Documents in any text files: which files, what is in them, and which split each belongs to.

    .txt       one document
    .jsonl     one document per line: a string, or an object with the text under ``column``
    .parquet   one document per row, in ``column``

Files or folders named train, valid (val, validation, dev) and test are these splits; if there is only one of the last
two, it is the test split. A missing split is held out from the training documents: whole documents if there are ``FEW``
or more, otherwise the end of each. Texts given in Python are written as .jsonl files.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from intbmoe.checks import some
from intbmoe.tasks.base import SPLITS
from intbmoe.tasks.datasets import by_split, entries, field
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.language import minipile
from intbmoe.tasks.language.packing import Malformed
from intbmoe.tasks.own_data import choose_held_out, require_path, split_of, suggestion, wrong_file
from intbmoe.tasks.parquet import open_parquet

WHAT = "a .txt, .jsonl or .parquet file, or a folder of them"
SUFFIXES = (".txt", ".jsonl", ".parquet")
FEW = 20


@dataclass(frozen=True)
class Texts:
    """All documents of the data, in order."""

    root: Path
    files: dict[str, list[Path]]  # by split
    column: str
    shares: dict[str, float]  # of the training documents, for each split without files
    seed: int

    def assigned(self) -> Iterator[tuple[str, str]]:
        """Yield (split, document)."""
        for split, files in self.files.items():
            if split != "train":
                yield from ((split, text) for file in files for text in read_documents(file, self.column))
        yield from self._divided()

    def _divided(self) -> Iterator[tuple[str, str]]:
        train = self.files["train"]
        shares = tuple(self.shares.get(split, 0.0) for split in ("valid", "test"))
        count = sum(1 for file in train for _ in read_documents(file, self.column)) if any(shares) else 0
        documents = (text for file in train for text in read_documents(file, self.column))
        if count >= FEW:
            chosen = choose_held_out(count, shares, self.seed, str(self.root)).tolist()
            yield from ((SPLITS[number], text) for number, text in zip(chosen, documents, strict=True))
            return
        for text in documents:
            for split, part in zip(SPLITS, _cut(text, shares), strict=True):
                if part:
                    yield split, part


def find_texts(data: Any) -> Texts:
    """Return the documents of the recipe's ``data``."""
    root = require_path(data.path, "text", WHAT)
    files = _find_files(root)
    shares = {"valid": data.valid_fraction, "test": data.test_fraction}
    shares = {split: share for split, share in shares.items() if split not in files}
    return Texts(root, files, data.column, shares, data.split_seed)


def _find_files(root: Path) -> dict[str, list[Path]]:
    if root.is_file():
        if root.suffix.lower() not in SUFFIXES:
            raise wrong_file(root, WHAT)
        return {"train": [root]}
    inside = [path for path in sorted(root.rglob("*")) if path.is_file() and "/." not in f"/{path.relative_to(root)}"]
    files = [path for path in inside if path.suffix.lower() in SUFFIXES]
    if not files:
        there = f"only {some(path.name for path in inside)}" if inside else "nothing"
        raise DataError(f"{root} has no text, {there}: expected files ending in {', '.join(SUFFIXES)}")
    named: dict[str | None, list[Path]] = {}
    for file in files:
        words = (split_of(part) for part in file.relative_to(root).parts)
        named.setdefault(next((split for split in words if split), None), []).append(file)
    if "train" not in named:
        return {"train": files}
    if None in named:
        strays = some(str(file.relative_to(root)) for file in named[None])
        raise DataError(f"{root} has files for train, but {strays} belong to no split: call them train, valid or test")
    if "valid" in named and "test" not in named:
        named["test"] = named.pop("valid")
    return named


def read_documents(file: Path, column: str) -> Iterator[str]:
    """Return the documents of a file that are not empty."""
    suffix = file.suffix.lower()
    if suffix == ".txt":
        documents = [_decode(file.read_bytes(), str(file))]
    elif suffix == ".jsonl":
        documents = _json_lines(file, column)
    else:
        documents = _rows(file, column)
    return (text for text in documents if text.strip())


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 ({error.reason} at byte {error.start}): convert it first, with iconv for example"
        ) from error


def _json_lines(file: Path, column: str) -> Iterator[str]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}, line {number}"
            if not line.strip():
                continue
            try:
                found = json.loads(_decode(line, where))
            except json.JSONDecodeError as error:
                raise DataError(f"{where} is not JSON: {error}; expected one object or string per line") from error
            if isinstance(found, dict):
                if column not in found:
                    raise _no_column(where, "field", column, list(found))
                found = found[column]
            if not isinstance(found, str):
                raise DataError(f"{where}: {column!r} is {type(found).__name__}, expected text")
            yield found


def _rows(file: Path, column: str) -> Iterator[str]:
    there = open_parquet(file, [], "text").schema_arrow.names
    if column not in there:
        raise _no_column(str(file), "column", column, there)
    for text in minipile.read_documents(file, lambda done, total: None, column=column):
        if isinstance(text, Malformed):
            raise DataError(text.problem)
        yield text


def _no_column(where: str, kind: str, column: str, there: list[str]) -> DataError:
    return DataError(
        f"{where} has no {kind} {column!r}, only {some(there)}: name the one with the text (--data.column NAME)"
        f"{suggestion(column, there)}"
    )


def _cut(text: str, shares: tuple[float, ...]) -> tuple[str, str, str]:
    """Return the parts for train, valid and test, in this order, each ending with a line if there are lines."""
    valid, test = shares
    first = _line_end(text, round(len(text) * (1 - valid - test))) if valid else None
    second = _line_end(text, round(len(text) * (1 - test))) if test else len(text)
    first = second if first is None else min(first, second)
    return text[:first], text[first:second], text[second:]


def _line_end(text: str, place: int) -> int:
    """Return the position after the last line break before ``place``, if it is near; otherwise ``place`` itself."""
    found = text.rfind("\n", max(0, place - len(text) // 20), place) + 1
    return found or place


def save_texts(data: Any, folder: Path, column: str) -> None:
    """Write strings, or dicts with the text under ``column``, as one document each."""
    for split, dataset in by_split(data).items():
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for index, entry in enumerate(entries(dataset, f"data[{split!r}]")):
                where = f"data[{split!r}][{index}]"
                option = '; name the one with the text: settings={"data.column": NAME}'
                text = field(entry, (column,), option, where) if isinstance(entry, Mapping) else entry
                if not isinstance(text, str):
                    raise DataError(f"{where} is {type(text).__name__}: expected a string, or a dict with {column!r}")
                file.write(json.dumps({column: text}) + "\n")
