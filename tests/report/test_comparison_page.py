"""The page of a comparison: from real runs, from data made up by hand, and from damaged runs."""

import json
import re
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
from made_up_comparison import HOSTILE, compare_runs, made_up, made_up_curves, made_up_row, plan_of

from intbmoe.compare.compare import compare
from intbmoe.compare.page import collect, comparison_page, redraw_comparison, thin, write_comparison_page
from intbmoe.compare.pictures import draw_comparison, draw_table
from intbmoe.compare.plan import CompareOptions, sort_out
from intbmoe.compare.table import file_stem, notes, results_table
from intbmoe.counting import shares_of
from intbmoe.files import digest
from intbmoe.report import trace
from intbmoe.report.canvas import save_picture
from intbmoe.report.images import read_image
from intbmoe.report.page import render
from intbmoe.report.trace import find_flaw, trace_run
from intbmoe.train import RunDirectory, load, train
from intbmoe.train import run as run_module


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sections(page):
    return {section.id: section for section in page.sections}


def cells(table, column):
    place = [one.title for one in table.columns].index(column)
    return [row[place].text for row in table.rows]


@pytest.fixture
def runs(trained, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(trained, tmp_path / "runs")


@pytest.fixture(scope="module")
def compared(small_recipe, trained):
    """The comparison of the real runs, with its report written."""
    comparison = compare_runs(small_recipe, trained)
    write_comparison_page(comparison)
    return comparison


def test_the_report_of_real_runs(compared, trained):
    path = trained / "digits/compare" / file_stem(compared.methods) / "report.html"
    html = path.read_text()
    for job in compared.plan.jobs:
        assert str(job.run.path) in html
        assert digest((job.run.path / "config.yaml").read_bytes())[:12] in html
        assert f"{100 * job.run.result['test']['accuracy']:.2f} %" in html
        link = f"../../{job.variant.label}/{job.seed}/"
        assert f'href="{link}"' in html
        assert (path.parent / link).resolve() == job.run.path.resolve()
    captions = {path.stem for path in (path.parent / "pictures").glob("*.json")}
    assert captions == {"cost", "curves", "load"}
    assert html.count("<img") == 3
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", html)


def test_it_is_redrawn_identically_from_its_data_alone(compared, tmp_path):
    folder = compared.plan.folder / file_stem(compared.methods)
    shutil.copytree(folder / "data", tmp_path / "data")
    redraw_comparison(tmp_path)
    assert files(tmp_path) == files(folder)


def test_shares_are_those_of_the_layers(compared, trained):
    rows = {row["title"]: row for row in collect(compared)["comparison"]["rows"]}
    shares = {title: (row["participation"], row["execution"], row["materialization"]) for title, row in rows.items()}
    assert shares["IntBMoE"] == shares["IntBMoE, precomposed"] == (2, 2, 4)
    assert shares["Switch Transformer"] == (1, 1, 0)
    model = load(trained / "digits/switch/0")
    assert shares_of(model, (), active=1.25) == (1.25, 1.25, 0, None), "where the trained router decides"
    assert shares_of(torch.nn.Linear(2, 2), ()) == (1, 1, 0, None), "a plain FFN"


def test_materialization_says_what_it_grows_with():
    segments = {"materialization": 13.0, "materialization_per": "segment"}
    rows = [made_up_row("A", "a", 0.5, **segments), made_up_row("B", "b", 0.5, materialization=8.0)]
    table = results_table(rows, "").select("materialization")
    found = [(row[0].text, row[0].small, row[0].value) for row in table.rows]
    assert found == [("1 per segment", "13 for one example", 13.0), ("8", None, 8.0)]


def damage_config(run):
    (run / "config.yaml").write_text("name: digits\n")


def damage_result(run):
    (run / "done.json").write_text('{"test": {}}')


def damage_json(run):
    (run / "done.json").write_text('{"test": ')


def damage_model(run):
    (run / "model.safetensors").write_bytes(b"cut")


def damage_metrics(run):
    (run / "metrics.jsonl").write_text("{}}\n{}\n")


def unfinish(run):
    (run / "done.json").unlink()


DAMAGES = [damage_config, damage_result, damage_json, damage_model, damage_metrics, unfinish]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_run_is_named_and_left_out(damage, small_recipe, runs):
    damaged = runs / "digits/switch/1"
    damage(damaged)
    sound, (left_out,) = sort_out(plan_of(small_recipe, runs).jobs)
    assert (left_out["path"], left_out["title"]) == (str(damaged), "Switch Transformer, seed 1")
    assert left_out["reason"]
    assert len(sound) == 3


def test_compare_tells_damaged_runs_and_ends_with_a_report(small_recipe, runs, capsys):
    damaged = runs / "digits/switch/1"
    damage_model(damaged)
    assert compare(small_recipe, CompareOptions(methods="switch,intbmoe", seeds=2, root=runs)) == 1
    report = runs / "digits/compare/switch+intbmoe/report.html"
    said = capsys.readouterr().out.replace("\n", "")
    assert f"left out: Switch Transformer, seed 1 ({damaged}): {damaged}/model.safetensors is truncated" in said
    assert str(report) in said
    html = report.read_text()
    assert "1 run left out, named below" in html
    assert f"Switch Transformer, seed 1 ({damaged})" in html
    assert "No claim: there is only one seed of Switch Transformer" in html


def test_sound_runs_have_no_flaw(trained):
    assert find_flaw(RunDirectory(trained / "digits/intbmoe/0"), "accuracy") is None
    assert "'HR@5' is missing" in find_flaw(RunDirectory(trained / "digits/intbmoe/0"), "HR@5")


def test_results_without_environment_still_stand(runs):
    run = RunDirectory(runs / "digits/switch/0")
    assert trace_run(run)["command"]
    (run.path / "environment.json").unlink()
    assert trace_run(run)["command"] is None
    assert find_flaw(run, "accuracy") is None


def test_a_package_outside_of_a_checkout_has_results_too(small_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "git_state", lambda folder: None)
    run = train(replace(small_recipe, train=replace(small_recipe.train, steps=1)), tmp_path, quiet=True)
    assert find_flaw(run, "accuracy") is None
    assert trace_run(run)["commit"] is None
    assert trace_run(run)["torch"] == torch.__version__


def test_a_mistake_of_ours_is_not_a_damaged_run(trained, monkeypatch):
    monkeypatch.setattr(trace, "_command", lambda words: words.nothing_of_the_kind)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        find_flaw(RunDirectory(trained / "digits/intbmoe/0"), "accuracy")


# Made up by hand.

GRID = [made_up_row(f"IntBMoE, K = {k}", label, value, value + 0.01, method="intbmoe") for k, label, value in
        [(1, "intbmoe-blocks1", 0.5), (8, "intbmoe", 0.7), (16, "intbmoe-blocks16", 0.75)]]  # fmt: skip
ABLATIONS = [
    made_up_row("IntBMoE", "intbmoe", 0.7, 0.7, method="intbmoe"),
    made_up_row("IntBMoE, w/o gate", "intbmoe-no_gate", 0.6, 0.65, method="intbmoe"),
]


def variants(rows):
    return [{"title": row["title"], "value": row["title"].rpartition("= ")[2], "label": row["label"]} for row in rows]


def test_a_sensitivity_figure_for_each_grid_that_was_asked_for():
    data = made_up(*GRID, sets={"K": variants(GRID)})
    picture = {picture.name: picture for picture in draw_comparison(data, [])}["sensitivity"]
    (axes,) = picture.figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "8", "16"]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([50.5, 70.5, 75.5])
    assert picture.see == "K: best at 16, all within 25.00 points."
    assert "sensitivity" not in {picture.name for picture in draw_comparison(made_up(*GRID), [])}


def test_ablations_have_a_table_of_metrics_and_one_of_distances(tmp_path):
    page = comparison_page(made_up(*ABLATIONS, sets={"ablations": variants(ABLATIONS)}), tmp_path)
    whole, distance = sections(page)["ablations"].blocks
    assert cells(whole, "Variant") == ["full", "w/o gate"]
    assert cells(whole, "accuracy") == ["70.00 %", "62.50 %"]
    assert cells(distance, "Variant") == ["w/o gate"]
    assert cells(distance, "accuracy") == ["−7.50 points"]
    assert "ablations" not in sections(comparison_page(made_up(*ABLATIONS), tmp_path))


def test_rows_come_best_first_and_those_without_value_last(tmp_path):
    rows = [made_up_row("A", "a", 0.5), made_up_row("B", "b", 0.9), made_up_row("B, precomposed", "b")]
    for higher, order in ((True, ["B", "A", "B, precomposed"]), (False, ["A", "B", "B, precomposed"])):
        (table,) = sections(comparison_page(made_up(*rows, higher_is_better=higher), tmp_path))["results"].blocks
        assert cells(table, "Method") == order
        assert table.columns[1].sorted == ("descending" if higher else "ascending")
        assert table.marked == frozenset(), "with one seed nothing stands out"
    won = made_up(made_up_row("A", "a", 0.5, 0.5), made_up_row("B", "b", 0.9, 0.9))
    (table,) = sections(comparison_page(won, tmp_path))["results"].blocks
    assert table.marked == {0}


def test_floors_are_shown(tmp_path):
    data = made_up(made_up_row("A", "a", 0.5), floors={"popularity": {"accuracy": 0.25}})
    (table,) = sections(comparison_page(data, tmp_path))["floors"].blocks
    assert cells(table, "accuracy") == ["25.00 %"]
    assert "floors" not in sections(comparison_page(made_up(made_up_row("A", "a", 0.5)), tmp_path))


def test_ceilings_are_shown_and_are_nothing_to_beat(tmp_path):
    data = made_up(made_up_row("A", "a", 0.5)) | {"ceilings": {"the planted rule": {"accuracy": 0.8}}}
    page = comparison_page(data, tmp_path)
    (table,) = sections(page)["ceilings"].blocks
    assert "the planted rule" in table.markdown()
    assert "does not beat" not in str(page)


def test_hostile_names_are_text(tmp_path):
    row = made_up_row(HOSTILE, HOSTILE, 0.5, 0.6)
    left_out = [{"title": HOSTILE, "path": HOSTILE, "reason": HOSTILE}]
    names = {"recipe": HOSTILE, "methods": HOSTILE, "command": HOSTILE, "floors": {HOSTILE: {"accuracy": 0.1}}}
    sets = {"ablations": [{"title": HOSTILE, "value": HOSTILE, "label": HOSTILE}] * 2}
    html = render(comparison_page(made_up(row, left_out=left_out, sets=sets, **names), tmp_path))
    assert "<script>alert" not in html
    assert html.count("<script") == 1, "its own"
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&#34;&#39;&amp;" in html
    attributes = re.findall(r'(?:href|id|title|aria-label|data-value)="([^"]*)"', html)
    assert any("alert" in value for value in attributes)
    assert not any("<" in value or "'" in value for value in attributes)


def test_every_picture_is_drawn_from_json_alone():
    data = made_up(*GRID, made_up_row("Dense", "dense", 0.4, method="dense"), sets={"K": variants(GRID)})
    curves = made_up_curves(data)
    kept = json.loads(json.dumps([data, curves]))
    found = [draw_comparison(*given) for given in ((data, curves), kept)]
    assert [picture.name for picture in found[0]] == ["cost", "curves", "load", "sensitivity"]
    for one, other in zip(*found, strict=True):
        assert one.content("svg") == other.content("svg")


@pytest.mark.parametrize("number", [1, 2, 7, 40])
def test_names_in_the_cost_picture_never_cover_each_other(number):
    rows = [made_up_row(f"A method {i}", f"m{i}", 0.5 + 0.001 * (i % 5), flops=10**6 * (i + 1)) for i in range(number)]
    pictures = draw_comparison(made_up(*rows), [])
    if number == 1:
        assert pictures == []
        return
    figure = pictures[0].figure
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        boxes = [text.get_window_extent(renderer) for text in axes.texts]
        assert boxes
        assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])


def test_equal_costs_have_no_panel_and_are_told():
    rows = [made_up_row(f"M{i}", f"m{i}", 0.5 + 0.01 * i, flops=10**6 * (i + 1), seconds=1.0 + i) for i in range(4)]
    (cost,) = draw_comparison(made_up(*rows), [])
    assert [axes.get_xlabel() for axes in cost.figure.axes] == ["FLOPs of one example (M)", "training, seconds per run"]
    assert "Not drawn, because it is about the same for all: parameters (M), 0.5." in cost.see
    several = [{**row, "params": 10**6 * (place + 1)} for place, row in enumerate(rows)]
    assert len(draw_comparison(made_up(*several), [])[0].figure.axes) == 3
    same = [{**row, "flops": 10**6, "seconds": 1.0} for row in rows]
    assert len(draw_comparison(made_up(*same), [])[0].figure.axes) == 1, "one is left where all are equal"


def lines_by_colour(axes):
    return Counter(line.get_color() for line in axes.lines)


def test_of_many_methods_few_lines_stand_out():
    names = ["intbmoe", "dense", *(f"m{i}" for i in range(12))]
    rows = [made_up_row(name.upper(), name, 0.3 + 0.02 * place, 0.4) for place, name in enumerate(names)]
    data = made_up(*rows)
    curves, load = draw_comparison(data, made_up_curves(data))[1:]
    for picture in (curves, load):
        assert lines_by_colour(picture.figure.axes[0]) == {
            "#bbbbbb": 18, "#d55e00": 2, **dict.fromkeys(("#0072b2", "#009e73", "#cc79a7", "#e69f00"), 2)
        }  # fmt: skip
        texts = [text.get_text() for text in picture.figure.legends[0].get_texts()]
        assert texts == ["INTBMOE", "DENSE", "M9", "M10", "M11", "9 others"], "the best by the table"
        assert "Grey: M0, M1," in picture.see
    few = made_up(*rows[:5])
    without_load = [one for one in made_up_curves(few) if one["label"] != "dense" or one["name"] == "loss"]
    picture, load = draw_comparison(few, without_load)[1:]
    colours = [[handle.get_color() for handle in of.figure.legends[0].legend_handles] for of in (picture, load)]
    assert colours[0][:1] + colours[0][2:] == colours[1], "a method keeps its colour if another has no line"
    assert len(lines_by_colour(picture.figure.axes[0])) == 5
    assert "Grey" not in picture.see


def test_intbmoe_has_a_star_in_the_table(tmp_path):
    rows = [made_up_row("A", "a", 0.5), *ABLATIONS, made_up_row("IntBMoE, precomposed", "intbmoe", method="intbmoe")]
    page = comparison_page(made_up(*rows), tmp_path)
    (table,) = sections(page)["results"].blocks
    assert [cells(table, "Method")[place] for place in sorted(table.starred)] == [
        "IntBMoE", "IntBMoE, w/o gate", "IntBMoE, precomposed"
    ]  # fmt: skip
    assert "★: IntBMoE and its variants." in table.notes
    assert render(page).count(' starred"') == 3
    (without,) = sections(comparison_page(made_up(rows[0]), tmp_path))["results"].blocks
    assert not without.starred
    assert not any("★" in note for note in without.notes)


def test_thinning_keeps_the_ends():
    assert thin(list(range(5)), 9) == [0, 1, 2, 3, 4]
    found = thin(list(range(1000)), 11)
    assert (len(found), found[0], found[-1]) == (11, 0, 999)


def test_refused_variants_are_named(compared):
    refused = replace(compared, plan=replace(compared.plan, refused={"Lory": "it looks ahead"}))
    data = collect(refused)["comparison"]
    assert data["left_out"] == [{"title": "Lory", "path": "", "reason": "it looks ahead"}]


def test_tables_and_page_say_that_nothing_was_validated_and_that_the_best_was_chosen(tmp_path):
    plain = made_up_row("Dense", "dense", 0.9)
    assert not any("Nothing was validated" in note for note in notes([plain]))
    other = made_up_row("Switch", "switch", 0.8, validated=False, report="best")
    on_page = comparison_page(made_up(plain, other), tmp_path).sections[0].blocks[0].notes
    for found in (notes([plain, other]), on_page):
        assert any("Nothing was validated" in note for note in found)
        assert any("chosen on that split" in note for note in found)
    assert "The last step is reported." in notes([made_up_row("Switch", "switch", 0.8, validated=False)])


def test_the_picture_of_the_table_fits_a_phone(tmp_path):
    rows = [made_up_row("a variant with a name that is far too long", "long", 0.5, 0.6), made_up_row("B", "b", 0.7)]
    picture = draw_table(rows, "digits", higher_is_better=True)
    save_picture(picture, tmp_path / "table.svg")
    image = read_image(tmp_path, "table")
    assert image.adapts
    assert image.fits_phone
    labels = [label.get_text() for label in picture.figure.axes[0].get_yticklabels()]
    assert labels == ["a variant with a name…", "B"]
