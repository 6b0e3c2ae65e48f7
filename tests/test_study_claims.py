"""The study's claims: over seeds if there are several, otherwise over the test examples alone."""

import re
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.study import claims as study_claims

from intbmoe.recipes import load_recipe

TITLES = {"dense": "Dense", "intbmoe": "IntBMoE", "vmoe": "V-MoE"}


def summary(folder, label, seed, value):
    """The part of a run's summary that a claim needs."""
    return {
        "title": TITLES[label],
        "seed": seed,
        "metric": "accuracy",
        "higher_is_better": True,
        "valid": {"accuracy": value},
        "test": {"accuracy": value},
        "recipe": asdict(load_recipe("digits")),
        "file": str(folder / f"{label}-{seed}.json"),
    }


def keep(run, hits):
    columns = {"count": np.ones(len(hits)), "accuracy": hits, "loss": np.ones(len(hits))}
    np.savez(Path(run["file"]).with_suffix(".npz"), **columns)


def lines_of(text):
    return {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("|")}


def test_claims_are_of_seeds_that_both_have_and_of_kept_outcomes(tmp_path):
    values = {"dense": (0.50, 0.51, 0.52), "intbmoe": (0.60, 0.62, 0.61), "vmoe": (0.52,)}
    rows = {label: [summary(tmp_path, label, *run) for run in enumerate(found)] for label, found in values.items()}
    text = study_claims.claims_text(rows, {"dense": "over dense", "absent": "over another"}, rows)
    lines = lines_of(text)
    reach = 2.776445 * (2 * 0.01**2 / 3) ** 0.5  # t(4), the pooled spread is 0.01
    assert f"| +10.00 ± {100 * reach:.2f}* | 0 1 2 |" in lines["IntBMoE"]
    assert f"| +2.00 ± {100 * reach * 3**0.5:.2f} | 0 |" in lines["V-MoE"], "against the first seed, not the mean"
    assert "over another" not in text
    assert "due to variation between training runs, with" in text
    hits = np.arange(1000)
    for run in (run for runs in rows.values() for run in runs):
        keep(run, hits < 1000 * run["test"]["accuracy"])
    wider = study_claims.claims_text(rows, {"dense": "over dense"}, rows)
    assert "due to variation between training runs and between test examples, with" in wider
    examples, trainings = 0.1 * 0.9 / 1000, 2 * 0.01**2 / 3
    freedom = 4 * (1 + examples / trainings) ** 2
    expected = 100 * stats.t.ppf(0.975, freedom) * (examples + trainings) ** 0.5
    assert float(re.search(r"\+10\.00 ± ([\d.]+)", wider)[1]) == pytest.approx(expected, rel=0.05), "both together"


def test_a_method_whose_runs_differ_much_more_is_judged_by_its_own_spread_and_named(tmp_path):
    values = {"dense": (0.50, 0.51, 0.52), "intbmoe": (0.60, 0.62, 0.61), "vmoe": (0.52, 0.5201, 0.9)}
    rows = {label: [summary(tmp_path, label, *run) for run in enumerate(found)] for label, found in values.items()}
    for runs in rows.values():
        for run in runs:
            run["valid"] = {"accuracy": 0.5}
    text = study_claims.claims_text(rows, {"dense": "over dense"}, rows)
    reach = 2.776445 * (2 * 0.01**2 / 3) ** 0.5
    assert f"+10.00 ± {100 * reach:.2f}*" in lines_of(text)["IntBMoE"]
    own = np.var(values["vmoe"], ddof=1) / 3
    freedom = (own + 0.01**2 / 3) ** 2 / (own**2 / 2 + (0.01**2 / 3) ** 2 / 4)
    assert f"± {100 * stats.t.ppf(0.975, freedom) * (own + 0.01**2 / 3) ** 0.5:.2f} |" in lines_of(text)["V-MoE"]
    assert "judged by its own spread: V-MoE, whose runs differ much more" in text
    del rows["vmoe"]
    assert "judged by its own spread" not in study_claims.claims_text(rows, {"dense": "over dense"}, rows)


def test_with_one_seed_the_same_examples_are_compared_by_mcnemars_test(tmp_path):
    """V-MoE alone gets 30 examples right that dense gets wrong, and dense alone 10; IntBMoE is far ahead of both."""
    examples = np.arange(1000)
    hits = {"dense": examples < 510, "vmoe": (examples >= 10) & (examples < 540), "intbmoe": examples < 900}
    rows = {label: [summary(tmp_path, label, 0, found.mean())] for label, found in hits.items()}
    assert "(p " not in study_claims.claims_text(rows, {"dense": "over dense"}, {}), "no outcomes yet"
    for label, found in hits.items():
        keep(rows[label][0], found)
    text = study_claims.claims_text(rows, {"dense": "over dense"}, {})
    expected = f"{stats.binomtest(10, 40).pvalue:.2g}"
    assert re.search(rf"\+2\.00 ± 1\.[12]\d \(p = {expected}\) \| 0 \|", lines_of(text)["V-MoE"])
    assert "(p < 0.0001)" in lines_of(text)["IntBMoE"]
    assert "*" not in text
    assert "nothing is known about other training runs" in text
