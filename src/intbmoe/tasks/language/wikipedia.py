"""Wikipedia articles from xz files of text, with the tokenizer that comes with them.

    wiki_train_a.txt.xz, wiki_train_b.txt.xz (optional), wiki_valid.txt.xz, wiki_test.txt.xz
    bpe16k_tokenizer.json

Each article is followed by ``<|endoftext|>`` and a line break.
"""

import lzma
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.language.packing import Corpus, Malformed, Part, Report, pack
from intbmoe.tasks.language.tokenizer import END_OF_TEXT, Encoder
from intbmoe.tasks.workers import ALONE, Progress, Workers

NAME = "wikipedia"
FILES = {
    "wiki_train_a.txt.xz": "train",
    "wiki_train_b.txt.xz": "train",
    "wiki_valid.txt.xz": "valid",
    "wiki_test.txt.xz": "test",
}
OPTIONAL = frozenset({"wiki_train_b.txt.xz"})
TOKENIZER_FILE = "bpe16k_tokenizer.json"
SEPARATOR = f"{END_OF_TEXT}\n".encode()
READ_BYTES = 2**20
LARGEST_DOCUMENT = 2**26  # bytes; without it, a file without separators would be one document, all of it in memory


def prepare(
    source: Path, target: Path, *, skip_bad: bool, progress: Progress, workers: Workers = ALONE
) -> Mapping[str, Any]:
    tokenizer = source / TOKENIZER_FILE
    for name in (*FILES, TOKENIZER_FILE):
        if name not in OPTIONAL and not (source / name).is_file():
            expected = ", ".join((*FILES, TOKENIZER_FILE))
            raise DataError(f"{source / name} is missing: expected a folder with {expected} (see docs/data.md)")
    parts = [Part(split, source / name) for name, split in FILES.items() if (source / name).is_file()]

    def make_tokenizer(skip_bad: bool, progress: Progress) -> str:
        try:
            content = tokenizer.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{tokenizer} is not text: {error}") from error
        Encoder(content, str(tokenizer))  # refuses a file that is not a tokenizer before it is copied
        return content

    corpus = Corpus(NAME, parts, read_documents, make_tokenizer, other_files=(tokenizer,))
    return pack(corpus, target, skip_bad=skip_bad, progress=progress, workers=workers)


def read_documents(file: Path, report: Report) -> Iterator[str | Malformed]:
    size, number, rest = file.stat().st_size, 0, b""
    with open(file, "rb") as packed, lzma.open(packed) as unpacked:
        while block := _read(unpacked, file, number):
            # Only the end of what was already searched can be the beginning of a separator.
            start = max(0, len(rest) - len(SEPARATOR) + 1)
            rest += block
            begin = 0
            while (end := rest.find(SEPARATOR, max(begin, start))) >= 0:
                yield _decode(rest[begin:end], file, number)
                number += 1
                begin = end + len(SEPARATOR)
            rest = rest[begin:]
            if len(rest) > LARGEST_DOCUMENT:
                raise DataError(
                    f"{file}, document {number} has more than {LARGEST_DOCUMENT} bytes: expected documents with "
                    f"{END_OF_TEXT!r} and a line break after each"
                )
            report(packed.tell(), size)
    if rest.strip():  # the last separator may be missing: xz has checked that the file is complete
        yield _decode(rest, file, number)
    report(size, size)


def _read(unpacked: lzma.LZMAFile, file: Path, number: int) -> bytes:
    try:
        return unpacked.read(READ_BYTES)
    except (lzma.LZMAError, EOFError) as error:
        raise DataError(f"{file} is truncated or damaged after document {number}: {error}; get it again") from error


def _decode(content: bytes, file: Path, number: int) -> str | Malformed:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        return Malformed(f"{file}, document {number} is not UTF-8: {error.reason} at byte {error.start} of it")
