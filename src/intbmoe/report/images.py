"""Pictures as parts of a page: SVG where it is small enough, else PNG, inside the page as data.

A picture of lines, bars and markers gets a second set of colours for dark screens, which its own style sheet chooses. A
picture with any colour beside those of ``DARK`` may have text on it that was chosen to go with that colour, so it keeps
its own, on a white plate.
"""

import base64
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from intbmoe.report.style import DARK, INK, PAPER

LARGEST_SVG = 300_000  # bytes; a picture of many small parts is smaller as PNG
PNG_DPI, CSS_DPI, POINTS = 150, 96, 72
HEAT_MAP = r'<g id="quadmesh_\d+">.*?</g>'


@dataclass(frozen=True)
class Image:
    """A picture as data, and its size in CSS pixels."""

    uri: str
    width: int
    height: int
    adapts: bool  # whether it has colours of its own for dark screens


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
    adapted = adapt_svg(text)
    return Image(_uri("svg+xml", adapted.encode()), width, height, adapts=adapted != text)


def adapt_svg(text: str) -> str:
    """The SVG with colours of its own for dark screens, if it has no colours but those of ``DARK``."""
    drawn = re.sub(HEAT_MAP, "", text.lower(), flags=re.DOTALL)  # on whose cells nothing is written
    if not set(re.findall(r"#[0-9a-f]{6}\b", drawn)) <= set(DARK):
        return text
    return re.sub(r"<svg\b[^>]*>", lambda head: head[0] + _dark_style(), text, count=1)


def _dark_style() -> str:
    """Rules that overrule matplotlib's inline styles. Backgrounds are paths that are filled white and nothing else."""
    rules = [f"svg{{fill:{DARK[INK]}}}", f'path[style="fill: {PAPER}"]{{fill:{DARK[PAPER]}!important}}']
    for light, dark in DARK.items():
        if light == PAPER:  # as an edge or a fill inside the picture, white stays
            continue
        rules += [f'[style*="{side}: {light}"]{{{side}:{dark}!important}}' for side in ("fill", "stroke")]
    return f"<style>@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"


def _from_png(content: bytes) -> Image:
    width, height = struct.unpack(">II", content[16:24])
    return Image(_uri("png", content), width * CSS_DPI // PNG_DPI, height * CSS_DPI // PNG_DPI, adapts=False)


def _uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
