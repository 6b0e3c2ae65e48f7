"""The models that come with the package: their scores are measured again, and their cards say them."""

import platform

import pytest

import intbmoe
from intbmoe.cli import main
from intbmoe.files import digest
from intbmoe.train import RunDirectory, TrainingError, evaluate
from intbmoe.zoo import find_in_zoo, list_zoo

ZOO = [f"zoo:{name}" for name in list_zoo()]
SLOW = pytest.mark.slow  # a megabyte of text


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW) if name == "zoo:text" else name for name in ZOO])
def test_the_score_is_the_cards(name):
    run = RunDirectory.existing(name)
    card = (run.path / "README.md").read_text(encoding="utf-8")
    score = run.result["test"][run.result["metric"]]
    assert f"| {score:.4f}" in card
    assert digest(run.model_path.read_bytes()) == run.result["sha256"]["model.safetensors"]
    assert run.result["sha256"]["model.safetensors"] in card
    if run.recipe.data.source == "stdlib" and f"library of Python {platform.python_version()} |" not in card:
        pytest.skip("the text is this Python's library, and the score was measured on another's")
    assert evaluate(name)[run.result["metric"]] == pytest.approx(score, abs=1e-3)  # other CPUs round otherwise


@pytest.mark.parametrize("name", ZOO)
def test_it_is_small_and_loads(name):
    assert sum(path.stat().st_size for path in find_in_zoo(name).iterdir()) < 3.2e6
    model = intbmoe.load(name)
    assert not model.training
    assert sum(p.numel() for p in model.parameters()) == RunDirectory.existing(name).result["params"]


def test_a_misspelt_name_is_answered():
    with pytest.raises(TrainingError, match="zoo:digit: no model of the zoo is called so: did you mean 'digits'"):
        intbmoe.load("zoo:digit")


def test_an_analysis_has_no_place_in_the_package():
    with pytest.raises(SystemExit, match="zoo:digits has no place for an analysis"):
        main(["analyse", "zoo:digits"])


def test_it_is_exported_when_it_is_first_served(tmp_path, monkeypatch):
    from intbmoe.commands.serving import _exported

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = _exported("zoo:digits")
    assert made.is_relative_to(tmp_path)
    before = (made / "artifact.json").stat()
    assert _exported("zoo:digits") == made
    assert (made / "artifact.json").stat().st_mtime_ns == before.st_mtime_ns
