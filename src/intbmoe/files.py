"""Replace files and folders atomically: write beside the target, then rename, so readers see the old or the new one.

With ``sync`` this also survives a power cut, at the cost of waiting for the disk.
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
    """Encode as indented JSON; numbers survive the round trip exactly, and NaN is refused."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(content)
        _sync(file)


def replace_file(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write to a temporary file and rename it to ``path``, which is never half written."""
    with replacing_file(path, sync=sync) as file:
        file.write(content)


@contextmanager
def replacing_file(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces ``path`` once it is written; if writing fails, the old file stays."""
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
    """Yield an empty folder that replaces ``folder`` once it is filled; if filling fails, the old folder stays.

    ``check`` is called with ``folder`` right before the old one is removed, and may raise. If the process is killed,
    the temporary folder it leaves behind is removed the next time ``folder`` is replaced.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(folder)
    if aside.exists() and not folder.exists():
        os.rename(aside, folder)  # a process was killed between the two renames of a system without an atomic swap
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
    """Make a temporary folder ``parent``/``prefix``…``suffix``, and remove it afterwards unless it was renamed.

    The process that makes it holds a lock on it. Folders of this pattern without a lock were left by processes that
    were killed; they are removed here. Other users' folders, and links, are left alone.
    """
    for found in parent.glob(f"{glob.escape(prefix)}{'[0-9a-z_]' * 8}{glob.escape(suffix)}"):
        descriptor = _lock_folder(found)
        if descriptor is not None:
            shutil.rmtree(found, ignore_errors=True)
            os.close(descriptor)
    descriptor = None
    while descriptor is None:  # until the new folder is locked, another process may remove it as abandoned
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=parent))
        descriptor = _lock_folder(folder, new=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _lock_folder(folder: Path, new: bool = False) -> int | None:
    """Lock a folder that this user owns and return a descriptor that holds the lock; None if another process has it.

    If the file system has no locks, abandoned folders cannot be recognised: a new folder goes without a lock, and
    existing ones stay.
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
    """Give a temporary folder, which only its owner may read, the usual permissions."""
    os.umask(mask := os.umask(0))
    folder.chmod(0o777 & ~mask)


def _exchange(new: Path, folder: Path) -> None:
    """Replace ``folder`` by ``new`` and remove the old one; on Linux ``folder`` exists at every moment."""
    if _swap(new, folder):
        return  # the old folder now has the temporary folder's name, and is removed with it
    before = _set_aside(folder)
    try:
        os.rename(new, folder)
    except OSError:
        os.rename(before, folder)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _swap(one: Path, other: Path) -> bool:
    """Exchange two names atomically; False if the system or the file system cannot."""
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
    """Remove a folder. It is renamed first, so that a killed process leaves no folder that looks complete."""
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
