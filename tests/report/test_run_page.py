"""The page of an analysed run: what is in the folder is on the page."""

import json
import shutil

import pytest

from intbmoe.analysis.page import answer_run, layer_table, run_page, theme_of
from intbmoe.report.images import LARGEST_SVG, read_image
from intbmoe.report.page import Figure, write_page

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000960000004b0806000000"  # 150 by 75 pixels, according to its header
)
SVG = '<svg width="72pt" height="36pt" viewBox="0 0 72 36"><style>{}</style></svg>'


@pytest.fixture
def folder(analysed, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(analysed, tmp_path / "analysis")


def figures(page):
    return [block for section in page.sections for block in section.blocks if isinstance(block, Figure)]


def test_every_picture_of_the_folder_is_on_the_page(analysed):
    captions = [json.loads(path.read_bytes()) for path in (analysed / "pictures").glob("*.json")]
    found = figures(run_page(analysed))
    assert sorted(figure.title for figure in found) == sorted(caption["title"] for caption in captions)
    assert sorted(figure.how for figure in found) == sorted(caption["how"] for caption in captions)
    html = (analysed / "report.html").read_text()
    assert html.count("<img") == len(captions)


def test_numbers_lead_back_to_the_run(analysed):
    html = (analysed / "report.html").read_text()
    trace = json.loads((analysed / "data/analysis.json").read_bytes())["run"]
    assert trace["name"] == "digits/intbmoe/0"
    assert trace["config_sha256"][:16] in html
    assert trace["model_sha256"][:16] in html
    for link in ("../config.yaml", "../model.safetensors"):
        assert f'href="{link}"' in html
        assert (analysed / link).is_file()


def test_a_part_and_a_picture_that_nobody_knows_appear_by_themselves(folder):
    summary = json.loads((folder / "data/analysis.json").read_bytes())
    summary["parts"].append("weather_layers")
    summary["left_out"] = {"tides": "no sea"}
    (folder / "data/analysis.json").write_text(json.dumps(summary))
    (folder / "data/weather_layers.json").write_text(json.dumps({"layers": [{"layer": "a", "wind": 3.5}]}))
    (folder / "data/weather_layers.csv").write_text("layer,wind\na,3.5\nb,\n")
    (folder / "pictures/weather-map.svg").write_text(SVG.format(""))
    (folder / "pictures/weather-map.json").write_text('{"title": "A map", "see": "Clouds.", "how": "By looking."}')
    sections = {section.id: section for section in run_page(folder).sections}
    figure, layers, numbers = sections["weather"].blocks
    assert (figure.title, figure.source) == ("A map", "pictures/weather-map.svg, data/weather_layers.json")
    assert [column.title for column in layers.columns] == ["layer", "wind"]
    assert [[cell.value for cell in row] for row in numbers.rows] == [["a", 3.5], ["b", None]]
    assert sections["left-out"].blocks[0].items == [("Tides:", "no sea.")]
    assert "By looking." in write_page(folder, run_page(folder)).read_text()


def test_what_begins_alike_stands_together():
    assert [theme_of(name) for name in ("load", "load_training", "load-experts", "routing-kind-of-token")] == [
        "load",
        "load",
        "load",
        "routing",
    ]


def test_a_table_by_layer_takes_single_numbers_and_counts_the_dead():
    load = {"layer": "a", "counts": [1, 0], "present": [0, 1], "dead": [1], "tokens": 1000, "entropy": None}
    table = layer_table([load, {**load, "layer": "b", "entropy": 0.25}])
    assert [column.title for column in table.columns] == ["layer", "tokens", "entropy", "without a token"]
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["a", "1,000", "–", "1"],
        ["b", "1,000", "0.25", "1"],
    ]
    assert layer_table([{"layer": "a", "dead": [[0], [1]]}]) is None


def test_the_answer_of_a_run_makes_no_claim():
    summary = {
        "title": "IntBMoE", "seed": 3, "recipe": "digits", "task": "vision", "metric": "loss", "split": "valid",
        "higher_is_better": False, "test": {"loss": 1.5, "accuracy": 0.5}, "examples": 8, "examples_of_split": 9,
    }  # fmt: skip
    layer = {"present": [0, 1, 2], "dead": [2], "worst_case": 2.25}
    removals = {"layers": [{"rises": [0.1, -0.1, 0.0]}], "examples": 8, "hurting": 1, "helping": 1, "sure": 0}
    parts = {"participation": removals, "load": {"unit": "block", "layers": [layer]}}
    answer = answer_run(summary, parts)
    what, on_what, result, inside, sure = (text for _, text in answer.lines)
    assert answer.verdict == "one run"
    assert "a single run" in what
    assert "8 of 9 valid examples" in on_what
    assert result == "loss 1.5000 on the test split, lower is better. Also accuracy 50.00 %."
    assert inside == (
        "Without one expert base the loss rises by more than two standard errors in 1 of 3 cases and falls by as much "
        "in 1; by chance alone it would be about 0.1 each. Corrected for 3 comparisons, none of the rises are certain. "
        "1 of 3 blocks got no token; the fullest has 2.25 times the mean load."
    )
    assert sure.startswith("One seed says nothing about the method")


def test_large_pictures_are_png(tmp_path):
    (tmp_path / "a.svg").write_text(SVG.format("@media (prefers-color-scheme: dark) {}"))
    (tmp_path / "a.png").write_bytes(PIXEL)
    image = read_image(tmp_path, "a")
    assert image.uri.startswith("data:image/svg+xml;base64,")
    assert (image.width, image.height, image.adapts) == (96, 48, True)
    (tmp_path / "a.svg").write_text(SVG.format("") + " " * LARGEST_SVG)
    image = read_image(tmp_path, "a")
    assert image.uri.startswith("data:image/png;base64,")
    assert (image.width, image.height, image.adapts) == (96, 48, False)
    assert read_image(tmp_path, "none") is None
