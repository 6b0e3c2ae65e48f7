"""One table: built once from typed columns and cells, then rendered for the terminal or as Markdown, CSV or JSON.

``page.html`` renders the same table on a page, where clicking a heading sorts it. People read the cells' texts; files
for programs contain the records, which keep every digit.
"""

import csv
import io
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from intbmoe.report.numbers import NOTHING

WIDE = 100  # characters per line from which a terminal shows all columns of a table
BARE = {"title_style": "bold", "box": SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}


@dataclass(frozen=True)
class Span:
    """A mean, its interval and its single values on an axis from 0 to 1, drawn in a cell of a page."""

    mean: float
    low: float
    high: float
    points: tuple[float, ...]


@dataclass(frozen=True)
class Cell:
    text: str
    value: float | str | None = None
    """The value to sort by; rows with None stay at the end in any order."""
    href: str | None = None
    span: Span | None = None
    small: str | None = None  # a second line, in small print
    code: bool = False

    @classmethod
    def of(cls, value: Any) -> "Cell":
        """A cell from plain data: floats with four digits, integers with separated thousands."""
        if value is None or value == "":
            return cls(NOTHING)
        if isinstance(value, float):
            return cls(f"{value:.4g}", value)
        return cls(f"{value:,}" if isinstance(value, int) else str(value), value)


@dataclass(frozen=True)
class Column:
    title: str
    numeric: bool = True
    hint: str | None = None
    sorted: str | None = None  # "ascending" or "descending", if the rows come in the order of this column
    name: str = ""  # its name for ``select``; the title if empty
    spare: bool = False  # whether it is left out on a narrow terminal


@dataclass(frozen=True)
class Table:
    kind: ClassVar[str] = "table"
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    marked: frozenset[int] = frozenset()  # highlighted rows
    starred: frozenset[int] = frozenset()  # rows whose name has a star on a page, like their points in its pictures
    anchors: Sequence[str] = ()  # an id for each row, for links to it
    folded: bool = False  # collapsed on a page until it is opened
    records: Sequence[Mapping[str, Any]] = ()  # the rows as plain data, for CSV and JSON

    @classmethod
    def of_texts(
        cls,
        title: str,
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        spare: Collection[str] = (),
        **more: Any,
    ) -> "Table":
        """A table from texts: a first column of names, then numbers that are already formatted."""
        columns = [Column(name, numeric=place > 0, spare=name in spare) for place, name in enumerate(header)]
        return cls(title, columns, [[Cell(text) for text in row] for row in rows], **more)

    @classmethod
    def of_records(
        cls, title: str, records: Sequence[Mapping[str, Any]], titles: Mapping[str, str] | None = None, **more: Any
    ) -> "Table":
        """A table from plain data under its own names or ``titles``; a column with a string in it is a text column."""
        names = list(dict.fromkeys(name for record in records for name in record))
        columns = [
            Column(
                (titles or {}).get(name, name.replace("_", " ")),
                numeric=not any(isinstance(record.get(name), str) for record in records),
                name=name,
            )
            for name in names
        ]
        rows = [[Cell.of(record.get(name)) for name in names] for record in records]
        return cls(title, columns, rows, records=records, **more)

    def select(self, *names: str) -> "Table":
        known = {column.name or column.title: place for place, column in enumerate(self.columns)}
        places = [known[name] for name in names]
        rows = [[row[place] for place in places] for row in self.rows]
        return replace(self, columns=[self.columns[place] for place in places], rows=rows)

    def terminal(self, width: int) -> RichTable:
        """The table for rich to print on a terminal of ``width`` characters, without a frame, headings on two lines.

        If it still does not fit, long names are wrapped, but never numbers.
        """
        shown = [place for place, column in enumerate(self.columns) if width >= WIDE or not column.spare]
        spared = ", ".join(column.title for place, column in enumerate(self.columns) if place not in shown)
        caption = f"shown in a wider terminal: {spared}" if spared else None
        table = RichTable(title=self.title, title_justify="left", caption=caption, caption_justify="left", **BARE)
        for column in (self.columns[place] for place in shown):
            heading, side = column.title.replace(" (", "\n("), "right" if column.numeric else "left"
            table.add_column(heading, justify=side, no_wrap=column.numeric, overflow="fold", vertical="bottom")
        for place, row in enumerate(self.rows):
            table.add_row(*(row[each].text for each in shown), style="bold" if place in self.marked else None)
        return table

    def markdown(self) -> str:
        """Only the heading and the rows, the marked ones in bold."""
        lines = [[column.title for column in self.columns], ["--:" if c.numeric else ":--" for c in self.columns]]
        for place, row in enumerate(self.rows):
            bold = "**" if place in self.marked else ""
            lines.append([f"{bold}{' '.join(filter(None, (cell.text, cell.small)))}{bold}" for cell in row])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def markdown_document(self, *below: "Table") -> str:
        """The table with its title and notes, and with other tables between them."""
        parts = [f"**{self.title}**", self.markdown()]
        for table in below:
            parts += [*([f"**{table.title}**"] if table.title else []), table.markdown(), *table.notes]
        return "\n\n".join([*parts, *self.notes]) + "\n"

    def csv(self, names: Sequence[str] = (), line_end: str = "\n") -> str:
        """The records under a header, the values of lists separated by spaces; empty if there are no records."""
        buffer = io.StringIO()
        if self.records:
            header = list(names or self.records[0])
            writer = csv.writer(buffer, lineterminator=line_end)
            writer.writerow(header)
            for record in self.records:
                values = (record.get(name) for name in header)
                writer.writerow([" ".join(map(str, v)) if isinstance(v, list) else v for v in values])
        return buffer.getvalue()

    def json(self) -> str:
        return json.dumps(self.records, indent=2, ensure_ascii=False) + "\n"

    def print(self, form: str) -> None:
        """Print to standard output as "text", "markdown" or "json"."""
        if form == "json":
            sys.stdout.write(self.json())
        elif form == "markdown":
            sys.stdout.write(self.markdown_document())
        else:
            # Outside a terminal there is no width to fit into, and wrapped lines cannot be searched.
            console = Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)
            console.print(self.terminal(console.width))
            for note in self.notes:
                console.print(note)
