"""Read files back without trusting them, read tensors without pickle, and explain a full disk."""

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from intbmoe.files import digest
from intbmoe.train.errors import DamagedFileError, DiskFullError


@contextmanager
def full_disk_is_explained(path: Path, advice: str) -> Iterator[None]:
    """Turn the operating system's "no space left" into an error that says what was lost and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFullError(f"no space left to write {path}: {advice}") from error


def pack_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a safetensors file; tied tensors are stored once for each name."""
    seen: set[int] = set()
    own = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        pointer = tensor.untyped_storage().data_ptr()
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        own[name] = tensor if whole and pointer not in seen else tensor.clone()
        seen.add(pointer)
    return safetensors.torch.save(own)


def read_bytes(path: Path, checksum: str | None) -> bytes:
    """Return the file's content; raise if it is missing or does not match its checksum."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error.strerror}") from error
    if checksum is not None and digest(content) != checksum:
        raise DamagedFileError(f"{path} is truncated or altered: its SHA-256 is not the one recorded{_kind(content)}")
    return content


def read_tensors(path: Path, checksum: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file; anything else is refused, and nothing is ever unpickled."""
    content = read_bytes(path, checksum)
    try:
        return safetensors.torch.load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedFileError(f"{path} is not a complete safetensors file{_kind(content)}: {error}") from error


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_bytes(path, None))
    except ValueError as error:
        raise DamagedFileError(f"{path} is not valid JSON: {error}") from error


def _kind(content: bytes) -> str:
    pickled = content.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04"))
    return " (it looks like a pickle, which is never loaded)" if pickled else ""
