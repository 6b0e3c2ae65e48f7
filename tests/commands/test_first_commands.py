"""``--device``, ``intbmoe demo``, and ``intbmoe`` alone."""

import os
import re
from contextlib import nullcontext

import pytest
import torch

from intbmoe.cli import main
from intbmoe.commands import training
from intbmoe.commands.device import use_device


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")


@pytest.mark.parametrize(("name", "visible"), [(None, "4,5,6"), ("cuda", "4,5,6"), ("cuda:1", "5"), ("cpu", "")])
@pytest.mark.usefixtures("gpus")
def test_the_process_and_its_children_see_the_device_alone(name, visible):
    use_device(name)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize(
    ("name", "message"),
    [("gpu", "must be cpu, cuda or"), ("cuda:x", "such as cuda:1"), ("cuda:3", "cuda:0 to cuda:2")],
)
@pytest.mark.usefixtures("gpus")
def test_a_device_that_is_not_there_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        use_device(name)


@pytest.mark.parametrize("command", [["train", "digits"], ["compare", "digits"], ["eval", "x"], ["analyse", "x"]])
def test_every_command_that_computes_takes_a_device(command):
    with pytest.raises(SystemExit, match=r"--device='gpu' is not allowed"):
        main([*command, "--device", "gpu"])


def test_intbmoe_alone_greets(capsys):
    main([])
    shown = capsys.readouterr().out
    assert re.findall(r"\n  intbmoe (\w+)", shown) == ["serve", "train", "compare", "demo"]
    assert f"torch             {torch.__version__}" in shown
    assert "intbmoe doctor" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(("status", "opened"), [(0, True), (1, False)])
def test_the_demo_opens_the_report_it_made(status, opened, monkeypatch, capsys):
    asked, pages = [], []

    def compare(args):
        asked.append(args)
        raise SystemExit(status)

    monkeypatch.setattr(training, "compare", compare)
    monkeypatch.setattr(training.webbrowser, "open", pages.append)
    with nullcontext() if opened else pytest.raises(SystemExit):
        main(["demo"])
    assert asked == [["digits", "--methods", "all"]]
    assert [page.endswith("/runs/digits/compare/all/report.html") for page in pages] == [True] * opened
    assert ("the report: " in capsys.readouterr().out) == opened
