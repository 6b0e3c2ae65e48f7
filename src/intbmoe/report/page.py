"""The parts of a report page, and how they become one self-contained HTML file.

All texts are plain strings: the template escapes each of them, so that the name of a run can never become markup. The
content security policy in the page's head allows no requests and no script but the page's own.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import ClassVar, Literal

from intbmoe.files import replace_file
from intbmoe.foreign import import_extra
from intbmoe.report.images import Image, read_image
from intbmoe.report.tables import Cell, Table
from intbmoe.train.files import read_json
from intbmoe.version import program_version

NAME = "report.html"
Verdict = Literal["win", "tie", "no claim", "one run"]


@dataclass(frozen=True)
class Answer:
    """The top of a page: a headline and five lines, each with its name."""

    verdict: Verdict
    headline: str
    lines: tuple[tuple[str, str], ...]
    leaders: tuple[str, ...] = ()  # titles of the winner, or of those tied for first place; empty without a claim


@dataclass(frozen=True)
class Figure:
    kind: ClassVar[str] = "figure"
    title: str
    see: str
    how: str
    image: Image
    source: str  # the files it comes from, next to the page


@dataclass(frozen=True)
class Facts:
    kind: ClassVar[str] = "facts"
    pairs: Sequence[tuple[str, Cell]]


@dataclass(frozen=True)
class Notice:
    kind: ClassVar[str] = "notice"
    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    lead: str
    blocks: Sequence[Table | Figure | Facts | Notice] = field(default_factory=list)


@dataclass(frozen=True)
class Page:
    overline: str
    answer: Answer
    sections: Sequence[Section]


def read_figure(caption: Path, data: str) -> Figure:
    """Read the picture that belongs to a caption's file; ``data`` names the files it was drawn from."""
    words, image = read_json(caption), read_image(caption.parent, caption.stem)
    if image is None:
        raise FileNotFoundError(f"{caption} is the caption of a picture that does not exist: draw it again")
    source = ", ".join(part for part in (f"pictures/{caption.stem}.svg", data) if part)
    return Figure(words["title"], words["see"], words["how"], image, source)


def write_page(folder: Path, page: Page) -> Path:
    """Write report.html into ``folder``, next to its data and pictures; return its path."""
    path = folder / NAME
    replace_file(path, render(page).encode())
    return path


def render(page: Page) -> str:
    jinja2 = import_extra("jinja2", "a report", "plots")
    folder = files("intbmoe.report")
    parts = {name: (folder / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    style = (folder / "style.css").read_text(encoding="utf-8") + parts["css"]
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    allowed = base64.b64encode(hashlib.sha256(parts["js"].encode()).digest()).decode()
    return environment.from_string(parts["html"]).render(
        page=page,
        footer=f"Made by intbmoe {program_version()} from data/ and pictures/ beside this page; it loads nothing else.",
        css=style,
        script=parts["js"],
        script_hash=f"sha256-{allowed}",
    )
