"""``intbmoe export RUN --to DIR --format huggingface``: a folder that transformers' ``from_pretrained`` reads."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from intbmoe.checks import require
from intbmoe.export.artifact import DTYPES, ExportError
from intbmoe.export.export import cast_model
from intbmoe.export.parity import Parity
from intbmoe.files import replacing_folder, to_json
from intbmoe.models.llama import Llama
from intbmoe.models.vit import ViT
from intbmoe.tasks import make_task
from intbmoe.tasks.serving import Catalogue
from intbmoe.train.evaluation import load
from intbmoe.train.files import full_disk_is_explained
from intbmoe.train.run import RunDirectory

TOKENIZER = "tokenizer.json"


def export_huggingface(
    run: RunDirectory | str | Path,
    to: str | Path,
    *,
    dtype: str = "float32",
    formats: Sequence[str] = ("huggingface",),
    precompose: bool = True,
    data: str | Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> str:
    """Write the folder and describe it; raise, and write nothing, unless its model agrees with the run's."""
    require(dtype in DTYPES, "dtype", dtype, f"one of {', '.join(DTYPES)}")
    require(
        set(formats) == {"huggingface"}, "format", tuple(formats), "huggingface alone: its folder is not an artifact"
    )
    run, to = RunDirectory.existing(run), Path(to)
    _require_free(to)
    task, trained = make_task(run.recipe_on(data or run.stand_in)), load(run).requires_grad_(False)
    if not isinstance(trained, Llama | ViT):
        raise ExportError(f"the task {run.recipe.task!r} has no transformers form: only language and vision have one")
    from intbmoe.huggingface import from_backbone, to_backbone

    model = cast_model(trained, DTYPES[dtype], precompose=precompose)
    tell("looking for held-out inputs that reach every block")
    parity = Parity(task, trained, DTYPES[dtype])
    catalogue = task.catalogue()
    with (
        replacing_folder(to, _require_free, sync=True) as folder,
        full_disk_is_explained(folder, "free some space and export again"),
    ):
        kind = type(made := from_backbone(model, **_fields(catalogue)))
        made.save_pretrained(folder)
        _write_tokenizer(folder, catalogue)
        tell("comparing with the trained model")
        written = kind.from_pretrained(folder).eval()
        backbone = to_backbone(written)
        outputs = parity.check_model(backbone)["outputs"]
        _require_alike(written, backbone, parity.inputs.batches[0][task.inputs[0]])
    composed = ", precomposed" if written.config.precomposed else ""
    return (
        f"exported: {to} ({kind.__name__}, {written.config.method or 'dense'}{composed})\n"
        f"compared with the trained model: {parity.inputs.examples} examples, error {outputs['error']:.2g}, "
        f"tolerance {outputs['tolerance']:.2g}\n"
        f"load it: import intbmoe.huggingface; {_auto_class(written)}.from_pretrained({str(to)!r})"
    )


def _fields(catalogue: Catalogue) -> dict[str, Any]:
    """Fields of the configuration that say what the numbers that go in and come out mean."""
    about, found = catalogue.about, {}
    if "end_of_text" in about:
        found |= {"eos_token_id": about["end_of_text"], "pad_token_id": about["end_of_text"]}
    if "classes" in about:
        names = dict(enumerate(about["classes"]))
        found |= {"id2label": names, "label2id": {name: number for number, name in names.items()}}
        found |= {"image_mean": about["mean"], "image_std": about["std"]}
    return found


def _write_tokenizer(folder: Path, catalogue: Catalogue) -> None:
    """Write the tokenizer where AutoTokenizer finds it; a byte model has none, since its ids are the bytes."""
    content = catalogue.files.get(TOKENIZER)
    if content is None:
        return
    (folder / TOKENIZER).write_bytes(content)
    tokens = {entry["id"]: entry["content"] for entry in json.loads(content).get("added_tokens", ())}
    end = tokens.get(catalogue.about["end_of_text"])
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end, "padding_side": "left"}
    (folder / "tokenizer_config.json").write_bytes(to_json(about))


@torch.no_grad()
def _require_alike(written: Any, backbone: torch.nn.Module, inputs: torch.Tensor) -> None:
    inputs = inputs.to(written.dtype) if inputs.is_floating_point() else inputs
    if not torch.equal(written(inputs).logits, backbone(inputs)):
        raise ExportError("the transformers model and intbmoe's model give different scores: nothing was written")


def _auto_class(model: Any) -> str:
    auto = model.config.auto_classes
    return next(name for name, ours in auto.items() if ours == type(model).__name__)


def _require_free(to: Path) -> None:
    if to.is_symlink() or (to.exists() and not (to.is_dir() and not any(to.iterdir()))):
        raise ExportError(f"{to} exists: give --to another folder, or remove it")
