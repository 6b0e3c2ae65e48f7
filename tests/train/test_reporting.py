"""What a run reports: the last step or the best evaluation, and no validation if nothing was held out."""

from dataclasses import replace

import pytest
from tiny_task import tiny_recipe

from intbmoe.layer import moe_layers
from intbmoe.recipes import load_recipe
from intbmoe.tasks import make_task
from intbmoe.train import evaluate, load, train
from intbmoe.train.errors import TrainingError
from intbmoe.train.loop import Training

ALL_TRAINING_DIGITS = 1797 - 360  # all but the test images, a fifth of each class


@pytest.fixture(scope="module")
def unvalidated(tmp_path_factory):
    recipe = load_recipe("digits")
    small = replace(recipe.model, dim=12, depth=1, heads=1, hidden=16, moe_layers=(0,))
    recipe = replace(recipe, model=small, data=replace(recipe.data, valid_fraction=0.0))
    recipe = replace(recipe, train=replace(recipe.train, epochs=2.0, eval_every=1.0))
    return train(recipe, tmp_path_factory.mktemp("runs"), quiet=True)


def test_with_nothing_held_out_every_training_image_is_trained_on(unvalidated):
    task = make_task(unvalidated.recipe)
    assert len(task.split("valid")) == 0
    assert len(task.split("train")) == pytest.approx(ALL_TRAINING_DIGITS, abs=5)
    whole = load_recipe("digits")
    held = [len(make_task(whole).split(name)) for name in ("train", "valid")]
    assert sum(held) == len(task.split("train"))


def test_with_nothing_held_out_the_last_epoch_is_reported(unvalidated):
    rows = unvalidated.metrics()
    assert [row["split"] for row in rows if row["split"] != "train"] == ["test"]
    result = unvalidated.result
    assert result["valid"] is None
    assert (result["report"], result["test_step"]) == ("last", result["steps"])
    assert evaluate(unvalidated)["accuracy"] == pytest.approx(result["test"]["accuracy"])
    with pytest.raises(TrainingError, match="nothing was held out for validation"):
        evaluate(unvalidated, "valid")


def test_what_needs_unseen_images_takes_the_test_split_then(unvalidated):
    task = make_task(unvalidated.recipe)
    assert len(task.held_out()) == len(task.split("test"))
    assert len(task.golden_requests(None, 3)) == 3
    assert len(list(moe_layers(load(unvalidated)))) == 1


def test_the_best_evaluation_on_the_test_split_on_demand(tmp_path):
    run = train(tiny_recipe("switch", epochs=6.0, report="best", lr=0.3), tmp_path, quiet=True)
    tests = {row["step"]: row for row in run.metrics() if row["split"] == "test"}
    assert list(tests) == [5, 10, 15, 20, 25, 30]
    result = run.result
    best = max(tests, key=lambda step: (tests[step]["accuracy"], -step))
    assert best != 30, "the case shows nothing: the last epoch is the best"
    assert (result["report"], result["test_step"]) == ("best", best)
    assert result["test"] == {name: tests[best][name] for name in result["test"]}


def test_the_best_survives_an_interruption(tmp_path, monkeypatch):
    recipe = tiny_recipe("switch", epochs=6.0, report="best", lr=0.3, checkpoint_every=5)
    straight = train(recipe, tmp_path / "straight", quiet=True)
    assert straight.result["test_step"] < 25, "the case shows nothing: the best comes after the last checkpoint"

    class StoppedError(Exception):
        pass

    def stop_after_a_while(self, *arguments):
        if self.at.step > 27:
            raise StoppedError
        return original(self, *arguments)

    original = Training._stop_if_asked
    with monkeypatch.context() as patched:
        patched.setattr(Training, "_stop_if_asked", stop_after_a_while)
        with pytest.raises(StoppedError):
            train(recipe, tmp_path / "stopped", quiet=True)
    resumed = train(recipe, tmp_path / "stopped", quiet=True)
    kept = ("test", "test_step", "valid", "sha256")
    assert {name: resumed.result[name] for name in kept} == {name: straight.result[name] for name in kept}
