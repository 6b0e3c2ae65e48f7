"""ONNX files, run by ONNX Runtime."""

from pathlib import Path

import pytest
import torch
from small_runs import TASKS, small_run

import intbmoe
from intbmoe.export import ExportError
from intbmoe.export.artifact import ONNX
from intbmoe.export.export import export_run
from intbmoe.export.parity import Parity
from intbmoe.tasks import make_task
from intbmoe.train.evaluation import load

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def _export(task, folder, method="intbmoe", **sizes):
    run = small_run(task, folder, method, **sizes)
    return run, export_run(run, folder / "to", formats=["onnx"])


def _check(run, artifact, shapes):
    """The parity is recorded, was checked at other sizes than those traced, and holds when checked again."""
    from intbmoe.export.onnx import load_onnx

    found = artifact.about["parity"]["onnx"]
    assert found["used_of_allowed"] <= 1
    assert len(found["shapes"]) >= shapes
    graph = make_task(artifact.recipe).graph()
    runs = load_onnx(graph, artifact.file(ONNX))
    parity = Parity(make_task(run.recipe), load(run), torch.float32)
    again = parity.check_runtime("onnx", runs, graph, artifact.catalogue_tensors)
    assert again["used_of_allowed"] <= 1
    assert again["shapes"] == found["shapes"]


def test_a_runtime_that_differs_is_found(tmp_path):
    run = small_run("sequences", tmp_path)
    trained, recipe = load(run), run.recipe
    parity, graph = Parity(make_task(recipe), trained, torch.float32), make_task(recipe).graph()
    assert parity.check_runtime("itself", trained, graph, {})["error"] == 0
    with pytest.raises(ExportError, match=r"scores of another differ.*nothing was written"):
        parity.check_runtime("another", lambda items: trained(items) + 1e-3 * torch.randn(len(items), 1), graph, {})


def test_an_image_model_runs_at_other_batch_sizes_and_names_no_folder_of_this_machine(tmp_path):
    run, artifact = _export("vision", tmp_path, depth=1)
    _check(run, artifact, shapes=3)
    for module in (intbmoe, torch):
        folder = str(Path(module.__file__).parent)
        assert folder.encode() not in artifact.file(ONNX).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(set(TASKS) - {"vision"}))
def test_other_tasks_run_at_other_batch_sizes_and_lengths(task, tmp_path):
    _check(*_export(task, tmp_path), shapes=4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "switch", "deepseek", "remoe", "mumoe_cp"])
def test_other_methods(method, tmp_path):
    _check(*_export("vision", tmp_path, method), shapes=3)
