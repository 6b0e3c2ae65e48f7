"""Prepare matplotlib's SVG for pages: their typefaces, and a second set of colours for dark screens.

The file's own style sheet chooses the colours, so that a picture adapts wherever it is shown. Letters and lines in the
colours of ``DARK`` change. Letters on coloured cells are drawn in ``ON_COLOUR``, which stays; so do the colours of
artists whose gid begins with ``KEPT``, such as the legend of an image's pixels.
"""

import re

from intbmoe.report.style import DARK, INK, MONO, PAPER, SANS

KEPT = "keeps-colour"


def for_pages(svg: str) -> str:
    """Set the pages' typefaces, which are narrower than matplotlib's, so that everything fits; text stays text."""
    svg = re.sub(r"font-family: 'DejaVu Sans Mono'[^;\"]*", f"font-family: {MONO}", svg)
    svg = re.sub(r"font-family: 'DejaVu Sans'[^;\"]*;? ?", "", svg)
    return re.sub(r"<svg\b([^>]*)>", lambda head: f'<svg font-family="{SANS}"{head[1]}>{_dark_style()}', svg, count=1)


def _dark_style() -> str:
    """Rules that override matplotlib's inline styles.

    Backgrounds are paths with a white fill and no other style, and hollow markers are uses of a path with a white fill;
    any other white stays.
    """
    paper = f'path[style="fill: {PAPER}"],use[style*="fill: {PAPER}"]{{fill:{DARK[PAPER]}!important}}'
    rules = [f"svg{{fill:{DARK[INK]}}}", paper]
    for light, dark in DARK.items():
        if light != PAPER:
            for side in ("fill", "stroke"):
                rules.append(f'[style*="{side}: {light}"]:not([id^="{KEPT}"] *){{{side}:{dark}!important}}')
    return f"<style>@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"
