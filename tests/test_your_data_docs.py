"""Follows docs/your-data.md from start to end, with small generated data and small models."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import intbmoe
from intbmoe.cli import main
from intbmoe.export.artifact import load_artifact
from intbmoe.recipes import list_recipes

PAGE = (Path(__file__).parent.parent / "docs" / "your-data.md").read_text(encoding="utf-8")
COMMANDS = {
    block.split()[2]: block.splitlines() for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
}
SIZES = {"model.dim": 12, "model.hidden": 8, "model.depth": 1, "moe.experts": 2, "train.epochs": 1, "train.batch": 8}
SMALL = {
    "images": {**SIZES, "model.image_size": 8, "model.patch_size": 4, "model.moe_layers": 0, "train.workers": 0},
    "text": {**SIZES, "model.heads": 2, "data.length": 24, "data.tokenizer_size": 300},
    "sequences": {**SIZES, "model.length": 6},
}
EVENTS = [(user, 10 + (user + time) % 7, time) for user in range(9) for time in range(6)]
TEXTS = [f"Once upon a time, {number} cats sat in a tree.\n" * 3 for number in range(30)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, forked, sketched):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INTBMOE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def make_data():
    random = np.random.default_rng(0)
    for name in ("cat", "dog"):
        Path("pets", name).mkdir(parents=True)
        for number in range(8):
            Image.fromarray(random.integers(0, 256, (11, 9 + number, 3), np.uint8)).save(f"pets/{name}/{number}.jpg")
    Path("stories.txt").write_text("".join(TEXTS), encoding="utf-8")
    lines = ["userId,movieId,rating,timestamp", *(f"{user},{item},5,{time}" for user, item, time in EVENTS)]
    Path("ratings.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(line, recipe):
    words = shlex.split(line)
    assert words[0] == "intbmoe"
    if words[1] in ("train", "compare"):
        small = [word for name, value in SMALL[recipe].items() for word in (f"--{name}", str(value))]
        words += [*small, *(["--quiet"] if words[1] == "train" else ["--jobs", "1"])]
    if words[1] == "compare" and recipe != "images":  # a process per method: only one kind of data runs all
        words[words.index("--methods") + 1] = "intbmoe,dense"
    if words[1] != "serve":
        try:
            main(words[1:])
        except SystemExit as end:
            assert not end.code, line  # noqa: PT017
        return None
    predictor = load_artifact(words[2]).predictor()
    example = dict(predictor.request_schema["examples"][0])
    [answer] = predictor.answer([predictor.encode(example)])
    return example, answer


def test_each_kind_has_a_five_line_example():
    assert list(COMMANDS) == ["images", "text", "sequences"]
    assert all(len(lines) == 5 for lines in COMMANDS.values())
    assert set(COMMANDS) <= set(list_recipes())


@pytest.mark.parametrize("recipe", COMMANDS)
def test_the_commands_go_through(recipe, capsys):
    make_data()
    for line in COMMANDS[recipe]:
        found = run(line, recipe)
    example, answer = found
    if recipe == "images":
        assert {result["name"] for result in answer["results"]} == {"cat", "dog"}
    elif recipe == "sequences":
        assert example["history"] == ["10", "11", "12"]
        assert {result["id"] for result in answer["results"]} == {str(item) for item in range(10, 17)}
    else:
        assert isinstance(answer["text"], str)
    assert "FAILED" not in capsys.readouterr().out


def test_the_python_goes_through(monkeypatch, folder):
    def small(recipe, settings=None, **given):
        chosen = SMALL[recipe] | ({"model.moe_layers": [0]} if recipe == "images" else {})
        return train(recipe, settings={**chosen, **(settings or {})}, **given)

    train = intbmoe.train
    monkeypatch.setattr(intbmoe, "train", small)
    [code] = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    images = [(torch.rand(3, 9, 9), number % 2) for number in range(12)]
    names = {"my_images": images, "my_texts": TEXTS, "my_events": EVENTS}
    exec(code, names)
    assert names["model"].config.items == 7
    assert sorted(path.parent.name for path in folder.glob("runs/*/*/0")) == ["intbmoe", "intbmoe", "switch"]
