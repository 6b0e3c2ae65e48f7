"""Comparisons on a model that trains in a second; most tests share the runs of one comparison."""

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from scipy import stats

from intbmoe.cli import main
from intbmoe.compare.compare import what_next
from intbmoe.compare.jobs import choose_jobs, run_jobs
from intbmoe.compare.plan import CompareOptions, choose_baseline, choose_seeds, make_plan
from intbmoe.compare.summary import Summary, active_experts, confidence_intervals, make_rows, summarise
from intbmoe.compare.table import brief_table, by_students_t, file_stem, floors_table, write_files
from intbmoe.machine import usable_cores
from intbmoe.recipes import load_recipe
from intbmoe.recipes.sets import find_variants
from intbmoe.report.numbers import format_metric
from intbmoe.tasks import find_task, make_task
from intbmoe.train import load, train

# tests/tasks/test_adding_a_task.py runs a comparison in a process that imports everything afresh.
pytestmark = pytest.mark.usefixtures("forked", "sketched")
SMALL = shlex.split("--model.dim 16 --model.depth 2 --model.heads 2 --model.hidden 16 --model.patch-size 4")
SMALL += shlex.split("--model.moe-layers 0 --moe.experts 2 --train.epochs 1 --train.warmup 0 --train.batch 128")
PNG = b"\x89PNG"
PAGES = ("remoe+intbmoe.md", "remoe+intbmoe/report.html")


def intbmoe(*args, cwd):
    """Run the command line in a separate process."""
    command = [sys.executable, "-m", "intbmoe.cli", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def recipe():
    recipe = load_recipe("digits")
    model = replace(recipe.model, dim=16, depth=2, heads=2, hidden=16, patch_size=4, moe_layers=(0,))
    settings = replace(recipe.train, epochs=1.0, warmup=0.0, batch=128)
    return replace(recipe, model=model, moe=replace(recipe.moe, experts=2), train=settings)


@pytest.fixture(scope="module")
def compared(recipe, tmp_path_factory, forked, sketched):
    """Two methods and two seeds in a separate folder; the second seed's runs already exist."""
    folder = tmp_path_factory.mktemp("compare")
    options = CompareOptions(methods="remoe,intbmoe", seeds=2, root=folder / "runs")
    for job in make_plan(recipe, options).jobs:
        if job.seed == 1:
            train(job.recipe, root=options.root, quiet=True)
    done = intbmoe("compare", "digits", "--methods", "remoe,intbmoe", "--seeds", "2", *SMALL, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_every_run_is_an_ordinary_run(compared):
    folder, _ = compared
    done = sorted(str(path.parent.relative_to(folder)) for path in folder.rglob("done.json"))
    assert done == ["runs/digits/intbmoe/0", "runs/digits/intbmoe/1", "runs/digits/remoe/0", "runs/digits/remoe/1"]


def test_without_a_terminal_progress_is_plain_lines_and_the_end_says_what_next(compared):
    _, output = compared
    assert "2 of 4 runs already finished" in output
    assert "started  ReMoE, seed 0" in output
    assert "started  ReMoE, seed 1" not in output
    assert re.search(r"\[4/4\] .*seed 0: test accuracy 0\.\d{4}", output)
    assert "\x1b[" not in output
    assert "95 % interval of the mean over 2 seeds" in output
    next_command = re.search(r"^  (\S+) compare (.*) --methods remoe,intbmoe --seeds 3   #", output, flags=re.MULTILINE)
    assert next_command is not None
    assert next_command[2] == " ".join(["digits", *SMALL]), "with the same settings, so that it finds the runs"


def test_the_files_agree_with_the_runs(compared):
    folder, output = compared
    results = folder / "runs/digits/compare"
    records = json.loads((results / "remoe+intbmoe.json").read_text())
    assert [record["label"] for record in records] == ["remoe", "intbmoe", "intbmoe"]
    half_widths = confidence_intervals([record["values"] for record in records])
    for record, half_width in zip(records[:2], half_widths, strict=False):
        runs = [folder / f"runs/digits/{record['label']}/{seed}/done.json" for seed in (0, 1)]
        values = [json.loads(run.read_text())["test"]["accuracy"] for run in runs]
        assert record["values"] == values
        assert record["mean"] == pytest.approx(sum(values) / 2)
        assert record["interval_95"] == half_width
        text = f"{record['mean'] * 100:.2f} ± {record['interval_95'] * 100:.2f} %"
        assert text in output
        assert text in (results / "remoe+intbmoe.md").read_text()
    with open(results / "remoe+intbmoe.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["mean"]) for row in rows[:2]] == [record["mean"] for record in records[:2]]
    assert (results / "remoe+intbmoe.png").read_bytes().startswith(PNG)
    assert "prefers-color-scheme: dark" in (results / "remoe+intbmoe.svg").read_text()


def test_every_rendering_has_every_column_of_the_papers_table(compared):
    folder, output = compared
    results = folder / "runs/digits/compare"
    values = [
        [
            json.loads((folder / f"runs/digits/{label}/{seed}/done.json").read_text())["test"]["accuracy5"]
            for seed in (0, 1)
        ]
        for label in ("remoe", "intbmoe")
    ]
    mean, reach = sum(values[1]) / 2, confidence_intervals(values)[1]
    record = json.loads((results / "remoe+intbmoe.json").read_text())[1]
    with open(results / "remoe+intbmoe.csv", newline="") as file:
        row = list(csv.DictReader(file))[1]
    assert (record["accuracy5"], record["accuracy5_interval_95"]) == (mean, reach)
    assert (float(row["accuracy5"]), float(row["accuracy5_interval_95"])) == (mean, reach)
    assert "ACC@5" in output
    markdown = (results / "remoe+intbmoe.md").read_text().replace("**", "")
    assert "| ACC@5 |" in markdown
    assert f"| {mean * 100:.2f} ± {reach * 100:.2f} % |" in markdown
    assert "ACC@5" in (results / "remoe+intbmoe/report.html").read_text()


@pytest.mark.parametrize(
    ("task", "headings"),
    [("vision", ["ACC@5"]), ("language", ["PPL"]), ("travel", ["HR@1", "NDCG@5"])],
)
def test_the_papers_columns_of_each_task(task, headings):
    assert list(find_task(task).reported.values()) == headings


def test_costs_are_those_of_the_trained_models(compared):
    folder, output = compared
    remoe, full, precomposed = json.loads((folder / "runs/digits/compare/remoe+intbmoe.json").read_text())
    model = load(folder / "runs/digits/intbmoe/0")
    assert full["params"] == sum(parameter.numel() for parameter in model.parameters())
    assert precomposed["flops"] < full["flops"]
    assert precomposed["values"] == []
    task = make_task(load_run_recipe(folder, "remoe"))
    active = active_experts(task, load(folder / "runs/digits/remoe/0"))
    assert 0 < active <= 3
    assert remoe["active_experts"] == active
    assert f"ReMoE {active:.2f}" in output


def load_run_recipe(folder, label):
    return load_recipe(folder / f"runs/digits/compare/jobs/{label}-0.yaml")


@pytest.mark.parametrize("methods", [["remoe,intbmoe"], ["remoe", "intbmoe"]])
def test_finished_runs_are_not_trained_again(compared, monkeypatch, capsys, methods):
    folder, _ = compared
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("model.safetensors")}
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(["compare", "digits", "--methods", *methods, "--seeds", "2", *SMALL])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "4 of 4 runs already finished" in said
    assert "started" not in said
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("model.safetensors")} == before


def test_a_finished_run_of_other_settings_does_not_enter_the_table(compared, monkeypatch):
    monkeypatch.chdir(compared[0])
    expected = r"runs/digits/intbmoe/0 holds a run with other settings \(train\.lr.*--name"
    with pytest.raises(SystemExit, match=expected):
        main(["compare", "digits", "--methods", "intbmoe", *SMALL, "--train.lr", "0.5"])


def test_a_failed_run_is_named_with_the_end_of_its_log_and_the_others_stand(recipe, tmp_path):
    plan = make_plan(recipe, CompareOptions(methods="dense,switch", root=tmp_path / "runs"))
    broken = tmp_path / "runs/digits/switch/0"
    broken.mkdir(parents=True)
    (broken / "checkpoints").write_text("in the way of a folder")
    output = StringIO()
    failures = run_jobs(plan, plan.jobs, 2, Console(file=output, width=200))
    assert [failure.title for failure in failures] == ["Switch Transformer, seed 0"]
    assert "exit status 1" in failures[0].tail
    assert "Switch Transformer, seed 0: FAILED" in output.getvalue()
    assert [summary.row["label"] for summary in summarise(plan.jobs)] == ["dense"]


def test_an_interrupted_comparison_saves_and_goes_on(tmp_path):
    args = ["compare", "digits", "--methods", "dense", *SMALL]
    endless = ["--train.epochs", "400", "--train.checkpoint-every", "100000"]
    command = [sys.executable, "-m", "intbmoe.cli", *args, *endless]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = tmp_path / "runs/digits/dense/0/metrics.jsonl"
    deadline = time.monotonic() + 300  # on a busy machine
    while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130, output
    assert "The same command resumes from there" in output
    saved = list((tmp_path / "runs/digits/dense/0/checkpoints").glob("step-*"))
    assert len(saved) == 1, "the run was asked to save, not killed"


def test_what_the_task_refuses_is_left_out_with_the_reason(recipe, tmp_path):
    options = CompareOptions(methods="dense,intbmoe", root=tmp_path)
    plan = make_plan(replace(recipe, moe=replace(recipe.moe, name="dense", options={"expert": "gelu"})), options)
    assert [job.variant.label for job in plan.jobs] == ["intbmoe"]
    assert "must be empty for the dense model" in plan.refused["Dense"]


def test_methods_are_compared_in_pairs_with_a_baseline(compared):
    folder, output = compared
    first, second, precomposed = json.loads((folder / "runs/digits/compare/remoe+intbmoe.json").read_text())
    assert "difference" not in first
    assert "difference" not in precomposed
    assert second["difference_baseline"] == "remoe", "dense is not there: the first"
    assert second["difference"] == pytest.approx(second["mean"] - first["mean"])
    assert second["difference_seeds"] == 2
    value = f"{100 * second['difference']:+.2f} ± {100 * second['difference_interval_95']:.2f}".replace("-", "−")
    for text in (output, *((folder / "runs/digits/compare" / name).read_text() for name in PAGES)):
        assert "vs ReMoE" in text
        assert value in text


def test_the_baseline_is_dense_unless_another_is_named(recipe, tmp_path):
    jobs = make_plan(recipe, CompareOptions(methods="switch,dense", root=tmp_path)).jobs
    assert choose_baseline(jobs, None) == "dense"
    assert choose_baseline(jobs, "switch") == "switch"
    assert choose_baseline(jobs[:1], None) == "switch"
    assert choose_baseline([], None) is None
    with pytest.raises(ValueError, match=r"baseline='swich' is not allowed.*switch"):
        choose_baseline(jobs, "swich")


def test_seeds_are_the_recipes_and_then_others():
    assert choose_seeds((214797, 531770, 635451), 2) == [214797, 531770]
    assert choose_seeds((5, 1), 5) == [5, 1, 0, 2, 3]


def test_intervals_by_students_t():
    assert confidence_intervals([[0.5]])[0] is None
    assert confidence_intervals([[1.0, 2.0, 3.0]])[0] == pytest.approx(4.302653 / 3**0.5)
    assert confidence_intervals([[3.0] * 5])[0] == 0
    few = confidence_intervals([[1.0, 2.0, 3.0], [5.0, 5.0], [7.0], [], [0.0, 0.0, 1.0, 1.0]])
    pooled = (2 + 1) / (2 + 1 + 3)
    expected = [stats.t.ppf(0.975, 6) * (pooled / seeds) ** 0.5 for seeds in (3, 2, 1, 4)]
    assert few == [*map(pytest.approx, expected[:3]), None, pytest.approx(expected[3])]
    for number in (2, 7, 31, 32, 60):
        values = [float(index % 2) for index in range(number)]
        expected = stats.t.ppf(0.975, number - 1) * stats.tstd(values) / number**0.5
        assert confidence_intervals([values])[0] == pytest.approx(expected, rel=1e-12)


def summary_of(label, *values, second):
    results = [{"test": {"accuracy": value, "accuracy5": other}} for value, other in zip(values, second, strict=True)]
    metrics = {name: {"mean": 0.0, "interval_95": None} for name in ("accuracy", "accuracy5")}
    row = {"label": label, "title": label.title(), "values": list(values), "metrics": metrics, "results": results}
    return Summary(row, None, None)


def test_a_method_whose_seeds_differ_much_more_has_its_own_interval_in_every_column_and_is_named():
    steady, wild = (0.90, 0.91, 0.92), (0.1, 0.2, 0.9)
    summaries = [summary_of(name, *steady, second=steady) for name in ("dense", "switch", "vmoe")]
    rows = make_rows([*summaries, summary_of("remoe", *wild, second=steady)])
    of_one = confidence_intervals([steady])[0]
    assert rows[0]["interval_95"] < of_one, "the spread of three methods is pooled"
    assert rows[3]["interval_95"] == pytest.approx(confidence_intervals([wild])[0])
    assert rows[3]["metrics"]["accuracy5"]["interval_95"] == pytest.approx(of_one)
    pooled = "by Student's t, with the spread of all methods pooled"
    assert by_students_t(rows) == f"{pooled}, except for Remoe, whose seeds differ much more"
    assert by_students_t(rows[:3]) == pooled
    assert by_students_t(rows[:1]) == "by Student's t"


def test_side_by_side_as_cores_and_memory_allow(recipe, tmp_path):
    plan = make_plan(recipe, CompareOptions(methods="dense,switch,intbmoe", root=tmp_path))
    assert choose_jobs(plan, 3, wanted=2) == 2
    assert choose_jobs(plan, 1, wanted=8) == 1, "no more than there are runs"
    assert 1 <= choose_jobs(plan, 3, wanted=None) <= usable_cores()
    assert choose_jobs(replace(plan, largest=10**15), 3, wanted=None) == 1, "a model too large for two"


def test_the_table_fits_into_80_columns(compared):
    folder, _ = compared
    recipe = load_run_recipe(folder, "intbmoe")
    plan = make_plan(recipe, CompareOptions(methods="intbmoe", seeds=2, root=folder / "runs"))
    summaries = [summary.row for summary in summarise(plan.jobs)]
    values = [0.9, 0.99]
    longest = {**summaries[0], "title": "Switch Transformer", "values": values, "mean": sum(values) / 2}
    longest["interval_95"] = confidence_intervals([values])[0]
    console = Console(file=StringIO(), width=80)
    console.print(brief_table([longest, *summaries], "a title", True).terminal(80))
    shown = console.file.getvalue()
    assert "…" not in shown
    assert "94.50 ± 57.18 %" in shown
    assert "precomposed" in shown
    difference = {
        "baseline": "intbmoe",
        "value": 0.1,
        "interval_95": 0.1,
        "p_holm": 0.01,
        "examples": 9,
        "over_seeds": True,
    }
    console.print(brief_table([{**longest, "difference": difference}, *summaries], "", True).terminal(80))
    before = console.file.getvalue().partition("+10.00 ± 10.00*")[0].splitlines()[-1]
    assert "Transformer" in before, "a long name is broken between its words only"
    travel = {**longest, "reported": {"HR@1": "HR@1", "NDCG@5": "NDCG@5"}, "metric": "HR@5"}
    travel["metrics"] = {name: {"mean": 0.5, "interval_95": 0.1} for name in travel["reported"]}
    console.print(brief_table([travel, summaries[1]], "two columns more", True).terminal(80))
    assert "…" not in console.file.getvalue()


def test_a_table_says_what_it_is(compared, recipe, tmp_path):
    folder, _ = compared
    plan = make_plan(load_run_recipe(folder, "intbmoe"), CompareOptions(methods="intbmoe", root=folder / "runs"))
    table = brief_table([summary.row for summary in summarise(plan.jobs)], "a title", True)
    assert [column.title for column in table.columns[:2]] == ["Method", "accuracy"]
    assert [row[0].text for row in table.rows] == ["IntBMoE", "IntBMoE, precomposed"]
    assert "±" not in table.rows[0][1].text
    assert any("One seed, so no interval" in note for note in table.notes)
    assert format_metric("loss", 1.23456) == "1.2346"


def test_files_of_different_sets_have_different_names_also_where_case_does_not_count():
    names = [file_stem(name) for name in ("all", "ablations", "K", "k", "E", "L", "dense, switch")]
    assert len({name.lower() for name in names}) == len(names)
    assert len(file_stem(",".join(f"method{index}" for index in range(99)))) <= 60
    assert file_stem("dense, dense,switch") == "dense+switch", "as often as it is in the table"


@pytest.mark.parametrize("started", ["cli.py", "__main__.py"])
def test_without_intbmoe_on_the_path_they_start_the_module(started, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda program: None)
    monkeypatch.setattr("sys.argv", [f"/site/intbmoe/{started}"])
    plan = make_plan(recipe, options := CompareOptions(methods="dense", root=tmp_path))
    assert all(line.startswith("  python -m intbmoe ") for line in what_next(plan, options, ["digits"]).splitlines())


def test_the_commands_that_lead_on_can_be_pasted(recipe, tmp_path):
    options = CompareOptions(methods="dense, switch", root=tmp_path / "my runs")
    plan = make_plan(recipe, options)

    def commands(*settings):
        return [shlex.split(line, comments=True) for line in what_next(plan, options, settings).splitlines()]

    more, place, ablations, own, evaluate, analyse, _ = commands("digits", "--name", "a b")
    given = ["digits", "--name", "a b", "--root", str(options.root)]
    assert more[1:] == ["compare", *given, "--methods", "dense, switch", "--seeds", "3"]
    assert place[1:] == ["compare", *given, "--methods", "dense, switch,place", "--seeds", "1"]
    assert ablations[1:] == ["compare", *given, "--methods", "ablations"]
    label = ["--moe.experts", "32", "--moe.label", "more-experts"]
    assert own[1:] == ["train", *given, "--moe.name", "switch", *label]
    assert evaluate[1:] == ["eval", str(options.root / "digits/switch/0")]
    assert analyse[1:] == ["analyse", str(options.root / "digits/switch/0")]
    named = commands("digits", "--moe.name=dense")[3]
    assert named[1:] == ["train", "digits", "--moe.name=dense", "--root", str(options.root), *label], "named once"
    given = ["digits", "--moe.options.blocks", "4", "--root", str(options.root)]
    assert commands(*given[:3])[3][1:] == ["train", *given, *label], "no method that lacks the option"


@pytest.mark.parametrize(("name", "methods"), [("digits", "place"), ("digits", "switch"), ("journeys", "dense")])
def test_dense_in_its_place_is_proposed_only_where_it_is_missing_and_differs(name, methods, tmp_path):
    options = CompareOptions(methods=methods, root=tmp_path)
    plan = make_plan(load_recipe(name), options)
    assert ",place" not in what_next(plan, options, [name])


def test_it_is_said_that_nothing_is_left_to_compare(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["compare", "stdlib", "--methods", "soft"])
    assert ended.value.code == 1
    assert "--methods soft leaves nothing to compare" in capsys.readouterr().out


def test_variants_of_a_set_are_compared_like_methods(recipe, tmp_path):
    plan = make_plan(recipe, CompareOptions(methods="ablations", seeds=2, root=tmp_path))
    assert len(plan.jobs) == 14
    folders = {job.run.path.relative_to(tmp_path).as_posix() for job in plan.jobs}
    assert {"digits/intbmoe/0", "digits/intbmoe-one_layer/1"} <= folders
    assert [job.variant for job in plan.jobs[::2]] == find_variants(recipe, "ablations")


def test_floors_stand_under_the_table_and_in_the_files(compared, recipe, tmp_path):
    floors = {"popularity": {"HR@5": 0.25, "loss": 2.0}, "chance": {"HR@5": 0.05}}
    options = CompareOptions(methods="intbmoe", root=compared[0] / "runs")
    rows = [summary.row for summary in summarise(make_plan(recipe, options).jobs)]
    table = floors_table(floors, "a title")
    assert [column.title for column in table.columns] == ["Floor", "HR@5", "loss"]
    texts = [[cell.text for cell in row] for row in table.rows]
    assert texts == [["popularity", "0.2500", "2.0000"], ["chance", "0.0500", "–"]]
    paths = write_files(tmp_path, "all", rows, "digits", True, floors)
    assert json.loads((tmp_path / "all.floors.json").read_text()) == floors
    assert "| popularity | 0.2500 | 2.0000 |" in (tmp_path / "all.md").read_text()
    assert tmp_path / "all.floors.json" in paths
