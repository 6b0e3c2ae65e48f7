"""The page at ``/`` in a browser, with each of the three actions."""

import base64
import hashlib
import math
import re
import shutil
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

import intbmoe
from intbmoe.models.sequence import SequenceConfig
from intbmoe.report.style import CSS
from intbmoe.serve.page import page_response, parts
from intbmoe.tasks.sequences.serving import ItemPredictor

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens the page; at the end the console must be empty, and nothing may have been loaded from elsewhere."""
    contexts, said, asked = [], [], []

    def open_at(url, width=1000, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append((url, request.url)))
        page.goto(url)
        page.wait_for_selector("#form:not([hidden])")
        return page

    open_at.said = said
    yield open_at
    for context in contexts:
        context.close()
    assert said == []
    assert all(found.startswith((url, "data:", "blob:")) for url, found in asked)


def test_it_is_one_page_under_a_strict_policy():
    response = page_response()
    text, policy = response.body.decode(), response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        [inside] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
        assert len(inside) > 1000
    assert not re.findall(r'(?:src|href)="(?!data:)', text)
    assert response.headers["x-content-type-options"] == "nosniff"


def test_it_is_sent_again_only_when_it_has_changed():
    response = page_response()
    tag = response.headers["etag"]
    assert response.headers["cache-control"] == "no-cache"
    for known in (tag, f'"other", W/{tag}'):
        again = page_response(known)
        assert (again.status_code, again.body, again.headers["etag"]) == (304, b"", tag)
    for known in ("", '"other"', tag.strip('"')):
        assert page_response(known).status_code == 200


def test_no_part_is_longer_than_one_sitting_and_all_are_packed():
    package = Path(intbmoe.__file__).parent
    used = [package / "serve" / "page.html", *(file for files in parts().values() for file in files)]
    files = [CSS, *(package / "serve").glob("page*[!y]"), *(package / "tasks").glob("*/*.js")]
    assert sorted(files) == sorted(used), "every part is on the page"
    assert all(len(file.read_text().splitlines()) < 300 for file in files)
    with open(Path(__file__).parents[2] / "pyproject.toml", "rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["intbmoe"]
    names = [file.relative_to(package).as_posix() for file in files]
    assert all(any(fnmatch(name, pattern) for pattern in patterns) for name in names)


def fits(page):
    """Whether nothing is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_recommend(recommender, open_page):
    page = open_page(recommender.url)
    page.fill("[name=item]", "7")
    page.click("#add")
    page.click("[aria-label='Remove 1']")
    page.click("#go")
    page.wait_for_selector("ol.results li")
    assert page.locator("ol.results li").count() == 3
    offset = 0 if recommender.get("/v1/model").json["version"] == "one" else 1000
    assert page.locator("ol.results li").first.inner_text().split()[0] == str(2 + 3 + 7 + offset)
    assert page.locator("#tokens .token").all_inner_texts() == ["item 22", "item 33", "item 73"]
    page.select_option("#choice", "1")
    assert page.locator("#tokens .token").all_inner_texts() == ["item 23", "item 30", "item 70"]
    assert page.locator("#legend li").all_inner_texts() == ["block 0: 2", "block 3: 1"]
    assert fits(page)


def test_items_with_names_are_added_by_name(recommender, open_page):
    schema = ItemPredictor(SequenceConfig(items=3), names=("cafe", "gym", "the park")).request_schema
    page = open_page(recommender.url)
    build = "(schema) => { $('form').innerHTML = '<div id=own></div>'; forms.history.build($('own'), schema); }"
    page.evaluate(build, schema)
    assert page.input_value("[name=item]") == "cafe"
    page.fill("[name=item]", "the park")
    page.click("#add")
    assert page.evaluate("forms.history.request().history") == ["cafe", "gym", "the park", "the park"]


def test_a_problem_is_shown(recommender, open_page):
    page = open_page(recommender.url, scheme="dark")
    for _ in range(3):
        page.locator("ol.chips button").first.click()
    with page.expect_response("**/v1/recommend") as response:
        page.click("#go")
    assert response.value.status == 422
    assert "history" in page.locator(".problem").inner_text()
    assert "422" in open_page.said.pop()  # the browser's own line


def test_it_works_on_a_phone_and_in_the_dark(recommender, open_page):
    page = open_page(recommender.url, width=375, scheme="dark")
    page.click("#go")
    page.wait_for_selector("#tokens .token")
    assert fits(page)
    light, dark = (
        open_page(recommender.url, width=375, scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    )
    assert light != dark


def test_everything_can_be_reached_and_has_a_name(recommender, open_page):
    page = open_page(recommender.url)
    page.click("#go")
    page.wait_for_selector("#tokens .token")
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, input, select, textarea")]
             .filter((one) => one.offsetParent !== null)
             .filter((one) => !(one.labels?.length || one.getAttribute("aria-label") || one.textContent.trim()))
             .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    assert page.evaluate("document.documentElement.lang") == "en"
    page.locator("#go").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("ol.results li")


@pytest.mark.parametrize("width", [375, 1200])
def test_places_with_coordinates_are_drawn_on_a_map(recommender, open_page, width):
    """Across the antimeridian, on a plane whose scale bar is right in both directions."""
    page = open_page(recommender.url, width=width)
    places = {1: (179.9, 60.0), 2: (-179.9, 60.0), 3: (179.9, 60.05), 5: (180.0, 60.05)}
    results = [{"id": rank, "score": 1 / rank, "name": f"place {rank}"} for rank in range(1, 6)]
    for rank, (longitude, latitude) in places.items():
        results[rank - 1] |= {"longitude": longitude, "latitude": latitude}
    box = {"west": 179.9, "south": 60.0, "east": -179.9, "north": 60.05}
    page.evaluate("(answer) => forms.history.show(answer)", {"results": results, "viewport": box})
    assert page.locator(".results li").nth(3).inner_text().startswith("4. place 4")
    drawn = page.evaluate(
        """() => [...document.querySelectorAll(".map g")].map((g) => [g.querySelector("text").textContent,
          g.querySelector("title").textContent, ...g.getAttribute("transform").match(/[-\\d.]+/g).map(Number)])"""
    )
    at = {int(rank): (x, y) for rank, _, x, y in drawn}
    assert set(at) == set(places)
    assert drawn[-1][1].startswith("1. place 1: 60.00000, 179.90000")  # the best is drawn last, on top
    bar = page.locator(".map path.scale").get_attribute("d")
    start, _, _, end, _ = (float(number) for number in re.findall(r"[-\d.]+", bar))
    kilometre = (end - start) / float(page.locator(".map text.scale").text_content().removesuffix(" km"))
    east = 0.2 * 111.195 * math.cos(math.radians(60.025))
    assert (at[2][0] - at[1][0]) / kilometre == pytest.approx(east, rel=0.01)
    assert (at[1][1] - at[3][1]) / kilometre == pytest.approx(0.05 * 111.195, rel=0.03)
    assert at[5][0] == pytest.approx((at[1][0] + at[2][0]) / 2, abs=0.1)
    _, _, wide, high = map(float, page.locator(".map").get_attribute("viewBox").split())
    assert all(9 <= x <= wide - 9 and 9 <= y <= high - 9 for x, y in at.values())
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.evaluate("(answer) => forms.history.show(answer)", {"results": results[3:4]})
    assert page.locator(".map").count() == 0
