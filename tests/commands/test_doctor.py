import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

from intbmoe import foreign
from intbmoe.cli import main
from intbmoe.commands import doctor


def test_every_backend_of_this_machine_is_right(capsys):
    main(["doctor"])
    printed = capsys.readouterr().out
    assert "IntBMoE, cpu, float64" in printed
    assert ": correct, " in printed
    assert "WRONG" not in printed


def test_a_wrong_backend_is_told_and_ends_with_an_error(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_distance", lambda *_: 0.5)
    with pytest.raises(SystemExit, match="does not work"):
        main(["doctor"])
    assert "WRONG, 5.0e-01 relative error against float64" in capsys.readouterr().out


def test_a_backend_that_fails_is_told_with_its_error(monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(doctor, "_distance", fail)
    findings = [finding for finding in doctor.examine() if finding.good is False]
    assert len(findings) >= 3
    assert "RuntimeError: no kernel image" in findings[0].value


def test_a_warning_is_a_line_beside_the_verdict(monkeypatch, recwarn):
    def warn(*_):
        warnings.warn("slow on this CPU\nframe #0: …\nframe #1: …", stacklevel=1)
        return 0.0

    monkeypatch.setattr(doctor, "_distance", warn)
    checked = [finding.value for finding in doctor.examine() if finding.good]
    assert len(checked) >= 3
    told = "correct, 0.0e+00 relative error against float64; warning: slow on this CPU"
    assert all(value.endswith(told) for value in checked)
    assert not recwarn


def test_all_packages_of_all_extras_for_users_are_checked():
    imported = {"pyyaml": "yaml", "scikit-learn": "sklearn", "pillow": "PIL", "prometheus-client": "prometheus_client"}
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {}
    for extra, requirements in project["optional-dependencies"].items():
        names = [re.match(r"[\w-]+", requirement)[0] for requirement in requirements]
        found[extra] = tuple(imported.get(name, name) for name in names if name != "intbmoe")
    assert {**doctor.EXTRAS, "site": found["site"], "dev": found["dev"]} == found


def test_extras_that_are_missing_or_broken_are_named(monkeypatch):
    """find_spec alone would not notice a package that is installed but cannot be imported."""
    faults = {"tokenizers": ModuleNotFoundError("no", name="tokenizers"), "duckdb": ImportError("libfoo.so is gone\n…")}

    def fail(module):
        if module in faults:
            raise faults[module]

    monkeypatch.setattr(doctor, "import_module", fail)
    monkeypatch.setattr(doctor, "_import", doctor._import.__wrapped__)  # remembers nothing
    found = {extra: doctor._extra(extra, modules) for extra, modules in doctor.EXTRAS.items()}
    assert found["text"] == ("extra text", "tokenizers missing: pip install 'intbmoe[text]'", None)
    assert found["travel"] == ("extra travel", "duckdb cannot be imported: ImportError: libfoo.so is gone", False)
    assert found["onnx"].value == "works"


def test_packages_that_only_intbmoe_can_import_are_named(monkeypatch):
    """With a torchvision that was built for another torch, importing transformers fails everywhere else."""
    monkeypatch.setattr(doctor, "import_module", lambda module: None)
    monkeypatch.setattr(doctor, "_import", doctor._import.__wrapped__)  # remembers nothing
    for repaired in (True, False):
        monkeypatch.setattr(doctor, "torchvision_is_repaired", lambda repaired=repaired: repaired)
        found = {extra: doctor._extra(extra, modules) for extra, modules in doctor.EXTRAS.items()}
        told = {extra for extra, finding in found.items() if "inside intbmoe only" in finding.value}
        assert told == ({"images", "huggingface"} if repaired else set())
        assert all(finding.good is None for finding in found.values())


def test_a_repaired_torchvision_is_one_that_fails_elsewhere():
    foreign.import_torchvision(required=False)
    run = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True, check=False)
    assert foreign.torchvision_is_repaired() == ("operator torchvision::nms does not exist" in run.stderr)
