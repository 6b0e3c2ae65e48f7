"""The text of Python's standard library: real text that is on every machine, read byte by byte.

Ids 0…255 are bytes, and 256 ends a file. A hash of a file's path decides its split, whatever other files there are.
Left out are tests, idlelib, tables of characters (``encodings``), installed packages, and files that the build of this
Python wrote. The text differs between versions of Python, and so do the figures.
"""

import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np

from intbmoe.tasks.base import SPLITS
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.language.packed import TokenSource, token_type

END_OF_TEXT = 256
VOCABULARY = 257
SKIPPED_FOLDERS = frozenset({"test", "tests", "idlelib", "encodings", "site-packages", "dist-packages", "__pycache__"})
SKIPPED_NAMES = ("_sysconfigdata",)  # prefixes of files that hold the paths and options of one build
SHARES = {"test": 0.1, "valid": 0.05, "train": 0.85}


def read(path: str | None, max_bytes: int | None) -> TokenSource:
    """Return the three splits, of at most about ``max_bytes`` in total (None: everything)."""
    if path is not None:
        raise DataError(f"data.path={path!r}: the standard library comes with Python and needs no path: leave it out")
    root = Path(sysconfig.get_paths()["stdlib"])
    tokens: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    dtype = token_type(VOCABULARY)
    for name in choose_files(root, max_bytes):
        content = np.frombuffer((root / name).read_bytes(), dtype=np.uint8).astype(dtype)
        tokens[split_of(name)] += [content, np.array([END_OF_TEXT], dtype)]
    if not all(tokens.values()):
        wanted = "" if max_bytes is None else f"; data.max_bytes={max_bytes} may be too few"
        raise DataError(f"{root} has too few .py files: expected Python's standard library as source text{wanted}")
    splits = {split: np.concatenate(parts) for split, parts in tokens.items()}
    return TokenSource("Python's standard library", VOCABULARY, splits)


def choose_files(root: Path, max_bytes: int | None) -> list[str]:
    """Return relative paths in order; the hash of a path decides which are within a split's share of ``max_bytes``."""
    found = {}
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIPPED_FOLDERS]
        for file in (Path(folder, name) for name in names if name.endswith(".py")):
            if not file.name.startswith(SKIPPED_NAMES):
                found[file.relative_to(root).as_posix()] = file.stat().st_size
    if max_bytes is None:
        return sorted(found)
    chosen, left = [], {split: share * max_bytes for split, share in SHARES.items()}
    for name in sorted(found, key=lambda name: _hash(name, "order")):
        split = split_of(name)
        if found[name] <= left[split]:
            chosen.append(name)
            left[split] -= found[name]
    return sorted(chosen)


def split_of(name: str) -> str:
    place = _hash(name, "split") / 2**64
    if place < SHARES["test"]:
        return "test"
    return "valid" if place < SHARES["test"] + SHARES["valid"] else "train"


def _hash(name: str, purpose: str) -> int:
    """Return a number that is uniform in 0…2⁶⁴−1."""
    return int.from_bytes(hashlib.sha256(f"{purpose} {name}".encode()).digest()[:8], "big")
