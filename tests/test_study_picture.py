"""The study's pictures: which panels and points they have, and that their labels can be read."""

import json
import sys
from itertools import combinations
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.study import inside
from benchmarks.study import picture as study_picture

from intbmoe.report.style import FAMILIES, PHONE_INCHES


def summary(study, label, value, seed=0, flops=1e8, **changes):
    """The part of a run's summary that the picture needs."""
    metric = {"tiny": "accuracy", "wikipedia": "loss"}.get(study.partition("-")[0], "HR@10")
    return {
        "study": study,
        "stage": "methods",
        "label": label,
        "method": label.partition("-")[0],
        "title": label.title(),
        "seed": seed,
        "shared_digest": "a",
        "metric": metric,
        "higher_is_better": metric != "loss",
        "valid": {metric: value},
        "test": {metric: value},
        "flops_training": flops,
        "format": 2,
        "floors": None,
        **changes,
    }


@pytest.fixture
def summaries():
    images, places = "tiny-imagenet", "foursquare"
    runs = [summary(images, "dense", value, seed) for seed, value in enumerate((0.36, 0.38, 0.40))]
    runs += [summary(images, "intbmoe", 0.41, flops=3e8), summary(images, "intbmoe-no_gate", 0.2, flops=2e8)]
    runs += [summary(images, "dense-wide", 0.42, flops=3e8), summary(images, "swiglu-wide", 0.43, flops=3e8)]
    runs += [summary(images, "intbmoe-one_layer", 0.41, flops=2e8), summary(images, "swiglu-narrow", 0.4, flops=2e8)]
    runs.append(summary(images, "dense-placed", 0.39))
    runs += [summary(images, "vmoe", 0.99, shared_digest="b"), summary(images, "soft", 0.99, stage="tune")]
    floors = {"popularity": {"HR@10": 0.05}, "visit counter": {"HR@10": 0.4}}
    runs += [summary(places, f"method{place}", 0.5 + place / 1e4, method="switch") for place in range(12)]
    return [*runs, summary(places, "intbmoe", 0.5, floors=floors), summary(places, "broken", 0.1, method="lory")]


def test_a_panel_holds_the_runs_of_its_tables_without_ablations(summaries):
    images, places = study_picture.gather(summaries)
    assert (images.study, places.study) == ("tiny-imagenet", "foursquare")
    assert images.points.keys() == {
        "dense",
        "intbmoe",
        "intbmoe-one_layer",
        "dense-wide",
        "swiglu-wide",
        "swiglu-narrow",
        "dense-placed",
    }
    assert len(places.points) == 14
    families = {label: point.family for label, point in images.points.items()}
    assert families == {label: "IntBMoE" if label.startswith("intbmoe") else "no experts" for label in families}
    assert {point.family for point in places.points.values()} == set(FAMILIES) - {"no experts"}
    means = [point.mean for point in images.points.values()]
    assert means == sorted(means, reverse=True), "the best on top"
    dense, own = images.points["dense"], images.points["intbmoe"]
    assert (dense.mean, dense.interval) == pytest.approx((38, 4.968), abs=1e-3), "per cent, Student's t"
    assert (own.seeds, own.interval) == (1, pytest.approx(4.968 * 3**0.5, abs=1e-3)), "dense's spread, of one seed"
    assert (images.floor, places.floor) == (None, ("visit counter", 0.4))
    assert places.error == pytest.approx((0.25 / 1081) ** 0.5)


def test_ablations_alone_make_no_panel(summaries):
    assert study_picture.gather([run for run in summaries if run["label"] == "intbmoe-no_gate"]) == []


def test_where_less_is_better_so_is_the_floor():
    floors = {"unigram": {"loss": 7.0}, "bigram": {"loss": 6.0}}
    (panel,) = study_picture.gather([summary("wikipedia-warmup", "intbmoe", 4.0, floors=floors)])
    assert (panel.floor, panel.error) == (("bigram", 6.0), 0)
    (axes,) = study_picture.draw([panel]).axes
    assert axes.get_xlabel() == "← better, loss on the test split"


def test_every_method_has_a_line_with_its_name_and_cost(summaries):
    figure = study_picture.draw(panels := study_picture.gather(summaries))
    for axes, panel in zip(figure.axes, panels, strict=True):
        labels = axes.get_yticklabels()
        assert [label.get_text() for label in labels] == [point.title for point in panel.points.values()]
        boxes = [label.get_window_extent() for label in labels]
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    costs = [label.get_text() for label in figure.axes[0].child_axes[0].get_yticklabels()]
    assert dict(zip(panels[0].points, costs, strict=True))["intbmoe"] == "3.0×"
    assert figure.get_size_inches()[0] == PHONE_INCHES
    told = [text.get_text().strip() for text in figure.axes[1].texts]
    assert told == ["Places: Foursquare, New York", "0.1"], "far from all others: at the edge, with its value"


def test_a_picture_comes_out(summaries, tmp_path, monkeypatch):
    monkeypatch.setattr(study_picture, "read_summaries", lambda folder: summaries[:4])
    monkeypatch.setattr(sys, "argv", ["picture.py", "--output", str(tmp_path / "study.svg")])
    study_picture.main()
    assert "prefers-color-scheme: dark" in (tmp_path / "study.svg").read_text(encoding="utf-8")


def test_removals_that_were_measured_by_accuracy_are_drawn_in_points():
    layer = {"layer": "blocks.2.moe", "drops": [0.02, -0.01], "mean": 0.005, "smallest": -0.01, "factor_alone": 0.0}
    (picture,) = inside.draw_drops({"layers": [layer], "examples": 50, "full": 0.4})
    (axes,) = picture.figure.axes
    assert [bar.get_height() for bar in axes.patches] == [2, -1]
    assert "(points)" in axes.get_ylabel()
    assert not axes.containers[1:], "no whiskers: no standard error was measured"


def test_without_runs_there_is_no_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["picture.py", "--results", str(tmp_path)])
    with pytest.raises(SystemExit):
        study_picture.main()
    assert "has no finished run" in capsys.readouterr().err


def test_shares_are_of_as_many_test_examples_as_the_picture_says():
    files = [path for study in study_picture.TESTED for path in study_picture.RESULTS.glob(f"{study}--*--*--*.json")]
    assert files
    for path in files:
        run = json.loads(path.read_text(encoding="utf-8"))
        hits = run["test"][run["metric"]] * study_picture.TESTED[run["study"]][0]
        assert hits == pytest.approx(round(hits), abs=1e-6), path.name
