"""From a run to an artifact, for every task and method; what fails leaves nothing behind."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small_runs import TASKS, small_run

import intbmoe.export.export as exporting
from intbmoe import ComposedMoE, IntBMoE, cli, files, list_methods
from intbmoe.budget import TABLE_2
from intbmoe.export import ExportError, load_artifact
from intbmoe.export.artifact import ABOUT, MODEL
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


@pytest.mark.parametrize(
    "content", ['{"name": "another program\'s"}', '{"format_version": 1, "files": {}}', "[1]", "{", ""]
)
def test_what_another_program_wrote_is_not_replaced(tmp_path, content):
    run, to = small_run("vision", tmp_path), tmp_path / "to"
    to.mkdir()
    (to / ABOUT).write_text(content)
    (to / "years of work").write_text("x")
    with pytest.raises(ExportError, match=r"exists and is not an artifact.*--to another folder"):
        export_run(run, to)
    assert {path.name: path.read_text() for path in to.iterdir()} == {ABOUT: content, "years of work": "x"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".to")]


def test_what_lies_beside_an_artifact_is_not_lost(tmp_path, monkeypatch):
    run, to = small_run("vision", tmp_path), tmp_path / "to"
    version = export_run(run, to).version
    real = exporting.make_golden

    def while_it_is_exported(*args):
        (to / "notes.txt").write_text("mine")
        return real(*args)

    monkeypatch.setattr(exporting, "make_golden", while_it_is_exported)
    for _ in range(2):  # noticed at the end, and then at the beginning
        with pytest.raises(ExportError, match=r"holds other files besides an artifact \(notes.txt\): move them"):
            export_run(run, to, dtype="bfloat16")
        assert (to / "notes.txt").read_text() == "mine"
        assert load_artifact(to).version == version
    (to / "notes.txt").unlink()
    monkeypatch.setattr(exporting, "make_golden", real)
    (to / MODEL).write_bytes(b"torn")  # a damaged artifact, or one of another version, may still be replaced
    about = json.loads((to / ABOUT).read_bytes())
    (to / ABOUT).write_text(json.dumps({**about, "format_version": 99}))
    assert export_run(run, to).version == version
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".to")] == []


def test_when_the_last_step_fails_the_older_one_is_back(tmp_path, monkeypatch):
    run, to = small_run("vision", tmp_path), tmp_path / "to"
    version = export_run(run, to).version

    def fail(one, other):
        raise OSError("the disk is gone")

    monkeypatch.setattr(files, "_swap", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        export_run(run, to, dtype="bfloat16")
    assert load_artifact(to).version == version


def test_where_the_data_lay_is_nobody_elses_business(tmp_path):
    run = small_run("sequences", tmp_path)
    assert run.recipe.data.path.startswith(str(tmp_path))
    artifact = export_run(run, tmp_path / "to")
    for file in artifact.path.iterdir():
        assert str(tmp_path).encode() not in file.read_bytes(), file.name
    assert artifact.recipe == replace(run.recipe, data=replace(run.recipe.data, path=None))
    about = json.loads((artifact.path / ABOUT).read_bytes())  # as older versions of this program wrote it
    about["recipe"]["data"]["path"] = run.recipe.data.path
    del about["checksum"]
    (artifact.path / ABOUT).write_text(json.dumps(about))
    older = load_artifact(artifact.path)
    assert older.recipe == run.recipe
    assert older.model().state_dict().keys() == artifact.model().state_dict().keys()


def test_the_command(tmp_path, capsys):
    run, to = small_run("vision", tmp_path), tmp_path / "to here"
    cli.main(["export", str(run.path), "--to", str(to), "--dtype", "bfloat16", "--no-precompose"])
    said = capsys.readouterr().out
    assert f"exported: {to}" in said
    assert f"serve it: intbmoe serve '{to}'" in said, "can be pasted"
    assert "compared with the trained model" in said
    about = json.loads((to / ABOUT).read_bytes())
    assert (about["dtype"], about["precomposed"]) == ("bfloat16", False)
    with pytest.raises(SystemExit, match=r"intbmoe: .*not a run directory"):
        cli.main(["export", str(tmp_path), "--to", str(to)])


def test_blocks_that_no_example_reaches_are_told(tmp_path):
    unreached = {"blocks.0.ffn": [4], "blocks.1.ffn": [2, 3]}
    parity = {"examples": 8, "outputs": {"error": 0.0, "tolerance": 1e-5}, "unreached_blocks": unreached}
    told = exporting.describe(SimpleNamespace(path=tmp_path, version="1", about={"files": [], "parity": parity}))
    assert "\nblocks.0.ffn: no example reaches block 4; it was compared on inputs of the other blocks\n" in told
    assert "\nblocks.1.ffn: no example reaches blocks 2, 3; they were compared on inputs" in told
