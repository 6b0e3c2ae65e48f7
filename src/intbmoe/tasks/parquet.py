"""Parquet files, with errors that say which one and what to do."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from intbmoe.foreign import import_extra
from intbmoe.tasks.errors import DataError


def open_parquet(file: Path, columns: Sequence[str], extra: str, **options: Any) -> Any:
    """Open a ``ParquetFile`` that has these columns; this package's ``extra`` has pyarrow, which takes ``options``."""
    parquet = import_extra("pyarrow.parquet", "reading parquet files", extra)
    from pyarrow import ArrowException

    try:
        opened = parquet.ParquetFile(file, **options)
    except (ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as parquet: {error}; get it again") from error
    there = opened.schema_arrow.names
    for column in columns:
        if column not in there:
            expected = " and ".join(map(repr, columns))
            raise DataError(f"{file} has no column {column!r}, only {', '.join(there)}: expected {expected}")
    return opened


def read_batches(opened: Any, file: Path, columns: Sequence[str], rows: int) -> Iterator[Any]:
    """Yield ``rows`` rows at a time from an open file."""
    from pyarrow import ArrowException

    row, batches = 0, opened.iter_batches(batch_size=rows, columns=list(columns))
    while True:
        try:
            batch = next(batches, None)
        except (ArrowException, OSError) as error:
            raise DataError(f"{file} is truncated or damaged after row {row}: {error}; get it again") from error
        if batch is None:
            return
        yield batch
        row += batch.num_rows


def find_parquet(folder: Path, split: str) -> list[Path]:
    files = sorted((folder / "data").glob(f"{split}-*.parquet"))
    if not files:
        raise DataError(f"{folder / 'data'} has no {split}-*.parquet: expected one or more (see docs/data.md)")
    return files
