"""Make a packed folder (``packed.py``) from files of documents.

Each source file is a part, which any worker may do. It becomes a pair of files in TARGET/unfinished,
``<split>-<number>.bin`` and ``….json``. When all exist they are joined, and ``meta.json`` is written last. Every file
is renamed into place when it is complete, so a preparation that was killed at any moment resumes with the source files
that are not finished, and ends with the same bytes.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from intbmoe.files import replace_file, replacing_file
from intbmoe.tasks.base import SPLITS
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.language.packed import TOKENIZER, VERSION, read_meta, tokens_name
from intbmoe.tasks.language.tokenizer import Encoder, import_tokenizers
from intbmoe.tasks.preparation import META, do_part, prepare_once
from intbmoe.tasks.workers import Progress, Workers

COPIED_BYTES = 2**22


@dataclass(frozen=True)
class Malformed:
    problem: str  # file, row and what is wrong


Report = Callable[[int, int | None], None]  # (how much of a file is read, out of how much)
Reader = Callable[[Path, Report], Iterator[str | Malformed]]  # a file's documents; ``DataError`` if it is damaged


@dataclass(frozen=True)
class Part:
    split: str
    file: Path


@dataclass(frozen=True)
class Corpus:
    name: str
    """The name in ``intbmoe prepare`` and ``data.source``."""
    parts: Sequence[Part]
    """In the order of their documents in a split."""
    read: Reader
    """A module-level function, so that other processes find it."""
    make_tokenizer: Callable[[bool, Progress], str]
    """(skip_bad, progress) → the tokenizer's JSON, which follows from the files."""
    other_files: Sequence[Path] = ()
    """Files besides the parts that the result depends on."""

    def files(self) -> dict[str, int]:
        """Return the name and size of every source file, which distinguish this corpus from others."""
        return {file.name: file.stat().st_size for file in (*self.other_files, *(part.file for part in self.parts))}


def pack(corpus: Corpus, target: Path, *, skip_bad: bool, progress: Progress, workers: Workers) -> Mapping[str, Any]:
    """Make ``target`` or resume it, and return what is in it; a finished target is left as it is."""
    import_tokenizers()
    if (target / META).is_file():
        read_meta(target, corpus.name)  # raises unless it is complete

    def make(folder: Path) -> Mapping[str, Any]:
        if not (folder / TOKENIZER).is_file():
            replace_file(folder / TOKENIZER, corpus.make_tokenizer(skip_bad, progress).encode())
        tokenizer = (folder / TOKENIZER).read_bytes()
        encoder = Encoder(tokenizer.decode(), str(folder / TOKENIZER))
        packer = PartPacker(corpus.read, folder, skip_bad)
        records = workers.run("tokens (files)", packer, list(enumerate(corpus.parts)), progress)
        splits = {split: _join(corpus, folder, target, split, records) for split in SPLITS}
        replace_file(target / TOKENIZER, tokenizer)
        about = {"vocabulary": encoder.vocabulary, "end_of_text": encoder.end_of_text, "dtype": encoder.dtype.name}
        return {**about, "splits": splits}

    return _counts(prepare_once(target, {"version": VERSION, "name": corpus.name, "files": corpus.files()}, make))


def usable(documents: Iterable[str | Malformed], skip_bad: bool, skipped: list[str] | None = None) -> Iterator[str]:
    """Yield the documents that are text; the first other one raises, or with ``skip_bad`` goes to ``skipped``."""
    for document in documents:
        if isinstance(document, str):
            yield document
        elif not skip_bad:
            raise DataError(f"{document.problem} (--skip-bad leaves such rows out)")
        elif skipped is not None:
            skipped.append(document.problem)


@dataclass(frozen=True)
class PartPacker:
    """Encodes parts, in any process."""

    read: Reader
    folder: Path
    skip_bad: bool

    def __call__(self, numbered: tuple[int, Part], progress: Progress) -> dict[str, Any]:
        """Return the record of a part, which is encoded unless it already was."""
        index, part = numbered
        stem = f"{part.split}-{index:05d}"
        stage = f"tokens of {part.file.name}"

        def work(own: Path) -> dict[str, Any]:
            found = self.read(part.file, lambda done, total: progress(stage, done, total))
            record = self._encode(found, own / "tokens.bin")
            os.replace(own / "tokens.bin", self.folder / f"{stem}.bin")
            return record

        return do_part(self.folder, stem, self.skip_bad, work)

    def _encode(self, found: Iterator[str | Malformed], path: Path) -> dict[str, Any]:
        tokenizer = self.folder / TOKENIZER
        encoder = Encoder(tokenizer.read_text(encoding="utf-8"), str(tokenizer))
        documents, tokens, skipped = 0, 0, []
        with open(path, "wb") as file:
            for count, ids in encoder.encode(usable(found, self.skip_bad, skipped)):
                file.write(ids.tobytes())
                documents += count
                tokens += len(ids)
            file.flush()
            os.fsync(file.fileno())
        return {"documents": documents, "tokens": tokens, "skipped": len(skipped)}


def _join(
    corpus: Corpus, folder: Path, target: Path, split: str, records: Sequence[Mapping[str, int]]
) -> dict[str, Any]:
    """Join all parts of a split in one file; return what ``meta.json`` says about it."""
    path, sha256 = target / tokens_name(split), hashlib.sha256()
    own = [index for index, part in enumerate(corpus.parts) if part.split == split]
    with replacing_file(path) as joined:
        for index in own:
            with open(folder / f"{split}-{index:05d}.bin", "rb") as file:
                while block := file.read(COPIED_BYTES):
                    joined.write(block)
                    sha256.update(block)
    summed = {key: sum(records[index][key] for index in own) for key in ("documents", "tokens", "skipped")}
    return {**summed, "bytes": path.stat().st_size, "sha256": sha256.hexdigest()}


def _counts(meta: Mapping[str, Any]) -> dict[str, Any]:
    counted: dict[str, Any] = {"vocabulary": meta["vocabulary"]}
    for split, found in meta["splits"].items():
        counted[f"{split} documents"] = found["documents"]
        counted[f"{split} tokens"] = found["tokens"]
    return {**counted, "skipped": sum(found["skipped"] for found in meta["splits"].values())}
