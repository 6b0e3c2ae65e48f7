"""Measures the preparation of IntTravel's tables: rows per second, and memory against the number of rows.

    python benchmarks/preparation.py                             # a minute or two
    python benchmarks/preparation.py --rows 200000 400000        # any sizes
    python benchmarks/preparation.py --json figures.json

For each size, the seeded generator writes raw tables, and a fresh process prepares them. Memory is the peak resident
set beyond its size before, including libraries; ``measure.py`` has the details. The budget is small, so that even the
smallest tables are several chunks and shards, and the largest are several times the memory that DuckDB may take: memory
must not grow with the number of rows. CPU time is given next to elapsed time, because other work on the machine affects
it less.
"""

import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import tyro
from measure import MIB, console, figures_table, in_fresh_process, machine, peak_growth, say_facts, write

from intbmoe.tasks.travel.generator import make_journeys
from intbmoe.tasks.travel.inttravel import prepare
from intbmoe.tasks.travel.rows import Budget

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from inttravel_tables import write_tables

SESSIONS = (40, 80)
BUDGET = Budget(memory_bytes=96 * MIB, threads=1, chunk_bytes=8 * MIB, shard_rows=100_000)


def make_tables(folder: Path, rows: int) -> None:
    """Writes raw tables with about this many actions, always of the same city."""
    write_tables(make_journeys(users=max(1, rows // (sum(SESSIONS) // 2)), sessions=SESSIONS), folder)


def measure_preparation(source: Path, target: Path) -> dict[str, float | int]:
    """Prepares the tables; returns seconds, memory and counts."""
    counted: dict = {}

    def run() -> None:
        counted.update(prepare(source, target, skip_bad=False, progress=lambda *_: None, budget=BUDGET))

    began, worked = time.perf_counter(), time.process_time()
    (grown,) = peak_growth(run)
    seconds = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - worked}
    return {**counted, **seconds, "peak_mib": grown / MIB}


def main(rows: tuple[int, ...] = (200_000, 500_000, 1_000_000, 2_000_000, 4_000_000), json: Path | None = None) -> None:
    """Prepare tables of growing size, each in a separate process.

    Args:
        rows: Approximate numbers of actions.
        json: File for the raw figures.
    """
    facts = machine()
    say_facts(facts)
    sizes = f"memory {BUDGET.memory_bytes // MIB} MiB, chunks {BUDGET.chunk_bytes // MIB} MiB of text"
    columns = ("rows", "raw MiB", "shards", "seconds", "of processor", "rows/s", "peak memory, MiB")
    table = figures_table(f"{sizes}, shards of {BUDGET.shard_rows:,} rows", *columns)
    figures = []
    for number in rows:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "raw"
            in_fresh_process(make_tables, source, number)
            raw = sum(file.stat().st_size for file in source.iterdir()) / MIB
            measured = in_fresh_process(measure_preparation, source, Path(folder) / "prepared") | {"raw_mib": raw}
        figures.append(measured)
        table.add_row(
            f"{measured['rows']:,}",
            f"{raw:.0f}",
            str(measured["shards"]),
            f"{measured['seconds']:.1f}",
            f"{measured['cpu_seconds']:.1f}",
            f"{measured['rows'] / measured['seconds']:,.0f}",
            f"{measured['peak_mib']:.0f}",
        )
    console.print(table)
    least, most = (end(figure["peak_mib"] for figure in figures) for end in (min, max))
    more = figures[-1]["rows"] / figures[0]["rows"]
    console.print(f"{more:.0f} × the rows; the highest peak is {most / least:.2f} × the lowest")
    if json is not None:
        write(json, {"date": datetime.now(UTC).date().isoformat(), "machine": facts, "sizes": figures})


if __name__ == "__main__":
    tyro.cli(main)
