"""What a report page consists of, and how it becomes one HTML file that needs nothing but itself.

Texts are plain strings everywhere: the template escapes each of them, so that no name of a run can become markup. The
content security policy in the page's head allows no request at all, and no script but its own.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import ClassVar

from intbmoe.analysis.report.answer import Answer
from intbmoe.analysis.report.images import Image


@dataclass(frozen=True)
class Span:
    """A mean, its interval and its single values on an axis from 0 to 1, drawn into a cell."""

    mean: float
    low: float
    high: float
    points: tuple[float, ...]


@dataclass(frozen=True)
class Cell:
    """What stands in a table, and what it is sorted by."""

    text: str
    value: float | str | None = None
    """None for what has no place in an order: such rows stay at the end, whatever the order."""
    href: str | None = None
    span: Span | None = None
    small: str | None = None
    """A second line, in small print."""
    code: bool = False


@dataclass(frozen=True)
class Column:
    """A heading that sorts."""

    title: str
    numeric: bool = True
    hint: str | None = None
    sorted: str | None = None
    """"ascending" or "descending", if the rows come in the order of this column."""


@dataclass(frozen=True)
class Table:
    """Rows under headings that sort."""

    kind: ClassVar[str] = "table"
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    marked: frozenset[int] = frozenset()
    """Rows that stand out."""
    anchors: Sequence[str] = ()
    """An id for each row, for links to it."""
    folded: bool = False
    """Shown on request only."""


@dataclass(frozen=True)
class Figure:
    """A picture with its caption."""

    kind: ClassVar[str] = "figure"
    title: str
    see: str
    how: str
    image: Image
    source: str
    """The files it comes from, beside the page."""


@dataclass(frozen=True)
class Facts:
    """Short pairs of name and value."""

    kind: ClassVar[str] = "facts"
    pairs: Sequence[tuple[str, Cell]]


@dataclass(frozen=True)
class Notice:
    """A sentence or several, as a list with names."""

    kind: ClassVar[str] = "notice"
    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    id: str
    title: str
    lead: str
    blocks: Sequence[Table | Figure | Facts | Notice] = field(default_factory=list)


@dataclass(frozen=True)
class Page:
    """A whole report."""

    overline: str
    answer: Answer
    sections: Sequence[Section]
    footer: str


def render(page: Page) -> str:
    """The page as HTML."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("reports are made with jinja2: pip install 'intbmoe[plots]'") from error
    folder = files("intbmoe.analysis.report")
    parts = {name: (folder / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    allowed = base64.b64encode(hashlib.sha256(parts["js"].encode()).digest()).decode()
    return environment.from_string(parts["html"]).render(
        page=page, css=parts["css"], script=parts["js"], script_hash=f"sha256-{allowed}"
    )
