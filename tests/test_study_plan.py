"""What the study trains: by label, in equal time, in sweeps, and at separate learning rates."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.study import plan as study_plan
from benchmarks.study.plan import TIMING

from intbmoe.recipes import compute, load_recipe
from intbmoe.recipes.sets import find_variants

COUNTED = {}


@pytest.fixture(autouse=True)
def _count_each_model_once(monkeypatch):
    """Plans of the same study ask for the same models, and counting one runs it."""
    count = compute._flops

    def count_once(recipe, moe):
        key = repr((recipe, moe.name, moe.experts, moe.options))
        if key not in COUNTED:
            COUNTED[key] = count(recipe, moe)
        return COUNTED[key]

    monkeypatch.setattr(compute, "_flops", count_once)


def test_a_study_of_labels_has_just_these_for_every_seed(monkeypatch):
    own = replace(study_plan.STUDIES["digits"], settings={"train.epochs": 4.0}, labels=("dense-wide", "intbmoe"))
    monkeypatch.setitem(study_plan.STUDIES, "digits", own)
    entries = study_plan.make_plan(["digits"])
    assert {(entry.label, entry.seed) for entry in entries} == {
        (label, seed) for label in own.labels for seed in entries[0].recipe["seeds"]
    }
    assert [entry.label for entry in entries[:2]] == list(own.labels)


def test_pairs_within_reach_of_a_decision_get_more_seeds(monkeypatch):
    own = replace(study_plan.STUDIES["digits"], pairs=("intbmoe", "vmoe"))
    monkeypatch.setitem(study_plan.STUDIES, "digits", own)
    entries = study_plan.make_plan(["digits"], stages=("pairs",))
    assert [(entry.label, entry.seed) for entry in entries] == [
        (label, seed) for seed in (3, 4, 5) for label in ("intbmoe", "vmoe")
    ]
    before = {entry.digest for entry in study_plan.make_plan(["digits"], stages=study_plan.STAGES[:5])}
    assert before.isdisjoint(entry.digest for entry in entries)


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


def test_all_rates_are_tried_in_full_and_more_seeds_get_the_best(monkeypatch):
    base = study_plan.STUDIES["digits"]
    common = load_recipe("digits").train.lr
    monkeypatch.setitem(study_plan.STUDIES, "digits", replace(base, rates=(common / 2, common)))
    own = replace(base, labels=("dense", "vmoe", "intbmoe"), own_rates=True, rates=())
    monkeypatch.setitem(study_plan.STUDIES, "digits-rates", own)
    rows = []
    monkeypatch.setattr(study_plan, "read_summaries", lambda folder: rows)
    first = study_plan.make_plan(["digits-rates"])
    assert {(entry.label, entry.seed, entry.recipe["train"]["lr"]) for entry in first} == {
        (label, 0, common / 2) for label in own.labels
    }

    def ended(entry, loss):
        return {**vars(entry), "metric": "loss", "higher_is_better": False, "valid": {"loss": loss}}

    losses = {"dense": 0.2, "vmoe": 0.4, "intbmoe": 0.3}
    rows += [ended(entry, losses[entry.label]) for entry in first]
    rows += [ended(entry, 0.3) for entry in study_plan.make_plan(["digits"]) if entry.label in ("dense", "vmoe")]
    rows.append(ended(replace(first[0], shared_digest="another setting"), 0.0))
    assert study_plan.own_rates("digits-rates", rows) == {"dense": common / 2, "vmoe": common}, "one has a single rate"
    entries = [entry for entry in study_plan.make_plan(["digits-rates"]) if entry.seed > 0]
    assert {(entry.label, entry.recipe["train"]["lr"]) for entry in entries} == {("dense", common / 2)}
    assert len(entries) == len(load_recipe("digits").seeds) - 1
