"""Pictures of the documentation: made by their scripts, small, and legible on a phone and on a dark screen."""

import importlib.util
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from intbmoe.report.images import LARGEST_SVG
from intbmoe.report.style import PHONE_INCHES

DOCS = Path(__file__).parent.parent / "docs"
SCRIPT = DOCS / "drawings" / "architecture.py"
DRAWN = sorted(path for path in (DOCS / "images").rglob("*.svg") if path.stem != "architecture")
DENSE = ("example-text",)  # its letters are side by side
CHROMIUM = shutil.which("chromium")
# Every text must be inside the front rectangle of its box and inside the picture, and no two texts may overlap.
MISPLACED = """() => {
  const whole = document.documentElement.getBoundingClientRect(), wrong = [];
  const inside = (a, b) => a.left >= b.left && a.right <= b.right && a.top >= b.top && a.bottom <= b.bottom;
  const texts = [...document.querySelectorAll("text")].map((text) => [text, text.getBoundingClientRect()]);
  for (const [text, box] of texts) {
    const holder = text.closest(".holds");
    const room = holder ? [...holder.querySelectorAll("rect")].pop().getBoundingClientRect() : whole;
    if (!inside(box, room)) wrong.push(text.textContent);
  }
  texts.forEach(([one, a], place) => {
    for (const [other, b] of texts.slice(place + 1)) {
      const apart = a.right <= b.left || b.right <= a.left || a.bottom - 4 <= b.top || b.bottom - 4 <= a.top;
      if (!apart) wrong.push(`${one.textContent} / ${other.textContent}`);
    }
  });
  return wrong;
}"""


@pytest.fixture(scope="module")
def architecture():
    spec = importlib.util.spec_from_file_location("architecture", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_what_its_script_draws(architecture):
    assert architecture.OUTPUT.read_text(encoding="utf-8") == architecture.draw(), f"run {SCRIPT.name} again"
    words = " ".join("".join(text.itertext()) for text in ElementTree.fromstring(architecture.draw()).iter())
    for part in ("codes", "hypernetwork", "coefficients", "pool of E bases", "value", "gate", "top-k", "always on"):
        assert part in words


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_drawn_pictures_are_small_and_fit_a_phone(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) <= LARGEST_SVG
    assert float(ElementTree.fromstring(text).get("width").removesuffix("pt")) <= 72 * PHONE_INCHES
    assert "prefers-color-scheme: dark" in text


def test_an_index_is_low_and_the_line_goes_on_at_its_height(architecture):
    assert architecture.rich("a_{b}c") == (
        '<tspan dy="0">a</tspan><tspan dy="5" class="small">b</tspan><tspan dy="-5">c</tspan>'
    )


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def test_no_text_leaves_its_box_and_both_schemes_differ(architecture, browser):
    shots = []
    for scheme in ("light", "dark"):
        page = browser.new_context(color_scheme=scheme, viewport={"width": 700, "height": 1200}).new_page()
        page.goto(architecture.OUTPUT.as_uri())
        assert page.evaluate(MISPLACED) == []
        shots.append(page.screenshot())
    assert shots[0] != shots[1]


@pytest.mark.parametrize("path", [path for path in DRAWN if path.stem not in DENSE], ids=lambda path: path.stem)
def test_no_text_is_cut_off_or_lies_on_another(path, browser):
    page = browser.new_page(viewport={"width": 700, "height": 1200})
    page.goto(path.as_uri())
    assert page.evaluate(MISPLACED) == []
    page.close()
