"""Files and folders that a reader finds old or new, but always whole: written beside their place, then renamed.

With ``sync`` that holds after a power cut too, and costs the time the disk needs.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def to_json(value: Any) -> bytes:
    """Indented JSON; numbers come back as they were, and NaN is refused."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_bytes(path: Path, content: bytes) -> None:
    """Write and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(content)
        _sync(file)


def replace_file(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write beside and rename: ``path`` is never half written."""
    with replacing_file(path, sync=sync) as file:
        file.write(content)


@contextmanager
def replacing_file(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """A file open for writing that takes the place of ``path`` once it is written; if that fails, the old one stays."""
    beside = path.with_name(f".{path.name}.part")
    try:
        with open(beside, "wb") as file:
            yield file
            if sync:
                _sync(file)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    if sync:
        _sync_folder(path.parent)


@contextmanager
def replacing_folder(
    folder: Path, check: Callable[[Path], None] = lambda folder: None, *, sync: bool = False
) -> Iterator[Path]:
    """An empty folder that takes the place of ``folder`` once it is filled; if that fails, the old one stays.

    ``check`` gets ``folder`` right before what is there goes, and may raise. A kill leaves a folder ``.NAME.…`` beside.
    ``sync`` is about names: files inside are on the disk if ``write_bytes`` wrote them.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield beside
        os.umask(mask := os.umask(0))
        beside.chmod(0o777 & ~mask)  # a temporary folder is its maker's alone
        if sync:
            _sync_folder(beside)
        check(folder)
        before = _set_aside(folder) if folder.exists() else None
        try:
            os.rename(beside, folder)
        except OSError:
            if before is not None:
                os.rename(before, folder)
            raise
        if sync:
            _sync_folder(folder.parent)
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Rename first: a kill in the middle leaves no folder that looks whole."""
    shutil.rmtree(_set_aside(folder))


def _set_aside(folder: Path) -> Path:
    aside = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)
    return aside


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
