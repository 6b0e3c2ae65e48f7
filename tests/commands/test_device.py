"""``--device``, and ``intbmoe`` alone."""

import os

import pytest
import torch

from intbmoe.cli import main
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
    [("gpu", "must be cpu, cuda or"), ("cuda:x", "such as cuda:1"), ("cuda:3", "which are 3; or cpu")],
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
    assert shown.count("\n  intbmoe ") == 3
    assert f"torch             {torch.__version__}" in shown
    assert "intbmoe doctor" in shown
