"""Files and folders that a reader finds old or new, but always whole: written beside their place, then renamed.

With ``sync`` that holds after a power cut too, and costs the time the disk needs.
"""

import ctypes
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import sys
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
        _sync_path(path.parent)


@contextmanager
def replacing_folder(
    folder: Path, check: Callable[[Path], None] = lambda folder: None, *, sync: bool = False
) -> Iterator[Path]:
    """An empty folder that takes the place of ``folder`` once it is filled; if that fails, the old one stays.

    ``check`` gets ``folder`` right before what is there goes, and may raise. What a kill leaves beside is removed by
    the next one that replaces ``folder``.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(folder)
    if aside.exists() and not folder.exists():
        os.rename(aside, folder)  # a kill came between the two renames of a system that cannot exchange folders
    with private_folder(folder.parent, f".{folder.name}.", ".part") as beside:
        yield beside
        make_public(beside)
        if sync:
            for path in (*beside.rglob("*"), beside):
                _sync_path(path)
        check(folder)
        if folder.exists():
            _exchange(beside, folder)
        else:
            os.rename(beside, folder)
        if sync:
            _sync_path(folder.parent)


@contextmanager
def private_folder(parent: Path, prefix: str, suffix: str) -> Iterator[Path]:
    """A new folder ``parent``/``prefix``…``suffix`` that is gone afterwards, unless it was renamed.

    Its maker holds a lock on it: a folder so named without one was left by a process that was killed, and is removed
    here. Folders of other users, and links, are left alone.
    """
    for found in parent.glob(f"{glob.escape(prefix)}{'[0-9a-z_]' * 8}{glob.escape(suffix)}"):
        descriptor = _lock_folder(found)
        if descriptor is not None:
            shutil.rmtree(found, ignore_errors=True)
            os.close(descriptor)
    descriptor = None
    while descriptor is None:  # another process may take the new folder for a left one, until it is locked
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=parent))
        descriptor = _lock_folder(folder, new=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _lock_folder(folder: Path, new: bool = False) -> int | None:
    """A descriptor that holds the lock of a folder of ours until it is closed; None where another process has it.

    Where the file system has no locks, nobody can tell who left a folder: a new one does without, others stay.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(descriptor)
        locked = found.st_uid == os.getuid() and os.path.samestat(found, os.stat(folder))
    except (BlockingIOError, FileNotFoundError):
        locked = False
    except OSError:
        locked = new
    if locked:
        return descriptor
    os.close(descriptor)
    return None


def make_public(folder: Path) -> None:
    """A temporary folder is its maker's alone; give it the rights of any other."""
    os.umask(mask := os.umask(0))
    folder.chmod(0o777 & ~mask)


def _exchange(new: Path, folder: Path) -> None:
    """Put ``new`` in the place of ``folder`` and remove what was there; at no moment is the place empty on Linux."""
    if _swap(new, folder):
        return  # the old one now has the temporary folder's name, and goes with it
    before = _set_aside(folder)
    try:
        os.rename(new, folder)
    except OSError:
        os.rename(before, folder)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _swap(one: Path, other: Path) -> bool:
    """Exchange two names at once; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    at, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename(at, os.fsencode(one), at, os.fsencode(other), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(other))


def remove_folder(folder: Path) -> None:
    """Rename first: a kill in the middle leaves no folder that looks whole."""
    shutil.rmtree(_set_aside(folder))


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.removed")


def _set_aside(folder: Path) -> Path:
    aside = _aside(folder)
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)
    return aside


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_path(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
