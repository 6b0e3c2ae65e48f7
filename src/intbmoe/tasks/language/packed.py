"""Tokens of a whole data set in one folder, and examples cut from them.

tokens-train.bin, tokens-valid.bin, tokens-test.bin   ids in sequence, little-endian uint16 (uint32 if the vocabulary
                                                      needs it); each document ends with the end-of-text id
tokenizer.json                                        the tokenizer that made the ids
meta.json                                             describes the rest; written last, so a folder with it is complete
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from intbmoe.tasks.arrays import map_array
from intbmoe.tasks.base import SPLITS, Batch
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.own_data import require_path
from intbmoe.tasks.preparation import META

VERSION = 1
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class TokenSource:
    where: str  # its name in messages
    vocabulary: int  # the number of different ids
    splits: dict[str, np.ndarray]  # name → (tokens,) ids, in memory or mapped from a file
    folder: Path | None = None  # with the tokenizer; None if ids are bytes
    end_of_text: int = 256
    fingerprint: str | None = None  # for the user's own files


class TokenExamples:
    """Consecutive pieces of ``length`` tokens, across documents: a piece is cut wherever it is full.

    A piece is read with the token after it, so that each of its tokens has the next one as its target; the next piece
    begins with that token. Tokens left over at the end are not used. Nothing is random here.
    """

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)

    def batch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return ``ids`` and ``targets``, (B, length) int64 each: the same in every epoch and for every seed."""
        count, length = len(self), self.length
        if not all(0 <= index < count for index in indices):
            raise IndexError(f"no example {next(i for i in indices if not 0 <= i < count)}: there are {count}")
        pieces = np.empty((len(indices), length + 1), dtype=np.int64)
        for row, index in enumerate(indices):
            pieces[row] = self.tokens[index * length : (index + 1) * length + 1]
        both = torch.from_numpy(pieces)
        return {"ids": both[:, :-1].contiguous(), "targets": both[:, 1:].contiguous()}

    def __getstate__(self) -> dict[str, Any]:
        # Pickling a mapped file would send its whole content to the other process.
        state = dict(self.__dict__)
        if isinstance(self.tokens, np.memmap):
            state["tokens"] = (str(self.tokens.filename), self.tokens.dtype.str)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.tokens, tuple):
            self.tokens = np.memmap(self.tokens[0], dtype=self.tokens[1], mode="r")


def token_type(vocabulary: int) -> np.dtype:
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


def tokens_name(split: str) -> str:
    return f"tokens-{split}.bin"


def read_meta(folder: Path, name: str) -> dict[str, Any]:
    """Return the meta.json of a finished folder; raise unless it is complete and holds the data called ``name``."""
    path = folder / META
    again = f"intbmoe prepare {name} SOURCE {folder}"
    anew = f"remove {folder}, then {again}"
    if not path.is_file():
        raise DataError(
            f"{folder} has no {META}: it was never prepared, or its preparation was interrupted; "
            f"{again} makes it, or resumes where it stopped (see docs/data.md)"
        )
    try:
        meta = json.loads(path.read_bytes())
        version, found = meta["version"], meta["name"]
        sizes = {tokens_name(split): meta["splits"][split]["bytes"] for split in SPLITS}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not what a preparation writes ({error!r}): {anew}") from error
    if version != VERSION:
        raise DataError(f"{path} has version {version}, but this program reads version {VERSION}: {anew}")
    if found != name:
        raise DataError(f"{folder} holds {found}, not {name}: set data.source={found}, or give another data.path")
    for file, size in sizes.items():
        there = (folder / file).stat().st_size if (folder / file).is_file() else None
        if there != size:
            state = "is missing" if there is None else f"has {there} bytes"
            raise DataError(f"{folder / file} {state}, {META} says {size} bytes: {anew}")
    return meta


def read(path: str | None, name: str) -> TokenSource:
    """Return the three splits of the prepared folder ``path``, mapped into memory; ``name`` is its data set."""
    folder = require_path(path, name, f"the folder that intbmoe prepare {name} SOURCE FOLDER makes", "docs/data.md")
    meta = read_meta(folder, name)
    dtype = token_type(meta["vocabulary"])
    splits = {split: map_array(folder / tokens_name(split), dtype) for split in SPLITS}
    return TokenSource(str(folder), meta["vocabulary"], splits, folder, meta["end_of_text"], meta.get("fingerprint"))
