"""What ``import intbmoe`` offers."""

import importlib
import subprocess
import sys

import pytest

import intbmoe


def test_every_public_name_is_there_and_listed():
    assert set(intbmoe.__all__) <= set(dir(intbmoe))
    assert all(getattr(intbmoe, name) is not None for name in intbmoe.__all__)
    assert intbmoe.__version__
    assert "train" in dir(intbmoe)
    assert not {"nn", "Any", "import_module", "PathLike"} & set(dir(intbmoe))


def test_stacked_weights_show_their_sizes():
    assert "(0): Pool(8 × (32, 64), bias=True)" in repr(intbmoe.IntBMoE(32, 64, experts=8))
    assert "(up): StackedLinear(4 × (32, 64), bias=" in repr(intbmoe.create("switch", 32, hidden=64, experts=4))


def test_loading_a_run_without_trainings_packages_says_what_to_install(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("intbmoe.train")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs accelerate.*pip install 'intbmoe\[train\]'"):
        intbmoe.load(tmp_path)


def test_train_is_a_package_that_can_be_called(monkeypatch):
    """Whether or not it was imported before."""
    for name in [name for name in sys.modules if name.startswith("intbmoe.train")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(intbmoe, "train", raising=False)
    with pytest.raises(KeyError, match="no recipe is called 'digts': did you mean 'digits'"):
        intbmoe.train("digts")
    import intbmoe.train as package

    assert intbmoe.train is package
    assert package.RunDirectory
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        intbmoe.trian  # noqa: B018


def test_commands_name_their_python_functions():
    told = r"no attribute 'export'; it is a command: intbmoe export, and in Python intbmoe\.export\.export_run"
    with pytest.raises(AttributeError, match=told):
        intbmoe.__getattr__("export")
    for command in intbmoe._COMMANDS.values():
        module, _, function = command.rpartition(" ")[2].rpartition(".")
        assert not module or callable(getattr(importlib.import_module(module), function))


def test_opening_artifacts_needs_nothing_of_training():
    code = "import sys, intbmoe.export; assert 'intbmoe.train' not in sys.modules; intbmoe.export.export_run"
    subprocess.run([sys.executable, "-c", code], check=True)
