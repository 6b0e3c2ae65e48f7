"""What your own data needs in every task: names of splits, holding out, and a check whether it has changed."""

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from intbmoe.checks import did_you_mean
from intbmoe.files import replacing_folder
from intbmoe.tasks.errors import DataError

PAGE = "docs/your-data.md"
SPLIT_WORDS = {
    "train": ("train", "training"),
    "valid": ("valid", "val", "validation", "dev"),
    "test": ("test", "testing"),
}


def split_of(name: str) -> str | None:
    """Return the split that a name stands for: "valid" for Val, validation-00000-of-00001.parquet or dev.txt."""
    word = re.match(r"[a-z]*", name.lower())[0]
    return next((split for split, words in SPLIT_WORDS.items() if word in words), None)


def cache_folder() -> Path:
    """Return the folder for what is derived from the data, kept between runs; it can be deleted at any time."""
    own = os.environ.get("INTBMOE_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "intbmoe"


def cached_folder(kind: str, key: str, make: Callable[[Path], None], whole: Callable[[Path], bool]) -> Path:
    """Return the cache folder of this key; unless it is ``whole``, one process alone fills a new one with ``make``."""
    folder = cache_folder() / kind / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "wb") as lock:
        with suppress(OSError):  # if the file system has no locks, each process makes its own
            fcntl.flock(lock, fcntl.LOCK_EX)  # the first one makes it, the others wait
        if not whole(folder):
            with replacing_folder(folder) as beside:
                make(beside)
    return folder


def launched_as() -> tuple[int, int]:
    """Return this process's rank and the number of processes, as torchrun and others set them in the environment."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def require_path(path: str | None, source: str, what: str, page: str = PAGE) -> Path:
    if path is None:
        raise DataError(f"{source} needs {what}: set data.path (--data.path …); see {page}")
    found = Path(path).expanduser()
    if not found.exists():
        raise DataError(f"{found} does not exist: data.path must be {what} (see {page})")
    return found


def wrong_file(path: Path, what: str) -> DataError:
    ending = f"ends in {path.suffix!r}" if path.suffix else "has no suffix"
    return DataError(f"{path} {ending}: data.path must be {what}")


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return what was probably meant, to end a message that lists all choices; empty if nothing is close."""
    found = did_you_mean(word, known)
    return f"; {found}" if found.startswith("did") else ""


def fingerprint(*parts: bytes | str | np.ndarray) -> str:
    """Return 16 hexadecimal digits that differ for different data."""
    sha256 = hashlib.sha256()
    for part in parts:
        content = part.encode(errors="surrogateescape") if isinstance(part, str) else np.ascontiguousarray(part).data
        sha256.update(len(content).to_bytes(8, "big"))
        sha256.update(content)
    return sha256.hexdigest()[:16]


def require_same_data(expected: str | None, found: str, where: str) -> None:
    if expected not in (None, found):
        raise DataError(
            f"{where} is not what this run was trained on (data.fingerprint={expected}, now {found}): put the files "
            f"back as they were, or start a run with another name (--name)"
        )


def require_unused(settings: Any, source: str, names: Iterable[str]) -> None:
    """Raise if a setting that only ``source`` reads is given for another one."""
    if settings.source == source:
        return
    defaults = {f.name: f.default if f.default is not MISSING else f.default_factory() for f in fields(settings)}
    for name in names:
        value = getattr(settings, name)
        if value != defaults[name]:
            raise ValueError(
                f"{name}={value!r} is not allowed: only source={source!r} reads {name}, not {settings.source!r}"
            )


def choose_held_out(count: int, shares: tuple[float, float], seed: int, where: str) -> np.ndarray:
    """Return (count,) with 0 for train, 1 for valid, 2 for test: ``shares`` of valid and test, drawn by ``seed``."""
    numbers = [max(1, round(share * count)) if share else 0 for share in shares]
    if sum(numbers) >= count:
        raise DataError(
            f"{where} has {count} documents, too few to hold out {numbers[0]} for validation and {numbers[1]} for the "
            f"test and keep some to train on: add more, or lower data.valid_fraction and data.test_fraction"
        )
    chosen = np.zeros(count, dtype=np.int8)
    order = np.random.default_rng(seed).permutation(count)
    chosen[order[: numbers[0]]] = 1
    chosen[order[numbers[0] : sum(numbers)]] = 2
    return chosen


def resolved(recipe: Any, fingerprint: str, **sizes: int) -> Any:
    """Return the recipe with what its data determines: sizes of the model, and the fingerprint."""
    data = replace(recipe.data, fingerprint=fingerprint)
    return replace(recipe, data=data, model=replace(recipe.model, **sizes))


def require_known(value: int | None, setting: str) -> int:
    """Return a size of the model that the data may determine; raise if it is not known yet."""
    if value is None:
        raise ValueError(f"{setting} comes from the data, which only train and compare read: set it to a number here")
    return value


def require_size(given: int | None, found: int, setting: str, where: str) -> None:
    if given not in (None, found):
        raise DataError(f"{where} gives {setting}={found}, not {given}: set it to {found}, or leave it out")
