"""``compare --tune``: which runs are tried, which settings each method gets, and what is said about it."""

import csv
import json
import re
from dataclasses import replace

import pytest

from intbmoe.cli import main
from intbmoe.commands.training import _gather
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


def pretend(trials, valid):
    """Give the trials these accuracies on the validation split; None for one that did not end. Return the others."""
    ended = [(trial.job, value) for trial, value in zip(trials, valid, strict=True) if value is not None]
    for job, value in ended:
        job.run.path.mkdir(parents=True, exist_ok=True)
        result = {"valid": {"accuracy": value}, "test": {"accuracy": 0.5}, "sha256": {"model.safetensors": ""}}
        job.run.result_path.write_text(json.dumps(result))
    return [job for job, _ in ended]


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
    sound = pretend(trials, [0.5, 0.6, 0.9, 0.3])
    best, found = tuning.choose(plan, trials, sound, tmp_path)
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
    best, _ = tuning.choose(plan, trials, sound, tmp_path)
    assert [job.recipe.train.lr for job in best.jobs] == [1e-3, 1e-3, 1e-2, 1e-2], "where less is better"


def replace_sign(task):
    return type("Lower", (), {"metric": task.metric, "higher_is_better": False})


def test_trials_that_cannot_be_used_are_never_chosen(plan, tmp_path):
    trials = tuning.plan_trials(plan, TUNE[:1], tmp_path)
    sound = pretend(trials, [float("nan"), 0.1, None, None])
    best, found = tuning.choose(plan, trials, sound, tmp_path)
    assert {(job.variant.label, job.recipe.train.lr) for job in best.jobs} == {("dense", 1e-2)}
    assert best.refused == {"Switch Transformer": "none of its runs with --tune can be used"}
    assert [row["values"] for row in found["rows"]] == [[None, 0.1], [None, None]]
    assert [row["edges"] for row in found["rows"]] == [[], []], "with one usable value there is no edge"
    assert "| Switch Transformer | failed | failed | – |" in tuning.tuning_table(found).markdown()


@pytest.mark.parametrize(
    ("results", "told"),
    [
        ({0.5: 1, 1.0: 2, 2.0: 3}, ["largest train.lr tried"]),
        ({0.5: 3, 1.0: 2, 2.0: 1}, ["smallest train.lr tried"]),
        ({0.5: 1, 1.0: 3, 2.0: 2}, []),
        ({0.5: 3, 1.0: 3, 2.0: 3}, []),
        ({0.5: 1, 2.0: 3, 1.0: 3}, []),
        ({0.0: 3, 1.0: 2}, []),
        ({None: 1, 2.0: 3}, []),
        ({2.0: 3}, []),
        ({}, []),
    ],
    ids=["largest", "smallest", "inside", "all equal", "two equal", "nothing is below 0", "None", "one", "none"],
)
def test_a_best_value_at_the_edge_is_pointed_out(results, told):
    assert tuning.edges([(result, {"train.lr": rate}) for rate, result in results.items()]) == told


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["train.lrr=1,2"], r"--tune train.lrr=1,2: 'train.lrr' cannot be tuned, only train.lr, train.warmup, "),
        (["lr=1,2"], r"'lr' cannot be tuned"),
        (["model.dim=16,32"], r"'model.dim' cannot be tuned"),
        (["train.epochs=1,2"], r"'train.epochs' cannot be tuned"),
        (["train.seed=1,2"], r"'train.seed' cannot be tuned"),
        (["train.lr=1e-3"], r"give two or more different values, such as train.lr=1e-3,2e-3"),
        (["train.lr=1e-3,0.001,1"], r"two or more different values"),
        (["train.lr"], r"two or more different values"),
        (["train.lr=1,2", "train.lr=3,4"], r"already tuned: write all of its values into one list"),
        (["train.lr=fast,slow"], r"--tune lr='fast'"),
        (["train.lr=0,1"], r"--tune lr=0"),
        (["train.schedule=cosine,round"], r"--tune schedule='round'"),
    ],
)
def test_a_wrong_list_says_what_is_wrong(texts, message):
    with pytest.raises(ValueError, match=message):
        tuning.read_grid(texts)


def test_values_are_those_of_the_recipe_however_they_are_written(plan, tmp_path):
    grid = tuning.read_grid(["--train.warmup-lr=1e-6, 0.00002", "train.clip=none,1"])
    assert [tuple(settings.values()) for settings in grid] == [(1e-6, None), (1e-6, 1.0), (2e-5, None), (2e-5, 1.0)]
    trials = tuning.plan_trials(plan, ["train.lr=1e-3,1.0000001e-3"], tmp_path)
    assert len({trial.job.run.path for trial in trials}) == len(trials)


def test_a_run_in_the_way_of_any_seed_is_found_before_training(plan, recipe, tmp_path):
    other = replace(recipe, name="digits-lr0.01", train=replace(recipe.train, lr=0.5, seed=1))
    train(replace(other, moe=plan.jobs[0].recipe.moe), root=tmp_path, quiet=True)
    with pytest.raises(ValueError, match=r"digits-lr0.01/dense/1 holds a run with other settings"):
        tuning.plan_trials(plan, TUNE[:1], tmp_path)


def test_without_a_validation_split_there_is_nothing_to_choose_on(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "make_task", lambda recipe: type("Task", (), {"split": lambda self, name: []})())
    with pytest.raises(ValueError, match="holds no examples out"):
        tuning.plan_trials(plan, TUNE, tmp_path)


def compare(words):
    settings = [*SIZES.split(), *SETTINGS.split(), "--train.lr", "1e-3", "--jobs", "1"]
    with pytest.raises(SystemExit) as end:
        main(["compare", "digits", *settings, *words.split()])
    return end.value.code


def test_a_rate_that_diverges_is_no_failure_of_the_comparison(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status = compare("--methods dense --tune train.lr=1e-3,1e30")
    said = capsys.readouterr().out
    assert status == 0, said
    assert "Dense, lr 1e+30, seed 0: FAILED, see" in said
    assert re.search(r"Dense +\d+.\d\d % +failed +lr 0.001", said)


def test_any_other_failure_is_one_of_the_comparison(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "digits-lr0.01").touch()
    status = compare("--methods dense --tune train.lr=1e-3,1e-2")
    said = capsys.readouterr().out
    assert status == 1
    assert "1 run failed." in said
    assert re.search(r"Dense +\d+.\d\d % +failed +lr 0.001", said), "the rest is compared"


def test_if_nothing_can_be_trained_this_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status = compare("--methods dense --tune train.lr=1e29,1e30")
    said = capsys.readouterr().out
    assert status == 1
    assert "leaves nothing to compare: no method can be trained with any value of --tune" in said
    assert "2 runs failed." in said


def test_the_report_says_which_settings_each_method_has(plan, tmp_path, monkeypatch, capsys):
    trials = tuning.plan_trials(plan, TUNE[:1], tmp_path / "runs")
    for trial, accuracy in zip(trials, (0.5, 0.6, 0.9, 0.3), strict=True):
        run = train(trial.job.recipe, root=tmp_path / "runs", quiet=True)
        run.result_path.write_text(json.dumps(run.result | {"valid": {**run.result["valid"], "accuracy": accuracy}}))
    monkeypatch.chdir(tmp_path)
    status = compare(f"--methods dense,switch --baseline switch --tune {TUNE[0]}")
    said = capsys.readouterr().out
    assert status == 0, said
    assert "digits: tuning, 4 runs with the first seed, 4 of 4 runs already finished" in said
    assert re.search(r"Dense +50.00 % +60.00 % +lr 0.01", said)
    assert "Best at the largest train.lr tried, so try values beyond it: Dense." in said
    again = r"compare digits .*--tune train.lr=1e-3,1e-2 --baseline switch --methods dense,switch --seeds 3"
    assert re.search(again, said)
    (own,) = [line for line in said.splitlines() if "a run of your own" in line]
    assert "--tune" not in own, "only compare has these options"
    assert "--baseline" not in own
    assert "The first seed also chose them, so its result is a little optimistic" in said
    folder = tmp_path / "runs" / "digits" / "compare"
    assert [path.name for path in folder.glob("dense+switch*") if path.is_dir()] == ["dense+switch-tuned"]
    written = (folder / "dense+switch-tuned.md").read_text(encoding="utf-8")
    assert "| Switch Transformer | 90.00 % | 30.00 % | lr 0.001 |" in written
    assert "best on the validation split with seed 0" in written
    with open(folder / "dense+switch-tuned.csv", newline="", encoding="utf-8") as file:
        assert [row["settings"] for row in csv.DictReader(file)] == ["lr 0.01", "lr 0.001"]
    page = (folder / "dense+switch-tuned" / "report.html").read_text(encoding="utf-8")
    assert "Tuning: accuracy on the validation split" in page
    assert "--tune train.lr=1e-3,1e-2" in page


def test_lists_of_several_options_add_up_and_none_is_an_error():
    gathered = _gather(["digits", "--tune", "a=1,2", "--seeds", "3", "--tune=b=1,2", "c=1,2"], "--tune")
    assert gathered == ["digits", "--seeds", "3", "--tune", "a=1,2", "b=1,2", "c=1,2"]
    assert _gather(["digits", "--name", ""], "--tune") == ["digits", "--name", ""]
    assert _gather(["digits", "--methods", "dense", "mass", "-h"], "--methods", ",")[-2:] == ["--methods", "dense,mass"]
    assert "--tune needs a value: intbmoe compare --help" in str(compare("--tune --methods dense"))


def test_a_damaged_trial_is_a_failure_and_its_reason_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "--methods dense --tune train.lr=1e-3,1e-2"
    assert compare(words) == 0
    (tmp_path / "runs" / "digits-lr0.01" / "dense" / "0" / "model.safetensors").write_bytes(b"")
    assert compare(words) == 1
    said = capsys.readouterr().out
    assert re.search(r"Dense +\d+.\d\d % +failed +lr 0.001", said)
    assert re.search(
        r"FAILED Dense, lr 0.01, seed 0; the end of runs/digits-lr0.01/dense/0:\n +\| .*model.safetensors", said
    )


def test_if_every_method_is_refused_there_is_nothing_to_tune(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["compare", "stdlib", "--methods", "soft", "--tune", "train.lr=1e-3,1e-2"])
    assert end.value.code == 1
    assert "leaves nothing to compare: choose others" in capsys.readouterr().out
