"""Follows docs/adding-a-task.md: writes its file and its recipe, and runs its commands."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml

from forked import ForkedPopen
from intbmoe import cli, registry
from intbmoe.export import ArtifactError, load_artifact

PAGE = (Path(__file__).parents[2] / "docs" / "adding-a-task.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The reader's folder; the task is unregistered again when the test ends."""
    (tmp_path / "wine_task.py").write_text(blocks("python")[0], encoding="utf-8")
    (tmp_path / "wine.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    registry.list_tasks()  # so that the package's own tasks are imported
    monkeypatch.setenv(registry.PLUGINS, "")
    monkeypatch.setattr(registry, "_tasks", dict(registry._tasks))
    monkeypatch.setattr(registry, "_loaded", set(registry._loaded))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("wine_task", None)


def commands():
    """The page's intbmoe commands, by name; the test makes curl's request in Python."""
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("intbmoe ")]
    return {words[1]: words[1:] for words in map(shlex.split, lines)}


def run(words):
    """Run a command in this process, which has already imported the packages."""
    code = 0
    try:
        cli.main(words)
    except SystemExit as ended:
        code = ended.code
    assert not code


@contextlib.contextmanager
def served(words):
    words = [*words, "--workers", "1", "--fronts", "1"]
    words[words.index("--port") + 1] = "0"
    environment = {**os.environ, registry.PLUGINS: "", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "intbmoe.cli", *words]
    server = ForkedPopen(command, stdout=subprocess.PIPE, text=True, env=environment)  # its children are not forked
    try:
        for line in server.stdout:
            found = re.search(r"http://[\d.]+:\d+", line)
            if found:
                break
        else:
            pytest.fail("the server ended before it was ready")
        yield found.group()
    finally:
        server.terminate()
        server.wait(30)


def ask(url, body=None):
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    for _ in range(100):
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(request, timeout=20) as response:
            return json.load(response)
        time.sleep(0.1)
    raise AssertionError(f"no answer from {url}")


def test_a_task_in_one_file_is_trained_compared_analysed_exported_and_served(folder, capsys, sketched):
    steps = commands()
    assert list(steps) == ["train", "compare", "analyse", "export", "serve"]
    run(steps["train"])
    run_folder = folder / "runs" / "wine" / "intbmoe" / "0"
    assert json.loads((run_folder / "done.json").read_text())["test"]["accuracy"] > 0.8
    noted = json.loads((run_folder / "environment.json").read_text())
    assert list(noted[0]["plugins"]) == ["wine_task.py"]
    assert yaml.safe_load((run_folder / "config.yaml").read_text())["task"] == "wine"

    run(steps["compare"])
    assert (folder / "runs" / "wine" / "dense" / "0" / "done.json").is_file()
    printed = capsys.readouterr().out
    assert "accuracy" in printed
    assert "intbmoe eval runs/wine/intbmoe/0 --plugin wine_task.py\n" in printed  # printed by train
    assert " analyse runs/wine/dense/0 --plugin wine_task.py  " in printed  # printed by compare

    run([*steps["analyse"], "--numbers-only"])  # pictures take seconds, and other tests draw them
    analysis = json.loads((run_folder / "analysis" / "data" / "analysis.json").read_text())
    assert {"routing", "load", "participation"} <= set(analysis["parts"])
    assert "does not say how to show an example" in analysis["left_out"]["examples"]

    run(steps["export"])
    assert "intbmoe serve wine-artifact --plugin wine_task.py\n" in capsys.readouterr().out
    about = json.loads((folder / "wine-artifact" / "artifact.json").read_text())
    assert (about["task"], about["task_module"]) == ("wine", "wine_task")

    with served(steps["serve"]) as url:
        described = ask(f"{url}/v1/model")
        assert (described["task"], described["action"], described["form"]) == ("wine", "classify", None)
        [example] = described["request"]["examples"]
        answer = ask(f"{url}/v1/classify", {**example, "explain": True})
    assert [one["name"] for one in answer["results"]] != []
    assert sum(one["score"] for one in answer["results"]) == pytest.approx(1)
    assert len(answer["tokens"]) == len(answer["blocks"][0]["tokens"]) == 13

    del registry._tasks["wine"]  # as in a process that does not know the file
    os.environ[registry.PLUGINS] = ""
    registry._loaded.discard(str(folder / "wine_task.py"))
    with pytest.raises(ArtifactError, match=r"for the task 'wine', which comes from wine_task.*--plugin FILE"):
        load_artifact(folder / "wine-artifact").encoder()
    with pytest.raises(SystemExit, match=r"task='wine' is not allowed.*--plugin FILE"):
        cli.main(["train", "wine.yaml"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["methods", "--plugin"], "--plugin needs the path of a Python file"),
        (["methods", "--plugin", "nothing.py"], "nothing.py is not a Python file"),
        (["--plugin=notes.txt", "methods"], "notes.txt is not a Python file"),
        (["methods", "--plugin", "json.py"], r"the module name 'json' is taken by .*rename the file"),
    ],
)
def test_what_is_no_plugin_is_refused(folder, words, message):
    (folder / "notes.txt").write_text("x")
    (folder / "json.py").write_text("")
    with pytest.raises(SystemExit, match=message):
        cli.main(words)


def test_the_name_of_another_task_is_taken(folder):
    (folder / "wine_task.py").write_text(
        "from intbmoe.tasks import Task, register_task\n\n@register_task('vision')\nclass Mine(Task): ...\n"
    )
    with pytest.raises(SystemExit, match=r"the task name 'vision' is taken by intbmoe.tasks.vision"):
        cli.main(["methods", "--plugin", "wine_task.py"])
