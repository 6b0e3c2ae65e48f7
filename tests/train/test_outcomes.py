"""What a run keeps of each test example, and that its metrics follow from it."""

import io

import numpy as np
import pytest
import torch
from tiny_task import tiny_recipe

from intbmoe.tasks import make_task
from intbmoe.train import evaluation, load, train
from intbmoe.train.errors import DamagedFileError
from intbmoe.train.outcomes import pack_outcomes, read_outcomes


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tiny_recipe(), tmp_path_factory.mktemp("runs"), quiet=True)


def metrics_of(run):
    return make_task(run.recipe).metrics({name: values.sum() for name, values in run.outcomes().items()})


def test_the_metrics_are_those_of_the_outcomes(run):
    assert metrics_of(run) == pytest.approx(run.result["test"], rel=1e-6)


def test_the_outcomes_are_in_the_order_of_the_split(run):
    task, model = make_task(run.recipe), load(run)
    batch = task.split("test").batch(range(14), epoch=0, seed=0)
    with torch.no_grad():
        expected = task.evaluate_examples(model, batch)
    for name, values in run.outcomes().items():
        assert values == pytest.approx(expected[name].double().numpy(), rel=1e-5), name


def test_the_best_evaluation_keeps_its_own(tmp_path):
    run = train(tiny_recipe(epochs=6.0, report="best", lr=0.3), tmp_path, quiet=True)
    assert run.result["test_step"] < run.result["steps"], "the case shows nothing: the last epoch is the best"
    assert metrics_of(run) == pytest.approx(run.result["test"], rel=1e-6)


def test_a_split_that_is_too_large_keeps_none(tmp_path, monkeypatch, run):
    monkeypatch.setattr(evaluation, "MOST_EXAMPLES", 13)
    large = train(tiny_recipe(), tmp_path, quiet=True)
    assert large.outcomes() is None
    assert large.result["test"] == pytest.approx(run.result["test"], rel=1e-9)


def test_numbers_come_back_and_take_little_room():
    generator = torch.Generator().manual_seed(0)
    given = {
        "count": torch.ones(10_000),
        "hit": torch.rand(10_000, generator=generator) < 0.5,
        "rank": torch.randint(60_000, (10_000,), generator=generator),
        "loss": torch.rand(10_000, generator=generator, dtype=torch.float64) * 9,
    }
    packed = pack_outcomes(given)
    assert len(packed) < 62_000, "2 bytes for a rank, 4 for a loss, little for the rest"
    with np.load(io.BytesIO(packed)) as file:
        kinds = {name: file[name].dtype for name in given}
        assert list(kinds.values()) == [np.uint8, np.uint8, np.uint16, np.float32]
        assert all((file[name] == given[name].numpy().astype(kind)).all() for name, kind in kinds.items())


def test_what_is_not_whole_is_refused(tmp_path, run):
    path = tmp_path / "outcomes.npz"
    whole = run.outcomes_path.read_bytes()
    path.write_bytes(whole[:-30])
    with pytest.raises(DamagedFileError, match="not a complete file of outcomes"):
        read_outcomes(path)
    with pytest.raises(DamagedFileError, match="SHA-256"):
        read_outcomes(path, run.result["sha256"]["outcomes.npz"])
    np.savez(path, count=np.ones(3), loss=np.ones(2))
    with pytest.raises(DamagedFileError, match="one number per example"):
        read_outcomes(path)
