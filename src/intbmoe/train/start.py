"""Initial weights of a training run (``train.start``): from another run, or from an ``intbmoe.huggingface`` folder."""

import json
from pathlib import Path

import torch
from torch import nn

from intbmoe.train.errors import TrainingError
from intbmoe.train.evaluation import load
from intbmoe.train.resume import restore_model


def begin_with(model: nn.Module, folder: str) -> None:
    """Give ``model`` the weights and state of the model in ``folder``, which must have the same sizes and method."""
    found = _read_huggingface(Path(folder)) if (Path(folder) / "config.json").is_file() else load(folder)
    restore_model(model, found.state_dict(), f"train.start={folder!r}")


def _read_huggingface(folder: Path) -> nn.Module:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") not in ("intbmoe", "intbmoe_vit"):
        kind = config.get("model_type")
        raise TrainingError(
            f"train.start={str(folder)!r} is a {kind!r} model: expected a run, or a folder of intbmoe.huggingface"
        )
    if config.get("precomposed"):
        raise TrainingError(
            f"train.start={str(folder)!r} is precomposed and has no bases to train: export it with --no-precompose"
        )
    from intbmoe.huggingface import IntBMoEForCausalLM, IntBMoEForImageClassification, to_backbone

    kind = IntBMoEForCausalLM if config["model_type"] == "intbmoe" else IntBMoEForImageClassification
    return to_backbone(kind.from_pretrained(folder, dtype=torch.float32))
