"""docs/tour.py, cell by cell as a notebook runs it."""

import runpy
from pathlib import Path

import pytest

TOUR = Path(__file__).parent.parent / "docs" / "tour.py"


@pytest.mark.slow
def test_the_tour_runs_to_its_page(capsys):
    found = runpy.run_path(str(TOUR))
    assert found["loss"].item() < 0.1
    chosen = found["chosen"].float()
    assert (chosen.max(1).values > 0.8 * chosen.sum(1)).all(), "a kind of token has a block"
    assert len(set(chosen.argmax(1).tolist())) > 1, "kinds differ in their blocks"
    assert torch_close(found["fast"], found["ffn"], found["x"])
    assert found["done"].returncode == 0, found["done"].stderr
    assert "report.html" in capsys.readouterr().out.splitlines()[-1]


def torch_close(one, other, x):
    return (one(x) - other(x)).abs().max().item() < 1e-4
