"""Artifacts with 8-bit weights: small, near the trained model, served; what was not quantised is in artifact.json."""

import json

import pytest
import torch
from small_runs import TASKS, small_run

import intbmoe.export.export as exporting
from intbmoe import ComposedMoE, cli
from intbmoe.export import ArtifactError, ExportError, load_artifact
from intbmoe.export.artifact import ABOUT
from intbmoe.export.export import describe, export_run
from intbmoe.export.golden import ask, compare_answers
from intbmoe.export.parity import STORED_ERROR
from thinned import thinned

CASES = [*((task, "int8", "float32") for task in TASKS), ("vision", "int8", "bfloat16"), ("travel", "fp8", "float32")]


# The other tests here export images with int8 and float32.
@pytest.mark.parametrize(
    ("task", "storage", "compute"),
    thinned(CASES, lambda *case: case not in (("vision", "int8", "float32"), ("travel", "int8", "float32"))),
)
def test_every_task_is_exported_and_answers(task, storage, compute, tmp_path):
    artifact = export_run(small_run(task, tmp_path), tmp_path / "to", dtype=storage, compute=compute)
    assert artifact.about["dtype"] == artifact.storage == storage
    assert artifact.dtype == getattr(torch, compute)
    layers = [layer for layer in artifact.model().modules() if isinstance(layer, ComposedMoE)]
    assert layers
    for layer in layers:
        assert layer.block_weights.parametrizations["0"].original0.element_size() == 1
        assert layer.weight_dtype == artifact.dtype
        assert layer.router.hidden.weight.dtype == torch.float32
    parity = artifact.about["parity"]
    assert parity["layers"]["tolerance"] == 4 * (STORED_ERROR[storage] + torch.finfo(artifact.dtype).eps)
    assert 0 < parity["layers"]["largest_error"] <= parity["layers"]["tolerance"]
    assert 0 < parity["outputs"]["error"] <= parity["outputs"]["tolerance"]
    predictor = artifact.predictor()
    assert all(compare_answers(entry, ask(predictor, entry["request"])) is None for entry in artifact.golden)


def test_artifact_and_command_tell_what_was_not_quantised(tmp_path, capsys):
    run = small_run("language", tmp_path)
    plain = export_run(run, tmp_path / "plain")
    cli.main(["export", str(run.path), "--to", str(tmp_path / "small"), "--dtype", "int8"])
    told = capsys.readouterr().out
    assert "embedding, or tied to one (embed_tokens.weight)" in told
    small = load_artifact(tmp_path / "small")
    assert told.startswith(describe(small))
    found = small.about["quantization"]
    named = {name for kept in found["kept"].values() for name in kept["names"]}
    assert named | set(found["quantized"]) == set(plain.model().state_dict())
    file = small.path / "model.safetensors"
    assert found["bytes_after"] <= file.stat().st_size < 0.6 * (plain.path / file.name).stat().st_size


@pytest.mark.parametrize("method", ["switch", "soft", "dense"])
def test_other_methods_too(method, tmp_path):
    artifact = export_run(small_run("vision", tmp_path, method), tmp_path / "to", dtype="int8")
    assert artifact.about["parity"]["outputs"]["used_of_allowed"] <= 1
    expected = {"dense": "blocks.0.attn.qkv.weight"}.get(method, "blocks.0.moe.experts.up.weight")
    assert expected in artifact.about["quantization"]["quantized"]


def test_a_wrong_block_is_found(tmp_path, monkeypatch):
    real = exporting.quantize

    def corrupted(model, storage):
        model.blocks[0].moe.block_weights[1][2].mul_(1.1)
        return real(model, storage)

    monkeypatch.setattr(exporting, "quantize", corrupted)
    with pytest.raises(ExportError, match=r"layer 'blocks.0.moe'.*block 2,.*nothing was written"):
        export_run(small_run("vision", tmp_path), tmp_path / "to", dtype="int8")


def test_what_cannot_be_quantised_is_said_at_once(tmp_path):
    run = small_run("vision", tmp_path)
    with pytest.raises(ExportError, match="leave out --no-precompose"):
        export_run(run, tmp_path / "to", dtype="int8", precompose=False)
    with pytest.raises(ExportError, match="ONNX would store int8 weights in full precision"):
        export_run(run, tmp_path / "to", dtype="int8", formats=["onnx"])
    with pytest.raises(ValueError, match="compute='bfloat16' is not allowed: compute must be left out"):
        export_run(run, tmp_path / "to", compute="bfloat16")
    with pytest.raises(ValueError, match="compute='int8' is not allowed: compute must be one of float32, bfloat16"):
        export_run(run, tmp_path / "to", dtype="int8", compute="int8")
    assert not (tmp_path / "to").exists()


def test_types_that_do_not_fit_are_refused(tmp_path):
    artifact = export_run(small_run("vision", tmp_path), tmp_path / "to", dtype="int8")
    for change in ({"compute": None}, {"compute": "int8"}, {"dtype": "float32"}):
        (artifact.path / ABOUT).write_text(json.dumps({**artifact.about, **change}), encoding="utf-8")
        with pytest.raises(ArtifactError, match="was not written by an export"):
            load_artifact(artifact.path)
