"""The study's scripts: which runs there are, when one counts as done, and what the tables say about them."""

import json
import re
import signal
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

HOUSE = Path(__file__).parents[1]
sys.path.insert(0, str(HOUSE))

from benchmarks.study import __main__ as study  # noqa: E402
from benchmarks.study import plan as study_plan  # noqa: E402
from benchmarks.study import rows as study_rows  # noqa: E402
from benchmarks.study import tables as study_tables  # noqa: E402
from benchmarks.study import tried as study_tried  # noqa: E402
from benchmarks.study.attention import count_attention  # noqa: E402
from benchmarks.study.clock import START_SECONDS, Clock  # noqa: E402
from benchmarks.study.plan import TIMING  # noqa: E402
from benchmarks.study.scheduler import STOP_SECONDS, StudyLane, StudyScheduler, pack  # noqa: E402
from benchmarks.study.studies import REAL, STUDIES  # noqa: E402

from intbmoe.compare.jobs import Process  # noqa: E402
from intbmoe.train import RunDirectory, load  # noqa: E402
from intbmoe.train.outcomes import read_outcomes  # noqa: E402

SHORT = ("train.epochs=1", "train.warmup=0.2")


@pytest.fixture(scope="module", autouse=True)
def _count_once():
    """Search for networks of a given compute only once for equal recipes, because it runs many of them."""
    find, found = study_plan._variants, {}

    def once(*given):
        if repr(given) not in found:
            found[repr(given)] = find(*given)
        return list(found[repr(given)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_plan, "_variants", once)
        yield


@pytest.fixture(scope="module")
def plan(_count_once):
    return study_plan.make_plan(["digits"], SHORT)


def summary_of(entry, value, **changes):
    """A summary as a run would write it."""
    return {
        **{name: getattr(entry, name) for name in ("study", "stage", "title", "label", "seed", "digest")},
        **{name: getattr(entry, name) for name in ("shared_digest", "command", "recipe", "steps")},
        "method": entry.recipe["moe"]["name"],
        "metric": "accuracy",
        "higher_is_better": True,
        "valid": {"accuracy": value, "accuracy5": value},
        "test": {"accuracy": value, "accuracy5": value},
        "params": 2_000_000,
        "activated": 1_000_000,
        "flops": 3e9,
        "flops_training": 2e9,
        "active_experts": None,
        "epochs": 1.0,
        "seconds": 60.0,
        "side_by_side": 3,
        "peak_gpu_bytes": None,
        "environment": {"device": "a GPU", "packages": {"torch": "2"}, "git": {"commit": "abc", "changed": False}},
        **changes,
    }


def test_what_matters_comes_first(plan):
    stages = [entry.stage for entry in plan]
    assert stages == sorted(stages, key=study_plan.STAGES.index)
    assert [entry.label for entry in plan[:3]] == ["dense", "intbmoe", "vmoe"]
    assert len({entry.file for entry in plan}) == len(plan)
    assert {entry.seed for entry in plan if entry.stage not in ("seeds", "rest")} == {0}
    labels = {entry.label for entry in plan}
    assert all({entry.seed for entry in plan if entry.label == label} == {0, 1, 2} for label in labels)


def test_the_best_baselines_by_validation_are_repeated_first(plan):
    values = {"switch": 0.9, "soft": 0.8, "vmoe": 0.7, "dense": 0.95}
    found = [summary_of(e, values[e.label]) for e in plan if e.seed == 0 and e.label in values]
    found = [{**s, "test": {"accuracy": 1 - s["test"]["accuracy"]}} for s in found]
    again = study_plan.make_plan(["digits"], SHORT, ["first", "methods", "seeds"], found)
    repeated = {entry.label for entry in again if entry.stage == "seeds"}
    assert repeated == {"dense", "intbmoe", "dense-wide", "swiglu-wide", "dense-placed", "switch", "soft"}


def test_the_backbones_ffn_in_the_mixtures_place_has_a_table_of_its_own(plan):
    placed = next(entry for entry in plan if entry.label == study_tables.PLACED)
    assert placed.stage == "compute"
    assert study_tables.table_of(placed.label) == study_tables.CONTROL


def test_a_digest_covers_what_can_change_a_result_and_nothing_else(plan):
    entry = plan[1]
    recipe = study_plan.recipe_from_dict(entry.recipe)
    for setting in ({"train.workers": 3}, {"data.path": "/x"}, {"train.capture": True}):
        assert study_plan.digest(study_plan.with_settings(recipe, setting)) == entry.digest
    for setting in ({"train.lr": 0.1}, {"train.seed": 5}, {"moe.options": {"blocks": 4}}, {"model.depth": 3}):
        assert study_plan.digest(study_plan.with_settings(recipe, setting)) != entry.digest
    assert len({e.shared_digest for e in plan}) == 1, "methods and seeds share the rest"


def test_changing_a_plan_is_making_it_anew(plan):
    changed = [study_plan.change(entry, ["digits:train.lr=0.1", "stdlib:train.lr=0.2"]) for entry in plan[:4]]
    anew = study_plan.make_plan(["digits"], (*SHORT, "train.lr=0.1"), ["first", "methods"])
    assert [entry.digest for entry in changed] == [entry.digest for entry in anew[:4]]
    assert changed[0].digest != plan[0].digest
    with pytest.raises(ValueError, match="a setting of train; other settings need a new plan"):
        study_plan.change(plan[0], ["model.depth=3"])


def test_a_plan_survives_writing(plan, tmp_path):
    study_plan.write_plan(plan, tmp_path / "plan.json")
    assert study_plan.read_plan(tmp_path / "plan.json") == plan


def test_the_rate_is_best_for_dense_and_intbmoe_together():
    entries = study_plan.make_plan(["digits"], SHORT, ["tune"])
    assert {entry.recipe["train"]["lr"] for entry in entries} == {1e-3, 2e-3}
    values = {(1e-3, "dense"): 0.5, (1e-3, "intbmoe"): 0.6, (2e-3, "dense"): 0.7, (2e-3, "intbmoe"): 0.3}
    found = [summary_of(e, values[e.recipe["train"]["lr"], e.label]) for e in entries]
    assert study_plan.choose_rates(found) == {"digits": 1e-3}
    lower = [{**summary, "higher_is_better": False} for summary in found]
    assert study_plan.choose_rates(lower) == {"digits": 2e-3}
    assert study_plan.choose_rates(found[:1]) == {}, "half a grid decides nothing"


def test_only_settings_without_effect_are_open():
    assert study_plan.free_settings(["train.capture=true"]) == {"train.capture": True}
    with pytest.raises(ValueError, match=r"run-with='train\.lr'"):
        study_plan.free_settings(["train.lr=1"])


def test_estimates_follow_what_is_measured_and_then_what_is_seen(plan, tmp_path):
    entry = plan[0]
    rows = {"kind": "cuda", "study": "digits", "rows": {"dense": {"step_ms": 100.0}, "switch": {"error": "…"}}}
    (tmp_path / TIMING.format("digits")).write_text(json.dumps(rows))
    clock = Clock(tmp_path, jobs=3)
    assert clock.step_seconds(entry, "cuda") == 0.1
    crowded = clock.seconds(entry, "cuda") - START_SECONDS["cuda"]
    assert crowded > 1.9 * entry.steps * 0.1, "before anything is seen, neighbours count"
    clock.learn(entry, "cuda", 0.1)
    assert clock.seconds(entry, "cuda") - START_SECONDS["cuda"] < crowded
    clock.learn_start(entry, "cuda", 50.0, 0.1)
    assert clock.seconds(entry, "cuda") > 50.0 - entry.steps * 0.1


def test_a_follow_up_is_expected_to_take_as_long_as_its_study(plan, tmp_path):
    clock = Clock(tmp_path, jobs=3)
    first, follow_up = (replace(plan[0], study=study) for study in ("tiny-imagenet", "tiny-imagenet-sweep"))
    assert clock.step_seconds(follow_up, "cuda") == clock.step_seconds(first, "cuda") < 0.1


def test_small_studies_go_to_the_cores_if_there_are_any(plan):
    small, large = plan[0], replace(plan[0], on_cpu=False)
    gpu, cores = StudyLane("cuda", 4, leaves_small=True), StudyLane("cpu", 2, small_only=True)
    assert (gpu.suits(small), gpu.suits(large)) == (False, True)
    assert (cores.suits(small), cores.suits(large)) == (True, False)
    assert StudyLane("cuda", 4).suits(small)


def test_tables_hold_runs_of_one_setting_only(plan):
    first = {entry.label: entry for entry in plan if entry.seed == 0}
    runs = [summary_of(first["dense"], 0.5), summary_of(first["intbmoe"], 0.6)]
    runs += [summary_of(e, 0.7 + 0.01 * e.seed) for e in plan if e.label == "vmoe"]
    other = study_plan.change(first["switch"], ["train.lr=0.1"])
    runs.append(summary_of(other, 0.99))
    runs.append(summary_of(first["intbmoe-no_gate"], 0.4))
    text = study_tables.study_text("digits", runs, {"rows": {"dense": {"step_ms": 12.34}}, "device": "a GPU"})
    assert "1 runs with other settings are [below]" in text
    assert "99.00" not in text
    assert "| **V-MoE** | **71.00 ± 2.48 %** |" in text, "Student's t over three seeds"
    assert "| Dense | 50.00 ± 4.30 % |" in text, "one seed: the others' spread"
    assert "| 12.3 |" in text
    assert "--train.seed {0,1,2}" in text
    parameters, ablations = text.split("**Ablations**")
    assert "w/o gate" in ablations.split("<details>")[0]
    assert "w/o gate" not in parameters


def test_commands_tell_which_seeds_had_compiled_steps(plan):
    runs = [summary_of(replace(plan[0], seed=seed), 0.5) for seed in (0, 1, 2)]
    for run in runs[1:]:
        run["recipe"] = {**run["recipe"], "train": {**run["recipe"]["train"], "compile": True, "capture": True}}
    first, later = study_tables._commands(runs)
    assert "--train.seed 0" in first
    assert "compile" not in first
    assert "--train.seed {1,2}" in later
    assert later.endswith("--train.compile True --train.capture True")


def test_of_several_settings_the_best_on_validation_are_shown(plan):
    first = {entry.label: entry for entry in plan if entry.seed == 0}
    runs = [summary_of(first[label], 0.5, test={"accuracy": 0.9, "accuracy5": 0.9}) for label in ("dense", "intbmoe")]
    runs.append(summary_of(first["vmoe"], 0.95))  # more runs, and better in everything except the deciding metric
    other = [study_plan.change(first[label], ["train.lr=0.1"]) for label in ("dense", "intbmoe")]
    runs += [summary_of(entry, 0.6, test={"accuracy": 0.1, "accuracy5": 0.1}) for entry in other]
    text = study_tables.study_text("digits", runs, {"rows": {}})
    assert "| Dense | 10.00 % | 60.00 % |" in text
    assert "3 runs with other settings are [below]" in text


def test_a_run_that_broke_down_is_named_but_neither_shown_nor_part_of_the_spread(plan):
    def run(entry, value, loss):
        return summary_of(entry, value, test={"accuracy": value, "accuracy5": value, "loss": loss})

    runs = [run(entry, 0.5 + 0.01 * entry.seed, 1.0) for entry in plan if entry.label in ("dense", "intbmoe")]
    others = [entry for entry in plan if entry.label == "vmoe"]
    runs += [run(entry, 0.5, 1.9) if entry.seed else run(entry, 0.1, 2.1) for entry in others]
    whole = study_tables.study_text("digits", [one for one in runs if one["test"]["loss"] < 2], {"rows": {}})
    text = study_tables.study_text("digits", runs, {"rows": {}})
    assert [line for line in text.splitlines() if line.startswith("Left out")] == [
        "Left out: V-MoE, seed 0, which broke down (test loss 2.1)."
    ]
    assert text.replace("Left out: V-MoE, seed 0, which broke down (test loss 2.1).\n\n", "") == whole
    assert "V-MoE" not in study_tried.settings_text(["digits"], runs, [])


def test_rows_at_own_rates_take_each_method_where_it_is_best(plan, monkeypatch):
    best = {"vmoe": 0.1, "dense": study_plan.change(plan[0], []).recipe["train"]["lr"], "switch": 0.7}
    monkeypatch.setattr(study_rows, "own_rates", lambda name, summaries: best)
    common = {label: [summary_of(e, 0.5) for e in plan if e.label == label] for label in best}
    other = [summary_of(study_plan.change(e, ["train.lr=0.1"]), 0.6) for e in plan if e.label == "vmoe"]
    found = {"wikipedia": common, "wikipedia-rates": {"vmoe": other[::-1]}}
    rows = study_rows.rows_at_own_rates("wikipedia-rates", found, [])
    assert [*rows] == ["dense", "vmoe"], "in the paper's order, and nothing without a run at its rate"
    assert [run["seed"] for run in rows["vmoe"]] == [0, 1, 2]
    assert {run["title"] for run in rows["vmoe"]} == {"V-MoE, 0.1"}
    assert {run["test"]["accuracy"] for run in rows["vmoe"]} == {0.6}
    assert {run["test"]["accuracy"] for run in rows["dense"]} == {0.5}


def test_warm_ups_are_compared_in_steps_and_by_first_seeds(plan, monkeypatch):
    def run(entry, warmup, value):
        changed = study_plan.change(entry, [f"train.warmup={warmup}"])
        return summary_of(changed, value)

    dense, *_, later = [entry for entry in plan if entry.label == "dense"]
    vmoe = next(entry for entry in plan if entry.label == "vmoe")
    monkeypatch.setitem(STUDIES, "digits-warmup", replace(STUDIES["digits"], labels=("dense", "vmoe", "switch")))
    found = {"digits": {"dense": [run(dense, 0.1, 0.5), run(later, 0.1, 0.9)], "vmoe": [run(vmoe, 0.1, 0.4)]}}
    longer = [run(dense, 0.5, 0.6), run(dense, 0.75, 0.55), run(later, 0.5, 0.9), run(vmoe, 0.75, 0.3)]
    other_rate = study_plan.change(dense, ["train.warmup=0.75", "train.lr=0.5"])
    longer = [{**one, "study": "digits-warmup"} for one in [*longer, summary_of(other_rate, 0.99)]]
    lines = study_tried.warmups_text("digits", found, longer).splitlines()
    assert lines[0] == "| Method | 2 | 10 | 15 |"
    assert lines[2:] == ["| Dense | 50.00 % | **60.00 %** | 55.00 % |", "| V-MoE | 40.00 % | – | 30.00 % |"]


def test_a_second_call_adds_to_what_travels_back(tmp_path):
    for name in ("one.json", "two.json"):
        (tmp_path / name).write_text(name)
        pack(tmp_path / "out", [tmp_path / name])
    with tarfile.open(tmp_path / "out" / "study.tar") as tar:
        found = {member.name: tar.extractfile(member).read().decode() for member in tar}
    assert found == {"one.json": "one.json", "two.json": "two.json"}


def test_a_part_replaces_what_was_between_its_markers():
    text = "a\n<!-- study:x -->\nold\n<!-- /study:x -->\nb\n"
    once = study_tables.put(text, "x", r"new \1", Path("f.md"))
    assert once == "a\n<!-- study:x -->\nnew \\1\n<!-- /study:x -->\nb\n"
    assert study_tables.put(once, "x", r"new \1", Path("f.md")) == once
    with pytest.raises(ValueError, match="must hold <!-- study:y -->"):
        study_tables.put(text, "y", "new", Path("f.md"))


def test_pages_have_a_place_for_every_table_and_none_for_another(tmp_path):
    text = "".join(page.read_text(encoding="utf-8") for page in study_tables.PAGES)
    places = re.findall("<!-- study:(.*?) -->", text)
    assert {*REAL, *(f"claims-{study}" for study in REAL), "tuning", "mixing", "settings", "gains", "place"} <= {
        *places
    }
    assert sorted(places) == sorted([*set(places), "overview"]), "each once, and the overview in the README too"
    page = tmp_path / "page.md"
    page.write_text("<!-- study:lost -->\n<!-- /study:lost -->\n", encoding="utf-8")
    with pytest.raises(ValueError, match="marker 'lost': there is no such table"):
        study_tables.fill(page, {"found": ""})


def test_the_readme_shows_what_the_document_does():
    """Both are written together, so a difference means that one was edited by hand or forgotten."""
    marker = re.compile("<!-- study:overview -->(.*?)<!-- /study:overview -->", re.DOTALL)
    texts = [page.read_text(encoding="utf-8") for page in study_tables.PAGES]
    shown = [found[1] for text in texts if (found := marker.search(text))]
    assert len(shown) == 2
    assert shown[0] == shown[1]
    assert all(title in shown[0] for title in ("Tiny-ImageNet", "New York"))


def test_attentions_products_are_added_to_early_counts(plan):
    entry = next(entry for entry in plan if entry.label == "switch")
    counts = {"flops_precomposed": None, "format": 1}
    (early,) = count_attention([summary_of(entry, 0.5, **counts)])
    model = entry.recipe["model"]
    tokens = (model["image_size"] // model["patch_size"]) ** 2 + 1
    products = 2 * 2 * model["depth"] * tokens**2 * model["dim"]
    assert (early["flops"] - 3e9, early["flops_training"] - 2e9) == (products, products)
    assert early["flops_precomposed"] is None
    (new,) = count_attention([summary_of(entry, 0.5, **counts | {"format": 2})])
    assert new["flops"] == 3e9


def test_the_overview_names_the_other_method_that_is_best_on_validation(plan):
    titles = {"digits": "Digits"}
    first = {entry.label: entry for entry in plan if entry.seed == 0}
    runs = [summary_of(first["vmoe"], 0.7, test={"accuracy": 0.1}), summary_of(first["switch"], 0.6)]
    assert study_tables.overview_text(titles, runs) == "No run yet.", "without IntBMoE there is nothing to compare"
    runs += [summary_of(first["intbmoe"], 0.65), summary_of(first["intbmoe-no_gate"], 0.9)]
    text = study_tables.overview_text(titles, runs)
    assert text.splitlines()[2:] == ["| Digits, accuracy | – | – | V-MoE 10.00 % | 65.00 % | – |"]
    second = {entry.label: entry for entry in plan if entry.seed == 1}
    runs += [summary_of(second[label], 0.6) for label in ("intbmoe", "switch")]
    text = study_tables.overview_text(titles, runs)
    assert "Switch" in text
    assert "V-MoE" not in text, "it has fewer seeds than IntBMoE"


def test_a_run_that_ends_when_it_is_asked_to_stop_counts_as_finished(plan, tmp_path, monkeypatch, capsys):
    def start(scheduler, entry, lane, place):
        """A process that runs until it is asked to stop, and then, if it is dense, writes its summary."""
        summary = tmp_path / entry.file
        body = json.dumps({**summary_of(entry, 0.5), "steps_per_second": 1.0})
        end = f"open({str(summary)!r}, 'w').write({body!r})" if entry.label == "dense" else "pass"
        code = f"import signal\nsignal.sigwait([signal.SIGTERM])\n{end}"
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # inherited, so that no signal arrives too early
        try:
            process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        return Process(entry, lane, place, process, tmp_path / "log", 0, tmp_path / "none", 0.0)

    monkeypatch.setattr(StudyScheduler, "start", start)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # these tests do not use the command's own handler
    settings = {
        "output": tmp_path,
        "root": tmp_path,
        "pack": tmp_path / "pack",
        "weights": [],
        "run_with": [],
        "data": [],
    }
    options = SimpleNamespace(**settings, seconds=STOP_SECONDS + 1, unfinished=True, mps=False, commit="abc")
    assert study.run_all(list(plan[:2]), [StudyLane("cpu", 2)], Clock(tmp_path, 2), options) == 0
    told = capsys.readouterr().out
    assert "finished  digits/dense/0: valid accuracy 0.5000" in told
    assert "stopped   digits/intbmoe/0 before its first line" in told
    assert "1 finished, 0 failed, 1 stopped, 0 wait" in told
    with tarfile.open(tmp_path / "pack" / "study.tar") as tar:
        assert tar.getnames() == [plan[0].file]


@pytest.mark.slow
def test_runs_are_summarised_packed_and_not_repeated(tmp_path):
    def call(*arguments):
        command = [sys.executable, "-m", "benchmarks.study", "--only", "digits", "--stages", "first"]
        command += ["--set", "train.steps=2", "--set", "train.warmup=0", "--output", str(tmp_path / "out")]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True, cwd=HOUSE).stdout

    places = ["--root", str(tmp_path / "runs"), "--pack", str(tmp_path / "pack"), "--jobs", "2"]
    told = call("--seconds", "300", "--weights", "digits/intbmoe/0", *places)
    assert "3 finished, 0 failed, 0 stopped, 0 wait" in told
    files = sorted((tmp_path / "out").glob("digits--*.json"))
    assert len(files) == 3
    summary = json.loads(files[0].read_text())
    assert summary["test"].keys() == {"accuracy", "accuracy5", "loss"}
    assert summary["flops_training"] > 0
    assert summary["curve"]
    listed = subprocess.run(["tar", "tf", tmp_path / "pack" / "study.tar"], capture_output=True, text=True).stdout
    outcomes = [path.with_suffix(".npz") for path in files]
    assert sorted(listed.split()) == sorted(path.name for path in [*files, *outcomes])
    assert read_outcomes(outcomes[0])["accuracy"].mean() == pytest.approx(summary["test"]["accuracy"])
    assert "0 runs wait" in call("--seconds", "60", *places)
    parts = b"".join(path.read_bytes() for path in sorted((tmp_path / "pack").glob("*.part*")))
    subprocess.run(["tar", "x"], input=parts, cwd=tmp_path, check=True)
    run = next(tmp_path.glob("digits/intbmoe/0"), None) or next(tmp_path.glob("*/digits/intbmoe/0"))
    assert load(run) is not None
    assert RunDirectory(run).outcomes()["accuracy"].shape == (359,)
