"""``compare --tune``: which runs are tried, which settings each method gets, and what is said about it."""

import json
import re
from dataclasses import replace

import pytest

from intbmoe.cli import main
from intbmoe.compare import tuning
from intbmoe.compare.plan import CompareOptions, make_plan
from intbmoe.recipes import load_recipe
from intbmoe.train import train

pytestmark = pytest.mark.usefixtures("forked", "sketched")
TUNE = ("train.lr=1e-3,1e-2", "train.warmup=0,1")
SIZES = "--model.dim 16 --model.depth 2 --model.heads 2 --model.hidden 16 --model.patch-size 4 --model.moe-layers 0"
SETTINGS = "--moe.experts 2 --train.epochs 1 --train.warmup 0 --train.batch 256"


@pytest.fixture(scope="module")
def recipe():
    recipe = load_recipe("digits")
    model = replace(recipe.model, dim=16, depth=2, heads=2, hidden=16, patch_size=4, moe_layers=(0,))
    settings = replace(recipe.train, epochs=1.0, warmup=0.0, batch=256, lr=1e-3)
    return replace(recipe, model=model, moe=replace(recipe.moe, experts=2), train=settings)


@pytest.fixture
def plan(recipe, tmp_path):
    return make_plan(recipe, CompareOptions(methods="dense,switch", seeds=2, root=tmp_path))


def finish(trials, valid):
    """Pretend that the trials ended with these accuracies on the validation split; None for one that did not end."""
    for trial, value in zip(trials, valid, strict=True):
        if value is not None:
            train(trial.job.recipe, root=trial.job.run.path.parents[2], quiet=True)
            result = trial.job.run.result
            result["valid"]["accuracy"] = value
            trial.job.run.result_path.write_text(json.dumps(result))


def test_every_combination_is_tried_with_the_first_seed(plan, tmp_path):
    trials = tuning.plan_trials(plan, TUNE, tmp_path)
    tried = [(trial.settings["train.lr"], trial.settings["train.warmup"]) for trial in trials]
    assert tried == [(1e-3, 0), (1e-3, 1), (1e-2, 0), (1e-2, 1)] * 2
    assert {trial.job.seed for trial in trials} == {0}
    for trial, (rate, warmup) in zip(trials, tried, strict=True):
        assert (trial.job.recipe.train.lr, trial.job.recipe.train.warmup) == (rate, warmup)
    folders = [str(trial.job.run.path.relative_to(tmp_path)) for trial in trials[:4]]
    assert folders == [f"digits{name}/dense/0" for name in ("", "-warmup1", "-lr0.01", "-lr0.01-warmup1")], (
        "the recipe's own settings are those of a comparison without --tune"
    )
    assert trials[3].job.title == "Dense, lr 0.01, warmup 1, seed 0"


def test_each_method_gets_what_is_best_on_validation(plan, tmp_path, monkeypatch):
    trials = tuning.plan_trials(plan, TUNE[:1], tmp_path)
    finish(trials, [0.5, 0.6, 0.9, 0.3])
    best, found = tuning.choose(plan, trials, tmp_path)
    assert [(job.title, job.recipe.train.lr) for job in best.jobs] == [
        *(("Dense, seed 0", 1e-2), ("Dense, seed 1", 1e-2)),
        *(("Switch Transformer, seed 0", 1e-3), ("Switch Transformer, seed 1", 1e-3)),
    ]
    assert [job.run.finished for job in best.jobs] == [True, False] * 2, "the first seed is not trained again"
    table = tuning.tuning_table(found).markdown().splitlines()
    assert table[0] == "| Method | lr 0.001 | lr 0.01 | chosen |"
    assert table[2:] == [
        "| Dense | 50.00 % | 60.00 % | lr 0.01 |",
        "| Switch Transformer | 90.00 % | 30.00 % | lr 0.001 |",
    ]
    task = tuning.find_task(plan.recipe.task)
    monkeypatch.setattr(tuning, "find_task", lambda name: replace_sign(task))
    best, _ = tuning.choose(plan, trials, tmp_path)
    assert [job.recipe.train.lr for job in best.jobs] == [1e-3, 1e-3, 1e-2, 1e-2], "where less is better"


def replace_sign(task):
    return type("Lower", (), {"metric": task.metric, "higher_is_better": False})


def test_trials_that_fail_are_never_chosen(plan, tmp_path):
    trials = tuning.plan_trials(plan, TUNE[:1], tmp_path)
    finish(trials, [None, 0.1, None, None])
    best, found = tuning.choose(plan, trials, tmp_path)
    assert {(job.variant.label, job.recipe.train.lr) for job in best.jobs} == {("dense", 1e-2)}
    assert best.refused == {"Switch Transformer": "no run of its tuning can be used"}
    assert [row["values"] for row in found["rows"]] == [[None, 0.1], [None, None]]
    assert "| Switch Transformer | failed | failed | – |" in tuning.tuning_table(found).markdown()


@pytest.mark.parametrize(
    ("best", "told"),
    [
        ([2, 2, 1], ["2 of 3 methods are best at the largest train.lr tried, 2: try larger ones too."]),
        ([0.5, 0.5, 1], ["2 of 3 methods are best at the smallest train.lr tried, 0.5: try smaller ones too."]),
        ([1, 1, 2], []),
        ([0.5, 2], []),
    ],
)
def test_a_best_value_at_the_edge_is_pointed_out(best, told):
    tried = [{"train.lr": value} for value in (0.5, 1, 2)]
    assert tuning.edges(tried, [{"train.lr": value} for value in best]) == told


def test_nothing_is_shorter_than_no_warm_up():
    tried = [{"train.warmup": 0}, {"train.warmup": 1}]
    assert tuning.edges(tried, tried[:1]) == []


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["train.lrr=1,2"], r"'train.lrr' is not a setting to tune: did you mean 'train.lr'"),
        (["model.dim=16,32"], r"'model.dim' is not a setting to tune"),
        (["train.seed=1,2"], r"'train.seed' is not a setting to tune"),
        (["train.lr=1e-3"], r"tune='train.lr=1e-3'.*two or more values"),
        (["train.lr=1,1.0"], r"two or more values"),
        (["train.lr"], r"two or more values"),
        (["train.lr=1,2", "train.lr=3,4"], r"the only list for train.lr"),
        (["train.lr=fast,slow"], r"train.lr"),
    ],
)
def test_a_wrong_list_says_what_is_wrong(plan, tmp_path, texts, message):
    with pytest.raises(ValueError, match=message):
        tuning.plan_trials(plan, texts, tmp_path)


def test_without_a_validation_split_there_is_nothing_to_choose_on(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "make_task", lambda recipe: type("Task", (), {"split": lambda self, name: []})())
    with pytest.raises(ValueError, match="holds no examples out"):
        tuning.plan_trials(plan, TUNE, tmp_path)


def test_a_rate_that_diverges_is_no_failure_of_the_comparison(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = f"compare digits --methods dense {SIZES} {SETTINGS} --train.lr 1e-3 --jobs 1 --tune train.lr=1e-3,1e30"
    with pytest.raises(SystemExit) as end:
        main(words.split())
    said = capsys.readouterr().out
    assert end.value.code == 0, said
    assert "Dense, lr 1e+30, seed 0: FAILED, see" in said
    assert re.search(r"Dense +\d\d.\d\d % +failed +lr 0.001", said)


def test_the_report_says_which_settings_each_method_has(plan, tmp_path, monkeypatch, capsys):
    trials = tuning.plan_trials(plan, TUNE[:1], tmp_path / "runs")
    finish(trials, [0.5, 0.6, 0.9, 0.3])
    monkeypatch.chdir(tmp_path)
    words = f"compare digits --methods dense,switch {SIZES} {SETTINGS} --train.lr 1e-3 --tune {TUNE[0]}"
    with pytest.raises(SystemExit) as end:
        main(words.split())
    said = capsys.readouterr().out
    assert end.value.code == 0, said
    assert "digits: tuning, 4 runs, 4 of 4 runs already finished" in said
    assert re.search(r"Dense +50.00 % +60.00 % +lr 0.01", said)
    assert re.search(r"compare digits .*--tune train.lr=1e-3,1e-2 --methods dense,switch --seeds 3", said)
    assert not re.search(r" train digits .*--tune", said), "only compare has this option"
    folder = tmp_path / "runs" / "digits" / "compare"
    written = (folder / "dense+switch.md").read_text(encoding="utf-8")
    assert "| Switch Transformer | 90.00 % | 30.00 % | lr 0.001 |" in written
    assert "best on the validation split with seed 0" in written
    page = (folder / "dense+switch" / "report.html").read_text(encoding="utf-8")
    assert "Tuning: accuracy on the validation split" in page
    assert "--tune train.lr=1e-3,1e-2" in page
