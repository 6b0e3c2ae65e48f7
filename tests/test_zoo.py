"""The models that come with the package: their scores are measured again and must match their cards."""

import io
import os
import platform
import shutil
import tarfile

import pytest
from benchmarks.zoo import scores_on_stand_in
from benchmarks.zoo_stand_in import write_stand_in

import intbmoe
from intbmoe.cli import main
from intbmoe.files import digest
from intbmoe.models.vit import ViTConfig
from intbmoe.tasks import DataError
from intbmoe.tasks.vision import tiny_imagenet
from intbmoe.train import RunDirectory, TrainingError, evaluate
from intbmoe.train.run import moved_data_is_explained
from intbmoe.zoo import STAND_IN, find_in_zoo, list_zoo

ZOO = [f"zoo:{name}" for name in list_zoo()]


LONG = ("zoo:text", "zoo:tiny-imagenet", "zoo:tiny-imagenet-dense")  # a megabyte of text, ten thousand images


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in ZOO])
def test_the_score_is_the_cards(name):
    run = RunDirectory.existing(name)
    card = (run.path / "README.md").read_text(encoding="utf-8")
    score = run.result["test"][run.result["metric"]]
    assert f"| {score:.4f}" in card
    assert digest(run.model_path.read_bytes()) == run.result["sha256"]["model.safetensors"]
    assert run.result["sha256"]["model.safetensors"] in card
    if run.recipe.data.source == "stdlib" and f"library of Python {platform.python_version()} |" not in card:
        pytest.skip("the text is this Python's library, but the score was measured on another version's")
    data = os.environ.get("INTBMOE_DATA") if run.stand_in else None
    if run.stand_in and data is None:
        pytest.skip("INTBMOE_DATA, the tar of Tiny-ImageNet, is not set")
    assert evaluate(name, data=data)[run.result["metric"]] == pytest.approx(
        score, abs=1e-3
    )  # other CPUs round differently


@pytest.mark.parametrize("name", ZOO)
def test_it_is_small_and_loads(name):
    assert sum(path.stat().st_size for path in find_in_zoo(name).iterdir()) < 1e7
    model = intbmoe.load(name)
    assert not model.training
    assert sum(p.numel() for p in model.parameters()) == RunDirectory.existing(name).result["params"]


@pytest.mark.parametrize("name", [name for name in ZOO if RunDirectory.existing(name).stand_in])
def test_scores_on_pictures_that_come_with_it_are_those_of_the_day_it_came(name):
    run = RunDirectory.existing(name)
    for found, kept in zip(scores_on_stand_in(run), run.result["stand_in"], strict=True):
        assert found == pytest.approx(kept, abs=1e-3)  # other CPUs round differently


def test_a_stand_in_has_the_form_of_the_data_and_none_of_its_pictures(tmp_path):
    names = b'[{"label": 0, "name": "hen"}, {"label": 1, "name": "cat, house cat"}]'
    with tarfile.open(tmp_path / "real.tar", "w") as tar:
        about = tarfile.TarInfo("classes.json")
        about.size = len(names)
        tar.addfile(about, io.BytesIO(names))
    write_stand_in(tmp_path / "real.tar", tmp_path / STAND_IN)
    model = ViTConfig(image_size=32, patch_size=4, classes=2)
    source = tiny_imagenet.read(str(tmp_path / STAND_IN), model, valid_fraction=0.05)
    assert source.class_names == ("hen", "cat")
    assert [len(split.labels) for split in (source.train, source.valid, source.test)] == [2, 2, 2]
    pictures = source.test.array.astype(int)
    assert abs(pictures[0] - pictures[1]).mean() > 10


def test_a_model_that_came_without_its_data_asks_for_them(tmp_path):
    shutil.copytree(find_in_zoo("zoo:digits"), tmp_path / "run")
    (tmp_path / "run" / STAND_IN).touch()
    with (
        pytest.raises(DataError, match=r"run comes without its data: give its path with --data\n\(no images\)"),
        moved_data_is_explained(tmp_path / "run"),
    ):
        raise DataError("no images")


def test_a_misspelt_name_is_answered():
    with pytest.raises(TrainingError, match="zoo:digit: the zoo has no such model: did you mean 'digits'"):
        intbmoe.load("zoo:digit")


def test_an_analysis_has_no_place_in_the_package():
    with pytest.raises(
        SystemExit, match="zoo:digits is part of the installed package, so nothing can be written into it: train"
    ):
        main(["analyse", "zoo:digits"])


def test_it_is_exported_when_it_is_first_served(tmp_path, monkeypatch):
    from intbmoe.commands.serving import _exported

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = _exported("zoo:digits")
    assert made.is_relative_to(tmp_path)
    before = (made / "artifact.json").stat()
    assert _exported("zoo:digits") == made
    assert (made / "artifact.json").stat().st_mtime_ns == before.st_mtime_ns
