"""From a run to an artifact, for every task and method; what fails leaves nothing behind."""

import json

import pytest
import torch
from small_runs import TASKS, small_run

import intbmoe.export.export as exporting
from intbmoe import ComposedMoE, IntBMoE, cli, list_methods
from intbmoe.budget import TABLE_2
from intbmoe.export import ExportError, load_artifact
from intbmoe.export.artifact import ABOUT
from intbmoe.export.export import export_run
from intbmoe.train.errors import TrainingError


@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_exported_in_bfloat16(task, tmp_path):
    artifact = export_run(small_run(task, tmp_path), tmp_path / "to", dtype="bfloat16")
    layers = [layer for layer in artifact.model().modules() if isinstance(layer, ComposedMoE)]
    assert layers
    assert all(layer.weight_dtype == torch.bfloat16 for layer in layers)
    assert all(layer.router.hidden.weight.dtype == torch.float32 for layer in layers)
    parity = artifact.about["parity"]
    assert parity["layers"]["tolerance"] == 4 * torch.finfo(torch.bfloat16).eps
    assert 0 < parity["outputs"]["error"] <= parity["outputs"]["tolerance"]
    assert artifact.golden
    assert all({"request", "answer"} <= set(entry) for entry in artifact.golden)


@pytest.mark.parametrize("method", sorted(set(list_methods()) - {"intbmoe"}))
def test_every_method_is_exported_as_it_is(method, tmp_path):
    task = "sequences" if method in TABLE_2 else "vision"
    artifact = export_run(small_run(task, tmp_path, method), tmp_path / "to")
    assert artifact.method == method
    assert not artifact.about["precomposed"]
    assert artifact.about["parity"]["outputs"]["used_of_allowed"] <= 1


def test_pools_can_be_kept(tmp_path):
    artifact = export_run(small_run("vision", tmp_path), tmp_path / "to", precompose=False)
    assert any(isinstance(layer, IntBMoE) for layer in artifact.model().modules())
    assert not artifact.about["precomposed"]


def test_a_wrong_model_is_not_written(tmp_path, monkeypatch):
    run, to = small_run("vision", tmp_path), tmp_path / "out" / "to"
    real = exporting.cast_model

    def corrupted(*args, **options):
        model = real(*args, **options)
        model.blocks[0].moe.block_weights[0].mul_(1.01)
        return model

    monkeypatch.setattr(exporting, "cast_model", corrupted)
    with pytest.raises(ExportError, match=r"layer 'blocks.0.moe'.*nothing was written"):
        export_run(run, to)
    assert list(to.parent.iterdir()) == []
    monkeypatch.setattr(exporting, "cast_model", real)
    version = export_run(run, to).version
    monkeypatch.setattr(exporting, "cast_model", corrupted)
    with pytest.raises(ExportError):
        export_run(run, to)
    assert load_artifact(to).version == version  # the older one stays
    assert [path.name for path in to.parent.iterdir()] == ["to"]


def test_what_cannot_be_exported_is_said_at_once(tmp_path):
    run = small_run("vision", tmp_path)
    with pytest.raises(ValueError, match="dtype='float16' is not allowed"):
        export_run(run, tmp_path / "to", dtype="float16")
    with pytest.raises(ValueError, match="format='tflite' is not allowed"):
        export_run(run, tmp_path / "to", formats=["tflite"])
    with pytest.raises(ExportError, match=r"bfloat16.*--dtype float32"):
        export_run(run, tmp_path / "to", dtype="bfloat16", formats=["onnx"])
    with pytest.raises(ExportError, match="exists and is not an artifact"):
        export_run(run, run.path)
    (tmp_path / "link").symlink_to(run.path)
    with pytest.raises(ExportError, match="is a link"):
        export_run(run, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    with pytest.raises(TrainingError, match="not a run directory"):
        export_run(tmp_path, tmp_path / "to")
    (run.path / "done.json").unlink()
    with pytest.raises(TrainingError, match="not finished"):
        export_run(run, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_the_command(tmp_path, capsys):
    run, to = small_run("vision", tmp_path), tmp_path / "to"
    cli.main(["export", str(run.path), "--to", str(to), "--dtype", "bfloat16", "--no-precompose"])
    said = capsys.readouterr().out
    assert f"exported: {to}" in said
    assert "compared with the trained model" in said
    about = json.loads((to / ABOUT).read_bytes())
    assert (about["dtype"], about["precomposed"]) == ("bfloat16", False)
    with pytest.raises(SystemExit, match=r"intbmoe: .*not a run directory"):
        cli.main(["export", str(tmp_path), "--to", str(to)])
