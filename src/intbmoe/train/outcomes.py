"""The result on each test example, kept beside a run's metrics (``outcomes.npz``).

It has one array for each sum of the task's metrics, with one number per example in the order of the test split. So two
methods can be compared on the same examples (``compare/pairs.py``) instead of by overlapping intervals. Counts and hits
are stored as small integers, everything else as float32: a run on 10,000 images takes about 40 kB.
"""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from intbmoe.train.errors import DamagedFileError
from intbmoe.train.files import read_bytes

MOST_EXAMPLES = 1_000_000
"""Larger test splits store no outcomes: the file would be large, and sampling noise is negligible there."""


def pack_outcomes(outcomes: Mapping[str, Tensor]) -> bytes:
    packed = io.BytesIO()
    np.savez_compressed(packed, **{name: _narrow(values.cpu().numpy()) for name, values in outcomes.items()})
    return packed.getvalue()


def read_outcomes(path: Path, checksum: str | None = None) -> dict[str, np.ndarray]:
    """Return the outcomes by name, each (N,) in float64."""
    content = read_bytes(path, checksum)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            found = {name: file[name].astype(np.float64) for name in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DamagedFileError(f"{path} is not a complete file of outcomes: {error}") from error
    if "count" not in found or len({values.shape for values in found.values()}) != 1 or found["count"].ndim != 1:
        raise DamagedFileError(f"{path} is not a file of outcomes: each array, count too, needs one number per example")
    return found


def _narrow(values: np.ndarray) -> np.ndarray:
    for kind in (np.uint8, np.uint16):
        if (values >= 0).all() and (values <= np.iinfo(kind).max).all() and (values == np.floor(values)).all():
            return values.astype(kind)
    return values.astype(np.float32)
