"""The pages in a real browser: nothing is loaded, tables sort, pictures show, a phone does not scroll sideways."""

import json
import shutil

import pytest
from made_up_comparison import HOSTILE, made_up, made_up_curves, made_up_row

from intbmoe.compare.page import redraw_comparison

CHROMIUM = shutil.which("chromium")
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 700}
HEADINGS = "#results thead button"
# Relative luminance and contrast as in the Web Content Accessibility Guidelines, over everything that has text.
WORST_CONTRAST = """() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, place) => sum + part * [0.2126, 0.7152, 0.0722][place], 0);
  const background = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = parse(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const written = [...document.querySelectorAll("body *")].filter((element) =>
    element.checkVisibility() && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
  const contrasts = written.map((element) => {
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(background(element))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
  return Math.min(...contrasts);
}"""


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A report of four methods, one with an awkward name and one without a value; 9 and 10 sort differently as text."""
    folder = tmp_path_factory.mktemp("compare")
    rows = [
        made_up_row("Nine", "nine", 0.5, 0.52, flops=9_000_000),
        made_up_row("Ten", "ten", 0.6, 0.61, flops=10_000_000),
        made_up_row("Ten, precomposed", "ten", flops=100_000_000),
        made_up_row(HOSTILE, HOSTILE, 0.4, 0.42, flops=2_000_000),
    ]
    data = made_up(*rows, left_out=[{"title": HOSTILE, "path": "runs/" + "x" * 200, "reason": HOSTILE}])
    (folder / "data").mkdir(parents=True)
    (folder / "data/comparison.json").write_text(json.dumps(data))
    (folder / "data/curves.json").write_text(json.dumps({"curves": made_up_curves(data)}))
    return redraw_comparison(folder)


@pytest.fixture
def analysis(analysed):
    """The report of an analysed run."""
    return analysed / "report.html"


@pytest.fixture
def open_page(browser):
    """Opens a file, and collects console messages and network requests."""
    contexts, troubles = [], []

    def opened(path, viewport=WIDE, scheme="light"):
        contexts.append(browser.new_context(viewport=viewport, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: troubles.append(dialog.message))
        own = ("data:", path.as_uri())
        page.on("request", lambda request: request.url.startswith(own) or troubles.append(request.url))
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []


@pytest.fixture(params=["comparison", "analysis"])
def report(request):
    return request.getfixturevalue(request.param)


def column(page, place):
    return page.eval_on_selector_all(
        "#results tbody tr", "(rows, place) => rows.map((row) => row.cells[place].dataset.value ?? null)", place
    )


def heading(page, text):
    return page.locator(HEADINGS, has_text=text)


def orders(page):
    return page.eval_on_selector_all(
        "#results thead th", "cells => cells.map((cell) => cell.getAttribute('aria-sort'))"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_pages_show_everything_and_ask_for_nothing(report, viewport, scheme, open_page):
    page = open_page(report, viewport, scheme)
    assert page.locator(".answer dt").count() == 5
    widths = page.eval_on_selector_all("img", "images => images.map((image) => image.complete && image.naturalWidth)")
    assert len(widths) >= 3
    assert all(widths)
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    page.eval_on_selector_all("details", "all => all.forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert page.evaluate(WORST_CONTRAST) >= 4.5
    targets = page.eval_on_selector_all("a[href^='#']", "links => links.map((link) => link.hash.slice(1))")
    assert targets
    assert all(page.evaluate("id => document.getElementById(decodeURIComponent(id)) !== null", t) for t in targets)


def test_the_two_schemes_differ_in_page_and_pictures(comparison, open_page):
    def look(scheme):
        page = open_page(comparison, WIDE, scheme)
        return page.evaluate("getComputedStyle(document.body).backgroundColor"), page.locator("img").first.screenshot()

    (paper, drawn), (night, drawn_at_night) = look("light"), look("dark")
    assert paper != night
    assert drawn != drawn_at_night, "the picture follows the screen"


def test_sorting_by_click(comparison, open_page):
    page = open_page(comparison)
    assert orders(page)[1] == "descending", "the rows come in this order"
    flops = next(i for i, text in enumerate(page.locator(HEADINGS).all_inner_texts()) if text.startswith("FLOPs"))
    heading(page, "FLOPs").click()
    assert column(page, flops) == ["2.0", "9.0", "10.0", "100.0"], "as numbers: as text, 10 is before 9"
    assert [order for order in orders(page) if order] == ["ascending"]
    heading(page, "FLOPs").click()
    assert column(page, flops) == ["100.0", "10.0", "9.0", "2.0"]
    assert orders(page)[flops] == "descending"
    heading(page, "Method").click()
    assert column(page, 0) == [HOSTILE, "Nine", "Ten", "Ten, precomposed"]
    assert orders(page)[0] == "ascending"
    assert orders(page)[flops] is None


def test_what_has_no_value_stays_at_the_end(comparison, open_page):
    page = open_page(comparison)
    for first in ("0.41", "0.605"):
        heading(page, "accuracy").first.click()
        values = column(page, 1)
        assert values[-1] is None
        assert float(values[0]) == pytest.approx(float(first))


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_sorting_by_keyboard(key, comparison, open_page):
    page = open_page(comparison)
    page.locator("#results .scroll").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent").startswith("Method")
    page.keyboard.press(key)
    assert column(page, 0) == [HOSTILE, "Nine", "Ten", "Ten, precomposed"]
    assert orders(page)[0] == "ascending"
    page.keyboard.press(key)
    assert column(page, 0)[0] == "Ten, precomposed"


def test_the_headings_can_be_hit_by_a_finger(comparison, open_page):
    page = open_page(comparison, PHONE)
    sizes = page.eval_on_selector_all(HEADINGS, "all => all.map((one) => one.getBoundingClientRect().height)")
    assert min(sizes) >= 24


def settles(page, script, expected):
    """Whether a script returns the expected value within a second; the page's policy forbids waiting inside it."""
    for _ in range(50):
        if (found := page.evaluate(script)) == expected:
            return True
        page.wait_for_timeout(20)
    raise AssertionError(f"{script} is {found!r}, not {expected!r}")


def test_a_picture_that_goes_on_beyond_the_screen_says_so(comparison, analysis, open_page):
    def told(page, kind=".plate"):
        return page.eval_on_selector_all(kind, "all => all.map((one) => one.parentElement.dataset.more)")

    assert set(told(open_page(comparison, WIDE))) == {""}
    page = open_page(comparison, PHONE)
    assert set(told(page, ".plate.wide")) == {"right"}
    first = "document.querySelector('.plate.wide').parentElement"
    assert settles(page, f"getComputedStyle({first}, '::after').opacity", "1")
    for moved, more in ((40, "left right"), (1_000_000, "left")):
        page.evaluate(f"document.querySelector('.plate.wide').scrollLeft = {moved}")
        assert settles(page, f"{first}.dataset.more", more)
    assert set(told(open_page(analysis, PHONE))) == {""}, "all of them fit"
