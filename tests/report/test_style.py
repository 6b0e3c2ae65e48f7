"""One style: pictures, pages and drawings share colours that everybody can tell apart, in light and dark schemes."""

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.colors
import numpy as np
import pytest
from matplotlib.figure import Figure

import intbmoe
from intbmoe.report.canvas import Picture
from intbmoe.report.style import BLOCKS, CSS, DARK, FAMILIES, INK, METHODS, ON_COLOUR, PAPER, SANS

PACKAGE = Path(intbmoe.__file__).parent
# Machado, Oliveira and Fernandes, A Physiologically-based Model for Simulation of Color Vision Deficiency (2009):
# linear RGB as seen by people who lack one kind of cone.
LACKING = {
    "red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def linear(colour):
    values = np.array(matplotlib.colors.to_rgb(colour))
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    light, dark = sorted((linear(colour) @ [0.2126, 0.7152, 0.0722] for colour in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("lacking", LACKING)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_families_differ_for_those_who_see_fewer_colours(lacking, scheme):
    colours = [colour if scheme == "light" else DARK[colour] for colour, _ in FAMILIES.values()]
    seen = [np.clip(np.array(LACKING[lacking]) @ linear(colour), 0, 1) ** (1 / 2.2) for colour in colours]
    assert min(np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)) > 0.2
    assert len({marker for _, marker in FAMILIES.values()}) == len(FAMILIES)


def test_lines_and_letters_stand_out_in_both_schemes():
    assert contrast(INK, PAPER) > 7
    assert contrast(DARK[INK], DARK[PAPER]) > 7
    for colour in METHODS:
        assert contrast(colour, PAPER) > 2
        assert contrast(DARK[colour], DARK[PAPER]) > 3


def test_letters_on_colours_and_colours_of_blocks_stay_on_dark_screens():
    figure = Figure((2, 1))
    figure.text(0.1, 0.1, "outside")
    figure.text(0.1, 0.5, "on a cell", color=ON_COLOUR, backgroundcolor="#123456")
    svg = Picture("a", "", "", "", figure).content("svg").decode()
    style = re.search(r"<style>@media \(prefers-color-scheme: dark\).*?</style>", svg)[0]
    assert f"svg{{fill:{DARK[INK]}}}" in style
    assert ON_COLOUR not in style
    assert "#123456" not in style
    assert ElementTree.fromstring(svg).tag.endswith("svg")


def test_pages_have_the_pictures_colours():
    light, dark = re.findall(r":root \{(.*?)\}", CSS.read_text(encoding="utf-8"), re.DOTALL)
    assert f"--raised: {PAPER};" in light
    assert f"--raised: {DARK[PAPER]};" in dark
    assert f"--ink: {DARK[INK]};" in dark
    assert f"--sans: {SANS};".replace("'", '"') in light
    [listed] = re.findall(r"const COLOURS = \[(.*?)\]", (PACKAGE / "serve" / "page.js").read_text(encoding="utf-8"))
    assert tuple(re.findall(r"#\w+", listed)) == BLOCKS
    for page in ("report/page.css", "serve/page.css"):
        assert "prefers-color-scheme: dark) {\n  :root" not in (PACKAGE / page).read_text(encoding="utf-8")
