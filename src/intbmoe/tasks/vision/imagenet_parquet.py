"""Images in Hugging Face's parquet files: columns ``image`` (a struct with ``bytes``) and ``label``.

A file can only be read a row group at a time (some hundred images). The last few groups are kept, which makes reading
in order cheap; in random order each image costs its group, so for long training unpack the files (``docs/data.md``).
"""

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.parquet import find_parquet, open_parquet
from intbmoe.tasks.vision.decode import decode, middle_square

KEPT_GROUPS = 4
COLUMNS = ("image", "label")


class ParquetImages:
    def __init__(self, files: list[Path], rows: np.ndarray, labels: np.ndarray) -> None:
        self.files = files
        self.rows = rows  # (N, 3) file, row group, row in the group
        self.labels = labels
        self._begin()

    def _begin(self) -> None:
        """Without open files, which must not be shared with the process that this one was forked from."""
        self._process = os.getpid()
        self._open = lru_cache(None)(lambda file: open_parquet(self.files[file], COLUMNS, "images"))
        self._group = lru_cache(KEPT_GROUPS)(
            lambda file, group: _read(self._open(file), self.files[file], group, "image")
        )

    @classmethod
    def find(cls, root: Path, split: str) -> "ParquetImages":
        """The images of ``root/data/split-*.parquet``; only the labels are read yet."""
        files = find_parquet(root, split)
        rows, labels = [], []
        for number, file in enumerate(files):
            opened = open_parquet(file, COLUMNS, "images")
            for group in range(opened.num_row_groups):
                found = _read(opened, file, group, "label").to_numpy()
                rows.append(np.stack(np.broadcast_arrays(number, group, np.arange(len(found))), axis=1))
                labels.append(found.astype(np.int64))
        if not labels:
            raise DataError(f"{root / 'data'}: {split}-*.parquet hold no row: expected images")
        return cls(files, np.concatenate(rows), np.concatenate(labels))

    def image(self, index: int) -> Image.Image:
        return decode(self.content(index), self._where(index))

    def content(self, index: int) -> bytes:
        if self._process != os.getpid():
            self._begin()
        file, group, row = self.rows[index].tolist()
        image = self._group(file, group)[row].as_py()
        if not (isinstance(image, dict) and isinstance(image.get("bytes"), bytes)):
            where = self._where(index)
            raise DataError(f"{where}: the column 'image' has no bytes; expected a struct with the file in it")
        return image["bytes"]

    def pixels(self, indices: Sequence[int], size: int) -> np.ndarray:
        return np.stack([middle_square(self.image(index), size) for index in indices])

    def subset(self, indices: np.ndarray) -> "ParquetImages":
        return ParquetImages(self.files, self.rows[indices], self.labels[indices])

    def _where(self, index: int) -> str:
        file, group, row = self.rows[index].tolist()
        return f"{self.files[file]}, row group {group}, row {row}"

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetImages, (self.files, self.rows, self.labels)


def _read(opened: Any, file: Path, group: int, column: str) -> Any:
    from pyarrow import ArrowException

    try:
        return opened.read_row_group(group, columns=[column]).column(column)
    except (ArrowException, OSError) as error:
        raise DataError(f"{file}, row group {group}: the column {column!r} cannot be read: {error}") from error
