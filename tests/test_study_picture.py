"""The study's picture: which panels and points it has, and that its labels can be read."""

import json
import sys
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.text import Text

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.study import picture as study_picture


def summary(study, label, value, seed=0, flops=1e8, **changes):
    """As much of a run's summary as the picture needs."""
    metric = {"tiny-imagenet": "accuracy", "wikipedia": "loss"}.get(study, "HR@10")
    return {
        "study": study,
        "stage": "methods",
        "label": label,
        "method": label,
        "title": label.title(),
        "seed": seed,
        "shared_digest": "a",
        "metric": metric,
        "higher_is_better": metric != "loss",
        "valid": {metric: value},
        "test": {metric: value},
        "flops_training": flops,
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
    runs += [summary(places, f"method{place}", 0.5 + place / 1e4, flops=1e8 + 1e6 * place) for place in range(12)]
    return [*runs, summary(places, "intbmoe", 0.5, floors=floors), summary(places, "broken", 0.1)]


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
    assert families["dense-wide"] == families["swiglu-narrow"] == families["dense-placed"] == study_picture.CONTROLS
    assert families["intbmoe-one_layer"] == study_picture.OWN
    assert (families["dense"], families["intbmoe"]) == (study_picture.PARAMETERS, study_picture.OWN)
    dense = images.points["dense"]
    assert (dense.mean, dense.interval) == pytest.approx((38, 4.968), abs=1e-3), (
        "per cent, Student's t over three seeds"
    )
    assert images.points["intbmoe"].interval is None
    assert (images.floor, places.floor) == (None, ("visit counter", 0.4))
    assert places.error == pytest.approx((0.25 / 1081) ** 0.5)


def test_ablations_alone_make_no_panel(summaries):
    assert study_picture.gather([run for run in summaries if run["label"] == "intbmoe-no_gate"]) == []


def test_where_less_is_better_so_is_the_floor():
    floors = {"unigram": {"loss": 7.0}, "bigram": {"loss": 6.0}}
    (panel,) = study_picture.gather([summary("wikipedia", "intbmoe", 4.0, floors=floors)])
    assert (panel.floor, panel.error) == (("bigram", 6.0), 0)
    (axes,) = study_picture.draw([panel]).axes
    assert "lower is better" in axes.get_ylabel()


def test_labels_hide_neither_each_other_nor_leave_the_panel(summaries):
    figure = study_picture.draw(panels := study_picture.gather(summaries))
    for axes, panel in zip(figure.axes, panels, strict=True):
        titles = tuple(point.title for point in panel.points.values())
        boxes = [text.get_window_extent() for text in axes.texts if text.get_text().startswith(titles)]
        assert len(boxes) == len(titles)
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
        frame = axes.get_window_extent().padded(1)
        assert all(frame.contains(*corner) for box in boxes for corner in box.get_points())
    told = [text.get_text() for text in figure.axes[1].texts]
    assert "Broken, at 0.1" in told, "far from all others: at the edge, with its value"


def test_headings_say_the_differences_and_are_not_cut():
    studies = {"tiny-imagenet": 0.4, "wikipedia": 4.5}
    labels = ("dense", "dense-placed", "swiglu-wide", "intbmoe")
    runs = [
        summary(study, label, value + n / 100) for study, value in studies.items() for n, label in enumerate(labels)
    ]
    figure = study_picture.draw(study_picture.gather(runs))
    told = [axes.get_title(loc="left") for axes in figure.axes]
    assert told[0].endswith("dense +3.00, in its place +2.00, wide SwiGLU +1.00")
    assert told[1].endswith("dense +0.030, in its place +0.020, wide SwiGLU +0.010")
    first, second = (text.get_window_extent() for text in figure.findobj(Text) if text.get_text() in told)
    assert first.x1 < second.x0
    assert second.x1 < figure.bbox.width


def test_a_picture_comes_out(summaries, tmp_path, monkeypatch):
    monkeypatch.setattr(study_picture, "read_summaries", lambda folder: summaries[:4])
    monkeypatch.setattr(sys, "argv", ["picture.py", "--output", str(tmp_path / "study.png")])
    study_picture.main()
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


def test_without_runs_there_is_no_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["picture.py", "--results", str(tmp_path)])
    with pytest.raises(SystemExit):
        study_picture.main()
    assert "holds no finished run" in capsys.readouterr().err


def test_shares_are_of_as_many_test_examples_as_the_picture_says():
    files = [path for study in study_picture.TESTED for path in study_picture.RESULTS.glob(f"{study}--*--*--*.json")]
    assert files
    for path in files:
        run = json.loads(path.read_text(encoding="utf-8"))
        hits = run["test"][run["metric"]] * study_picture.TESTED[run["study"]][0]
        assert hits == pytest.approx(round(hits), abs=1e-6), path.name
