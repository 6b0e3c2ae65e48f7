"""What the study trains: studies of labels, in equal time, of sweeps and at rates of their own."""

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.study import plan as study_plan
from benchmarks.study.plan import TIMING

from intbmoe.recipes import load_recipe
from intbmoe.recipes.sets import find_variants


def test_a_study_of_labels_has_just_these_for_every_seed(monkeypatch):
    own = replace(study_plan.STUDIES["digits"], settings={"train.epochs": 4.0}, labels=("dense-wide", "intbmoe"))
    monkeypatch.setitem(study_plan.STUDIES, "digits", own)
    entries = study_plan.make_plan(["digits"])
    assert {(entry.label, entry.seed) for entry in entries} == {
        (label, seed) for label in own.labels for seed in entries[0].recipe["seeds"]
    }
    assert [entry.label for entry in entries[:2]] == list(own.labels)


def test_equal_time_gives_the_quicker_one_more_steps(monkeypatch, tmp_path):
    rows = {"intbmoe": {"step_ms": 30.0}, "dense-wide": {"step_ms": 20.0}}
    (tmp_path / TIMING.format("digits")).write_text(json.dumps({"rows": rows}))
    own = replace(study_plan.STUDIES["digits"], settings={"train.epochs": 4.0}, labels=("dense-wide",))
    monkeypatch.setitem(study_plan.STUDIES, "digits", replace(own, as_long_as="intbmoe"))
    monkeypatch.setattr(study_plan, "RESULTS", tmp_path)
    assert {entry.recipe["train"]["epochs"] for entry in study_plan.make_plan(["digits"])} == {6.0}


def test_a_sweep_trains_all_but_the_default_once(monkeypatch):
    own = replace(study_plan.STUDIES["digits"], sets="k,L")
    monkeypatch.setitem(study_plan.STUDIES, "digits", own)
    entries = study_plan.make_plan(["digits"])
    assert {entry.seed for entry in entries} == {0}
    expected = {variant.label for variant in find_variants(load_recipe("digits"), "k,L")} - {"intbmoe"}
    assert {entry.label for entry in entries} == expected


def test_each_tuned_variant_gets_the_rate_that_is_best_on_validation(monkeypatch, tmp_path):
    def tuned(label, rate, loss):
        recipe = {"train": {"lr": rate}}
        row = {"stage": "tune", "study": "digits", "label": label, "metric": "loss", "higher_is_better": False}
        return {**row, "valid": {"loss": loss}, "recipe": recipe}

    common = load_recipe("digits").train.lr
    rows = [tuned("dense", common / 2, 0.1), tuned("dense", common, 0.2), tuned("vmoe", common, 0.1)]
    assert study_plan.own_rates("digits", rows) == {"dense": common / 2, "vmoe": common}
    monkeypatch.setattr(study_plan, "read_summaries", lambda folder: rows)
    own = replace(study_plan.STUDIES["digits"], labels=("dense", "vmoe", "intbmoe"), own_rates=True)
    monkeypatch.setitem(study_plan.STUDIES, "digits", own)
    entries = study_plan.make_plan(["digits"])  # the others are trained at their rate already, or were not tuned
    assert {(entry.label, entry.recipe["train"]["lr"]) for entry in entries} == {("dense", common / 2)}
