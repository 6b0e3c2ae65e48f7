"""Pictures embedded in a page as data: SVG if it is small enough, otherwise PNG on a white background."""

import base64
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from intbmoe.report.style import PHONE_INCHES

LARGEST_SVG = 300_000  # bytes; a picture of many small parts is smaller as PNG
PNG_DPI, CSS_DPI, POINTS = 150, 96, 72


@dataclass(frozen=True)
class Image:
    """A picture as data, and its size in CSS pixels."""

    uri: str
    width: int
    height: int
    adapts: bool  # whether it has its own colours for dark screens

    @property
    def fits_phone(self) -> bool:
        """Whether its letters can be read at a phone's width."""
        return self.width <= PHONE_INCHES * CSS_DPI


def read_image(folder: Path, name: str) -> Image | None:
    """The picture of that name, from its SVG or PNG file; None if there is neither."""
    svg, png = folder / f"{name}.svg", folder / f"{name}.png"
    small = svg.is_file() and (svg.stat().st_size <= LARGEST_SVG or not png.is_file())
    if small:
        return _from_svg(svg.read_text(encoding="utf-8"))
    return _from_png(png.read_bytes()) if png.is_file() else None


def _from_svg(text: str) -> Image:
    head = re.search(r"<svg\b[^>]*>", text)
    if head is None:
        raise ValueError("an SVG file without an svg element")
    sizes = [re.search(rf'\b{side}="([\d.]+)pt"', head[0]) for side in ("width", "height")]
    width, height = (round(float(size[1]) * CSS_DPI / POINTS) if size else 0 for size in sizes)
    return Image(_uri("svg+xml", text.encode()), width, height, adapts="prefers-color-scheme" in text)


def _from_png(content: bytes) -> Image:
    width, height = struct.unpack(">II", content[16:24])
    return Image(_uri("png", content), width * CSS_DPI // PNG_DPI, height * CSS_DPI // PNG_DPI, adapts=False)


def _uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
