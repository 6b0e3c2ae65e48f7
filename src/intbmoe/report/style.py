"""The style of all pictures: typefaces, colours by family of methods, and their counterparts on dark screens.

The colours are Okabe and Ito's, which colour-blind readers can also distinguish. ``style.css`` has those of pages.
"""

from pathlib import Path

CSS = Path(__file__).with_name("style.css")
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', 'DejaVu Sans', sans-serif"
MONO = "'DejaVu Sans Mono', ui-monospace, 'SF Mono', 'Cascadia Mono', Menlo, Consolas, monospace"
PHONE_INCHES, PHONE_POINTS = 6.0, 11.0
"""Width and font size of a picture that must be readable on a phone: at 375 pixels, letters have nine or ten."""
BLUE, ORANGE, GREEN, PINK, AMBER, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
INK, GREY, PALE, NOTHING, GRID, PAPER = "#000000", "#777777", "#bbbbbb", "#cccccc", "#dddddd", "#ffffff"
ON_COLOUR = "#111111"
"""The colour of letters on coloured cells, which stays the same on dark screens; ``INK`` becomes light there."""
BLOCKS = (BLUE, AMBER, GREEN, PINK, SKY, ORANGE, "#f0e442", "#999999")
"""Colours of blocks and experts, by number; the server's page has the same."""
METHODS = (BLUE, GREEN, PINK, AMBER, SKY, INK, GREY)
"""Colours of methods drawn as lines: without yellow, which is invisible on white, and orange, which is IntBMoE's."""
FAMILIES = {
    "IntBMoE": (ORANGE, "*"),
    "all experts take part": (BLUE, "s"),
    "few experts take part": (AMBER, "o"),
    "no experts": (GREY, "D"),
}
"""Colour and marker of a method's family (``registry.method_family``); both carry the same information."""
DIVERGING = "RdBu_r"
DARK = {
    INK: "#e9eae6",
    "#333333": "#d8d9d5",
    "#555555": "#b4b8c0",
    GREY: "#a0a5af",
    PALE: "#5b616e",
    NOTHING: "#4a505c",
    GRID: "#343944",
    BLUE: "#5fb0ea",  # Okabe and Ito's is too dark on a dark page
    ORANGE: "#e8661a",  # a lighter one looks like amber to readers with green blindness
    GREEN: "#1fb58a",
    PINK: PINK,
    AMBER: "#f2b33d",
    SKY: "#8fd0f5",
    PAPER: "#1b1e24",
}
"""Colour on light paper → on dark paper."""
