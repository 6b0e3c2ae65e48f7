"""Whole runs of the embedded recipes, trained for a few steps, analysed and drawn."""

import csv
import errno
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from intbmoe import report
from intbmoe.analysis import analyse as analysis
from intbmoe.analysis import run_cost
from intbmoe.analysis.analyse import AnalyseOptions, analyse, read_summary, redraw
from intbmoe.analysis.drawing import DRAWERS, draw_coefficients, draw_participation
from intbmoe.cli import main
from intbmoe.recipes import load_recipe
from intbmoe.report.canvas import Picture, layer_title
from intbmoe.train import DamagedFileError, TrainingError, train

FEW = AnalyseOptions(examples=24)
ALL = ["training", "load_training", "load", "routing", "examples", "coefficients", "participation", "cost"]
SINGLE = {"example-1", "example-2", "example-3"}
VIEWS = {
    "digits": {"routing-class", "examples"},
    "stdlib": {"routing-kind-of-token", "routing-position", *SINGLE},
    "journeys": {"routing-token-type", "routing-hour-of-day", "routing-category", *SINGLE},
}


def small(name, method="intbmoe"):
    recipe = load_recipe(name)
    data = {"stdlib": {"max_bytes": 60_000}, "journeys": {"users": 60}}.get(name, {})
    options = recipe.moe.options if method == "intbmoe" else {}
    return replace(
        recipe,
        data=replace(recipe.data, **data),
        model=replace(recipe.model, dim=24, hidden=24),
        moe=replace(recipe.moe, name=method, experts=3, options=options),
        train=replace(recipe.train, steps=4, batch=8, warmup=0.0, log_every=2, eval_every=100.0),
    )


def render_only(patch, names=None, forms=("svg",)):
    """Render only these pictures (None: all) and forms, and the others empty: rendering takes most of the time."""
    content = Picture.content

    def render(picture, form):
        wanted = form in forms and (names is None or picture.name in names)
        return content(picture if wanted else replace(picture, figure=Figure((1, 1))), form)

    patch.setattr(Picture, "content", render)


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Shorten the sweep and render little; test_run_cost.py and the tests of the page run both in full."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_cost, "SWEEP", (1, 4))
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: None)
        render_only(patch)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of every embedded recipe, and on digits also of a method without bases and one without choices."""
    root = tmp_path_factory.mktemp("runs")
    wanted = [("digits", "intbmoe"), ("stdlib", "intbmoe"), ("journeys", "intbmoe"), ("digits", "switch")]
    wanted += [("digits", "soft"), ("digits", "dense")]
    return {f"{name}/{method}": train(small(name, method), root=root, quiet=True).path for name, method in wanted}


@pytest.fixture(scope="module")
def analysed(runs):
    """Analyses of the embedded recipes with IntBMoE; all but digits render only their own kind of picture."""
    folders = {"digits": analyse(runs["digits/intbmoe"], FEW)}
    with pytest.MonkeyPatch.context() as patch:
        render_only(patch, names=("example-1",))
        return folders | {name: analyse(runs[f"{name}/intbmoe"], FEW) for name in VIEWS if name not in folders}


@pytest.fixture
def run(runs, tmp_path):
    """A copy that a test may change, not analysed yet."""
    ignored = shutil.ignore_patterns("analysis")
    return Path(shutil.copytree(runs["digits/intbmoe"], tmp_path / "run", ignore=ignored))


@pytest.fixture
def undrawn(monkeypatch):
    """Skip pictures, which take most of an analysis's time, in tests about numbers."""
    for part in DRAWERS:
        monkeypatch.setitem(DRAWERS, part, lambda data: [])


@pytest.fixture
def unrendered(monkeypatch):
    render_only(monkeypatch, names=())


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", VIEWS)
def test_every_embedded_recipe(name, runs, analysed):
    folder = analysed[name]
    assert folder == runs[f"{name}/intbmoe"] / "analysis"
    summary = read_summary(folder)
    assert (summary["parts"], summary["left_out"]) == (ALL, {})
    assert summary["recipe"] == name
    assert summary["examples"] <= 24
    for part in ALL:
        assert json.loads((folder / "data" / f"{part}.json").read_bytes())
        with open(folder / "data" / f"{part}.csv", newline="", encoding="utf-8") as file:
            assert list(csv.DictReader(file))
    names = {
        "training",
        "load-training",
        "load-experts",
        "load-layers",
        "load",
        "coefficients",
        "participation",
        "cost",
    }
    names |= VIEWS[name]
    found = files(folder / "pictures")
    assert set(found) == {f"{picture}.{form}" for picture in names for form in ("png", "svg", "json")}
    for picture in names:
        assert found[f"{picture}.png"].startswith(b"\x89PNG")
        assert b"</svg>" in found[f"{picture}.svg"]
        caption = json.loads(found[f"{picture}.json"])
        assert set(caption) == {"title", "see", "how"}
        assert all(caption.values())


@pytest.mark.usefixtures("undrawn")
def test_participation_is_on_the_evaluated_metric(run):
    from intbmoe.train import evaluate

    folder = analyse(run, AnalyseOptions("test", 10_000))
    found = json.loads((folder / "data" / "participation.json").read_bytes())
    assert found["full"] == pytest.approx(evaluate(run, "test")["accuracy"], abs=1e-9)
    assert [layer["layer"] for layer in found["layers"]] == ["blocks.0.moe", "blocks.2.moe"]
    assert found["full_loss"] == pytest.approx(evaluate(run, "test")["loss"], abs=1e-6)
    assert [len(layer[name]) for layer in found["layers"] for name in ("rises", "errors", "drops")] == [3] * 6


@pytest.mark.usefixtures("unrendered")
def test_classes_and_layers_of_the_routing_pictures_are_chosen(run, capsys):
    """The paper's Figure 4: some classes, some layers."""
    main(["analyse", str(run), "--classes", "7", "3", "--layers", "2"])
    routing = json.loads((run / "analysis/data/routing.json").read_bytes())
    (view,) = routing["views"]
    assert (view["labels"], [layer["layer"] for layer in view["layers"]]) == (["7", "3"], ["blocks.2.moe"])
    assert routing["examples"] == 29, "all validation images of the two digits"
    load = json.loads((run / "analysis/data/load.json").read_bytes())
    assert len(load["layers"]) == 2, "nothing else is narrowed"
    caption = json.loads((run / "analysis/pictures/routing-class.json").read_bytes())
    assert "layer 2" in caption["see"]
    assert "29 examples" in caption["how"]
    before = files(run / "analysis")
    for words, told in (
        (["--classes", "12"], r"no class is called '12': did you mean '2'\?"),
        (["--layers", "1"], r"no layer is called '1': the layers whose tokens choose are 0 \(blocks\.0\.moe\), 2"),
        (["--redraw", "--layers", "2"], "--redraw computes nothing"),
    ):
        with pytest.raises(SystemExit, match=told):
            main(["analyse", str(run), *words])
    assert files(run / "analysis") == before


def test_counts_of_load_and_routing_agree(analysed):
    folder = analysed["journeys"]
    load = json.loads((folder / "data" / "load.json").read_bytes())
    routing = json.loads((folder / "data" / "routing.json").read_bytes())
    types = next(view for view in routing["views"] if view["name"] == "token type")
    for layer, shares in zip(load["layers"], types["layers"], strict=True):
        assert layer["counts"] == [sum(column) for column in zip(*shares["counts"], strict=True)], "every valid token"
        assert sum(layer["counts"]) == 2 * layer["tokens"]


def test_numbers_come_without_matplotlib_and_are_drawn_elsewhere(run, analysed, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as without:
        for module in [name for name in sys.modules if name.split(".")[0] in ("matplotlib", "jinja2")]:
            without.setitem(sys.modules, module, None)
        without.setattr(report, "find_spec", lambda name: None)
        with pytest.raises(SystemExit, match="matplotlib"):
            main(["analyse", str(run), "--examples", "24"])
        main(["analyse", str(run), "--examples", "24", "--numbers-only"])
        with pytest.raises(SystemExit, match="give only one of them"):
            main(["analyse", str(run), "--numbers-only", "--redraw"])
    assert f"draw it: intbmoe analyse {run} --redraw" in capsys.readouterr().out
    assert [path.name for path in (run / "analysis").iterdir()] == ["data"]
    elsewhere = shutil.copytree(run / "analysis", tmp_path / "elsewhere")
    redraw(elsewhere)
    assert files(elsewhere) == files(analysed["digits"])


@pytest.mark.usefixtures("undrawn")
def test_a_second_analysis_finds_the_same(run, analysed):
    assert files(analyse(run, FEW) / "data") == files(analysed["digits"] / "data")
    assert not list(run.glob(".analysis*"))


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize(
    ("method", "parts", "reason"),
    [
        ("switch", ["training", "load_training", "load", "routing", "examples"], "only IntBMoE composes blocks"),
        ("soft", ["training"], "do not choose"),
        ("dense", ["training"], "no MoE layer"),
    ],
)
def test_methods_get_the_parts_that_apply(method, parts, reason, runs, capsys):
    main(["analyse", str(runs[f"digits/{method}"]), "--examples", "16"])
    said = capsys.readouterr().out
    assert reason in said
    assert f"analysed: {runs[f'digits/{method}'] / 'analysis'}" in said
    summary = read_summary(runs[f"digits/{method}"] / "analysis")
    assert summary["parts"] == parts
    assert sorted([*parts, *summary["left_out"]]) == sorted(ALL)


@pytest.mark.usefixtures("undrawn")
def test_a_failed_analysis_leaves_the_earlier_one(run, analysed, monkeypatch):
    shutil.copytree(analysed["digits"], run / "analysis")
    before = files(run / "analysis")
    monkeypatch.setitem(DRAWERS, "coefficients", lambda data: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        analyse(run, FEW)
    assert files(run / "analysis") == before
    assert not list(run.glob(".analysis*"))


def test_a_full_disk_is_explained_and_nothing_is_left(runs, monkeypatch):
    def full(value):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(analysis, "to_json", full)
    run = runs["digits/dense"]
    before = set(run.iterdir())
    with pytest.raises(SystemExit, match=r"no space left to write .*dense/0/analysis: free some space"):
        main(["analyse", str(run), "--numbers-only", "--examples", "8"])
    assert set(run.iterdir()) == before


def test_unfinished_and_damaged_runs_are_errors_with_a_message(run, tmp_path):
    with pytest.raises(TrainingError, match="is not a run directory"):
        analyse(tmp_path)
    with pytest.raises(TrainingError, match="holds no analysis"):
        redraw(run / "analysis")
    done = (run / "done.json").read_bytes()
    (run / "done.json").write_text("{}")
    with pytest.raises(DamagedFileError, match="cannot be read back"):
        analyse(run)
    (run / "done.json").unlink()
    with pytest.raises(TrainingError, match="is not finished"):
        analyse(run)
    (run / "done.json").write_bytes(done)
    (run / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(DamagedFileError, match="truncated or altered"):
        analyse(run)
    (run / "config.yaml").write_text("name: digits\n")
    with pytest.raises(DamagedFileError, match="cannot be read back"):
        analyse(run)
    with pytest.raises(SystemExit, match=r"intbmoe: .* cannot be read back"):
        main(["analyse", str(run)])
    assert not (run / "analysis").exists()


def test_an_analysis_of_an_earlier_version_is_refused_with_the_command_that_makes_it_anew(run):
    data = run / "analysis" / "data"
    data.mkdir(parents=True)
    (data / "analysis.json").write_text(json.dumps({"run": {}, "parts": ["recipes"], "left_out": {}}))
    again = f"earlier version of intbmoe: run intbmoe analyse {run}"
    with pytest.raises(TrainingError, match=again):
        redraw(run / "analysis")
    (data / "analysis.json").write_text(json.dumps({"run": {}, "parts": ["participation"], "left_out": {}}))
    (data / "participation.json").write_text(json.dumps({"metric": "accuracy", "layers": [{"drops": [0.1]}]}))
    with pytest.raises(TrainingError, match=again):  # an earlier version measured only accuracies
        redraw(run / "analysis")


@pytest.mark.usefixtures("undrawn")
def test_metrics_that_are_gone_are_left_out(run):
    (run / "metrics.jsonl").unlink()
    assert read_summary(analyse(run, FEW))["left_out"] == {"training": "metrics.jsonl is missing or empty"}


@pytest.mark.usefixtures("undrawn")
def test_runs_of_old_kept_no_loads_of_single_layers(run):
    (run / "loads.jsonl").unlink()
    left_out = read_summary(analyse(run, FEW))["left_out"]
    assert list(left_out) == ["load_training"]
    assert "older versions" in left_out["load_training"]


def participation(rises, errors=0.001, **more):
    errors = [errors] * len(rises)
    layer = {"layer": "blocks.4.moe", "rises": rises, "errors": errors, "drops": [0.0] * len(rises)}
    layer |= {"mean": sum(rises) / len(rises), "smallest": min(rises), "factor_alone": 0.0}
    about = {"metric": "accuracy", "split": "valid", "examples": 8, "full": 0.5, "full_loss": 0.2}
    counts = {"hurting": 1, "helping": 0, "sure": 1}
    return {**about, **counts, "coefficients": "linear", "layers": [layer], **more}


@pytest.mark.parametrize("rises", [[0.0, 0.0], [0.25, -0.125, 0.0], [-0.5], [1e-6, 0.5]])
def test_bars_begin_at_zero_on_a_plain_axis(rises):
    (picture,) = draw_participation(participation(rises))
    axes = picture.figure.axes[0]
    assert [bar.get_height() for bar in axes.patches] == rises
    low, high = axes.get_ylim()
    assert low <= min(rises) - 0.002 <= max(rises) + 0.002 <= high, "with two standard errors"
    assert axes.get_yscale() == "linear"
    assert "layer 4" in picture.see


def test_a_thousandth_of_the_loss_does_not_look_large():
    (picture,) = draw_participation(participation([0.0002, 0.0001], errors=1e-5))
    low, high = picture.figure.axes[0].get_ylim()
    assert 0.1 * (high - low) > 0.0002


def test_a_caption_says_how_sure_it_is():
    (picture,) = draw_participation(participation([0.01] * 16, hurting=12, helping=1, sure=9))
    assert "rises by more than two standard errors in 12 of 16 cases and falls by as much in 1" in picture.see
    assert "by chance alone it would be about 0.4 each" in picture.see
    assert "Corrected for 16 comparisons, 9 of the rises are certain." in picture.see
    assert "By accuracy the model is worse by +0.00 points to +0.00 points." in picture.see
    (alone,) = draw_participation(participation([0.01], errors=None, examples=1))
    assert "A single example has no standard error" in alone.see


def test_one_block_is_drawn_without_a_cosine():
    layer = {"layer": "moe", "path": "value", "coefficients": [[1.0]], "normalised": [[1.0]], "mean_cosine": None}
    assert "one block only" in draw_coefficients({"layers": [layer]})[0].see


def test_titles_of_layers():
    assert [layer_title(name) for name in ("blocks.2.moe", "backbone.head")] == ["layer 2", "head"]
