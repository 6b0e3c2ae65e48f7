"""loads.jsonl: each layer's counts between two lines of metrics, also after kills and resumptions."""

import json
import signal

import torch
from test_resume import run_child, train_and_die
from tiny_task import tiny_recipe

from intbmoe.methods.dynmoe import DynMoE
from intbmoe.statistics import load_statistics_of
from intbmoe.train import train
from intbmoe.train.metrics import LOAD_RATIOS, load_line, mean_load
from intbmoe.train.resume import Checkpoint, CheckpointFolder
from intbmoe.train.run import RunDirectory
from intbmoe.train.step import Stepper


def test_a_line_by_hand():
    opened = torch.tensor([True, True, True, False])
    pool = load_statistics_of(torch.tensor([4, 0, 2, 0]), tokens=8, dropped=2, opened=opened, untaken=2)
    assert load_line(pool) == {"tokens": 8, "counts": [4, 0, 2, None], "dropped": 0.25, "untaken": 0.25}
    plain = load_statistics_of(torch.tensor([4, 0]), tokens=4)
    assert load_line(plain) == {"tokens": 4, "counts": [4, 0]}
    assert mean_load({"a": pool, "b": plain})["untaken"] == 0.25, "of the layers that count them"
    assert "untaken" not in mean_load({"b": plain})


def test_every_assignment_of_training_is_in_the_file(tmp_path):
    run = train(tiny_recipe("intbmoe", epochs=2.0), tmp_path, quiet=True)
    lines = run.loads()
    assert [line["step"] for line in lines] == [row["step"] for row in run.metrics() if row["split"] == "train"]
    assert set(lines[0]["layers"]) == {"blocks.0.moe", "blocks.1.moe"}
    for layer in lines[0]["layers"]:
        tokens = sum(line["layers"][layer]["tokens"] for line in lines)
        assert tokens == run.result["examples"] * 4
        assert sum(sum(line["layers"][layer]["counts"]) for line in lines) == 2 * tokens, "two blocks a token"


def test_a_method_without_choice_has_no_file(tmp_path):
    run = train(tiny_recipe("soft", epochs=0.4), tmp_path, quiet=True)
    assert not run.loads_path.exists()
    assert run.loads() == []


def test_untaken_tokens_are_in_the_metrics(tmp_path):
    run = train(tiny_recipe("expert_choice", epochs=1.0), tmp_path, quiet=True)
    assert all("untaken" in row for row in run.metrics() if row["split"] == "train")
    assert all("untaken" in layer for line in run.loads() for layer in line["layers"].values())


def test_a_layer_that_takes_no_token(tmp_path, monkeypatch):
    """If no expert of DynMoE is similar enough to a token, the run goes on, without ratios of loads."""
    fresh = DynMoE.__init__

    def strict(layer, *args, **options):
        fresh(layer, *args, **options)
        layer.thresholds.data.fill_(20.0)

    monkeypatch.setattr(DynMoE, "__init__", strict)
    run = train(tiny_recipe("dynmoe", epochs=1.0), tmp_path, quiet=True)
    assert not any(any(layer["counts"]) for layer in run.loads()[0]["layers"].values())
    assert not any(name in run.metrics()[0] for name in LOAD_RATIOS)


def test_a_run_begun_without_loads_goes_on_with_them(tmp_path):
    recipe = tiny_recipe("switch")
    assert run_child(train_and_die, recipe, tmp_path, Stepper, "take", 4) == -signal.SIGKILL
    run = RunDirectory.of(recipe, tmp_path)
    folder = CheckpointFolder(run.path / "checkpoints", 2)
    found = folder.load_newest(lambda line: None)
    state = {key: value for key, value in found.state.items() if key not in ("loads_length", "format", "step")}
    folder.save(Checkpoint(found.step, found.tensors, state))
    run.loads_path.unlink()
    lines = train(recipe, tmp_path, quiet=True).loads()
    assert lines
    assert lines[0]["step"] > found.step


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    run = RunDirectory(tmp_path)
    run.loads_path.write_text(json.dumps({"step": 1, "layers": {}}) + '\n{"step": 2, "lay')
    assert run.loads() == [{"step": 1, "layers": {}}]
