"""SVG as matplotlib writes it, made ready for pages: their typefaces, and a second set of colours for dark screens.

The file's own style sheet chooses the colours, so that a picture adapts wherever it is shown. Letters and lines in the
colours of ``DARK`` change; what stands on a coloured cell is drawn in ``ON_COLOUR``, which stays. So do the colours of
artists whose gid begins with ``KEPT``, such as the legend of an image's pixels.
"""

import re

from intbmoe.report.style import DARK, INK, MONO, PAPER, SANS

KEPT = "keeps-colour"


def for_pages(svg: str) -> str:
    """Letters stay letters; the pages' typefaces are narrower than matplotlib's, so everything fits."""
    svg = re.sub(r"font-family: 'DejaVu Sans Mono'[^;\"]*", f"font-family: {MONO}", svg)
    svg = re.sub(r"font-family: 'DejaVu Sans'[^;\"]*;? ?", "", svg)
    return re.sub(r"<svg\b([^>]*)>", lambda head: f'<svg font-family="{SANS}"{head[1]}>{_dark_style()}', svg, count=1)


def _dark_style() -> str:
    """Rules that overrule matplotlib's inline styles. Backgrounds are paths that are filled white and nothing else, and
    hollow markers are uses of a path that are filled white; any other white stays."""
    paper = f'path[style="fill: {PAPER}"],use[style*="fill: {PAPER}"]{{fill:{DARK[PAPER]}!important}}'
    rules = [f"svg{{fill:{DARK[INK]}}}", paper]
    for light, dark in DARK.items():
        if light != PAPER:
            for side in ("fill", "stroke"):
                rules.append(f'[style*="{side}: {light}"]:not([id^="{KEPT}"] *){{{side}:{dark}!important}}')
    return f"<style>@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"
