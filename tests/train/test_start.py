"""``train.start``: a training begins with the weights of a run, or of a folder for transformers."""

import json
import shutil

import pytest
import torch

import intbmoe
from intbmoe.train import TrainingError

SMALL = {"model.dim": 16, "model.heads": 2, "model.hidden": 8, "model.depth": 1, "moe.experts": 2, "data.length": 16}
SMALL |= {"data.tokenizer": "bytes", "train.batch": 4, "train.steps": 2, "train.warmup": 0.0}
STILL = {"train.steps": 1, "train.lr": 1e-30, "train.final_lr": 0.0, "train.weight_decay": 0.0}  # weights stay


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    root = tmp_path_factory.mktemp("start")
    texts = [f"{n} times {n} is {n * n}. " * 3 for n in range(40)]

    def go(label, **settings):
        settings = {**SMALL, "moe.label": label, **settings}
        return intbmoe.train("text", root=root, data=texts, settings=settings, quiet=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INTBMOE_CACHE", str(root / "cache"))
        yield go


def assert_same(model, other):
    own, others = model.state_dict(), other.state_dict()
    assert own.keys() == others.keys()
    assert all(torch.equal(own[name], others[name]) for name in own)


def test_a_training_begins_with_a_run_or_a_folder(train, tmp_path):
    hf = pytest.importorskip("intbmoe.huggingface", reason="transformers is not installed")
    first = train("first")
    model = intbmoe.load(first)
    hf.from_backbone(model).save_pretrained(tmp_path / "folder")
    for label, start in (("run", first.path), ("folder", tmp_path / "folder")):
        begun = train(label, **STILL, **{"train.start": str(start), "train.seed": 1})
        assert_same(intbmoe.load(begun), model)
        assert begun.recipe.train.start == str(start)
    fresh = intbmoe.load(train("fresh", **STILL, **{"train.seed": 1}))
    assert not torch.equal(fresh.embed_tokens.weight, model.embed_tokens.weight)

    # Another method, precomposed, and somebody else's: each is refused with the reason.
    with pytest.raises(TrainingError, match=r"train\.start='.*folder' is of another model: .* and \d+ more$"):
        train("other", **{"train.start": str(tmp_path / "folder"), "moe.name": "switch", "moe.label": "other"})
    hf.from_backbone(model).precompose().save_pretrained(tmp_path / "served")
    with pytest.raises(TrainingError, match=r"served' is precomposed.*--no-precompose"):
        train("served", **{"train.start": str(tmp_path / "served")})
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(TrainingError, match=r"theirs' is a 'llama' model: expected a run, or a folder of"):
        train("theirs", **{"train.start": str(tmp_path / "theirs")})
    with pytest.raises(TrainingError, match="nowhere is not a run directory"):
        train("nowhere", **{"train.start": str(tmp_path / "nowhere")})


def test_what_goes_on_does_not_need_its_start_any_more(train, tmp_path):
    first = train("first")
    start = shutil.copytree(first.path, tmp_path / "start")
    settings = {"train.start": str(start), "train.steps": 2, "train.checkpoint_every": 1}
    begun = train("goes-on", **settings)
    whole = begun.model_path.read_bytes()
    begun.result_path.unlink()
    shutil.rmtree(begun.path / "checkpoints" / "step-00000002")
    shutil.rmtree(start)
    assert train("goes-on", **settings).model_path.read_bytes() == whole
