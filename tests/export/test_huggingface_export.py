"""``intbmoe export RUN --format huggingface``, and back."""

import pytest
import torch
from small_runs import small_run

from intbmoe import cli, load
from intbmoe.export import ExportError
from intbmoe.export.huggingface import _write_tokenizer, export_huggingface
from intbmoe.tasks.serving import Catalogue

pytest.importorskip("transformers", reason="transformers is not installed")


def loaded(folder, task):
    from intbmoe.huggingface import IntBMoEForCausalLM, IntBMoEForImageClassification

    kind = IntBMoEForCausalLM if task == "language" else IntBMoEForImageClassification
    return kind.from_pretrained(folder)


@torch.no_grad()
@pytest.mark.parametrize("task", ["language", "vision"])
@pytest.mark.parametrize("method", ["intbmoe", "switch", "dense"])
def test_a_run_becomes_a_folder_and_a_folder_the_run_s_model(task, method, tmp_path):
    from intbmoe.huggingface import to_backbone

    run, to = small_run(task, tmp_path, method), tmp_path / "to"
    told = export_huggingface(run, to, precompose=False)
    auto = "AutoModelForCausalLM" if task == "language" else "AutoModelForImageClassification"
    assert f"{auto}.from_pretrained({str(to)!r})" in told
    again, trained = to_backbone(loaded(to, task)), load(run)
    assert type(again) is type(trained)
    assert again.config == trained.config
    assert again.state_dict().keys() == trained.state_dict().keys()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in trained.state_dict().items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_are_composed_unless_one_says_otherwise(dtype, tmp_path, capsys):
    run, to = small_run("language", tmp_path), tmp_path / "to"
    cli.main(["export", str(run.path), "--to", str(to), "--format", "huggingface", "--dtype", dtype])
    assert "IntBMoEForCausalLM, intbmoe, precomposed" in capsys.readouterr().out
    model = loaded(to, "language")
    assert model.config.precomposed
    assert model.dtype == getattr(torch, dtype)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 256


def test_the_tokenizer_is_where_transformers_finds_it(tmp_path):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    from intbmoe.tasks.language.tokenizer import END_OF_TEXT, train_bpe

    content = train_bpe(["to be or not to be, that is the question"] * 3, 280)
    catalogue = Catalogue({"tokenizer": "tokenizer.json", "end_of_text": 0}, files={"tokenizer.json": content.encode()})
    export_huggingface(small_run("language", tmp_path), tmp_path / "to")
    _write_tokenizer(tmp_path / "to", catalogue)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "to")
    ids = tokenizer(["to be", "or not to be"], padding=True)
    assert tokenizer.eos_token == tokenizer.pad_token == END_OF_TEXT
    assert tokenizer.decode(ids["input_ids"][1]) == "or not to be"
    assert ids["attention_mask"][0][0] == 0  # padded on the left
    assert ids["input_ids"][0][0] == tokenizer.eos_token_id == 0


def test_class_names_and_normalisation_are_in_the_configuration(tmp_path):
    export_huggingface(small_run("vision", tmp_path), tmp_path / "to")
    config = loaded(tmp_path / "to", "vision").config
    assert config.id2label[7] == "7"
    assert len(config.image_mean) == len(config.image_std) == 1


def test_what_cannot_be_exported_is_said_at_once(tmp_path):
    run = small_run("vision", tmp_path)
    with pytest.raises(ExportError, match=r"exists: give --to another folder"):
        export_huggingface(run, run.path)
    with pytest.raises(ValueError, match="huggingface alone"):
        export_huggingface(run, tmp_path / "to", formats=("onnx", "huggingface"))
    with pytest.raises(ExportError, match="the task 'travel' has no transformers form"):
        export_huggingface(small_run("travel", tmp_path / "other"), tmp_path / "to")
    assert not (tmp_path / "to").exists()
