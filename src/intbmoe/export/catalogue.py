"""What the numbers mean that go into a model and come out of it: ``catalogue.json`` and ``catalogue.safetensors``.

vision      classes: a name each; mean, std: pixels in [0, 1] become (pixel − mean) / std, channel by channel
language    tokenizer: the file beside it, null for bytes; end_of_text: the id that ends a document
sequences   first_id: what the data calls the model's item 0
travel      sizes: codes of each field; utc_offset: hours that the users' clocks are ahead of UTC
            tensors: ids (P,), the places' own ids, rising; codes (1 + P, 5), a place's codes in row p + 1, row 0 for
            none; values.FIELD, the original value of code 1, 2, … of a field, where the data had other values
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from intbmoe.export.artifact import TOKENIZER
from intbmoe.tasks.base import Task


@dataclass(frozen=True)
class Catalogue:
    """What an export writes of a task's data."""

    about: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    """Whole files that belong to it, by name."""


def make_catalogue(task: Task) -> Catalogue:
    """The catalogue of a task, from its data."""
    return MAKERS[task.recipe.task](task)


def _vision(task: Any) -> Catalogue:
    mean, std = task.split("valid").normalisation
    return Catalogue({"classes": list(task.class_names()), "mean": list(mean), "std": list(std)})


def _language(task: Any) -> Catalogue:
    from intbmoe.tasks.language import packed, stdlib

    data = task.recipe.data
    if data.source == "stdlib":
        return Catalogue({"tokenizer": None, "end_of_text": stdlib.END_OF_TEXT})
    from intbmoe.tasks.language.tokenizer import Encoder, require_tokenizers

    require_tokenizers()
    file = Path(data.path).expanduser() / packed.TOKENIZER
    content = file.read_bytes()
    about = {"tokenizer": TOKENIZER, "end_of_text": Encoder(content.decode(), str(file)).end_of_text}
    return Catalogue(about, files={TOKENIZER: content})


def _sequences(task: Any) -> Catalogue:
    return Catalogue({"first_id": 1 if task.recipe.data.source == "item-lists" else 0})


def _travel(task: Any) -> Catalogue:
    from intbmoe.tasks.travel.examples import place_codes
    from intbmoe.tasks.travel.task import open_data

    settings = task.recipe.data
    data = open_data(settings)
    tensors = {
        "ids": torch.from_numpy(np.array(data.places.ids, np.int64)),
        "codes": torch.from_numpy(place_codes(data.places)),
    }
    if settings.path is not None:
        for file in sorted((Path(settings.path).expanduser() / "codes").glob("*.npy")):
            tensors[f"values.{file.stem}"] = torch.from_numpy(np.load(file, allow_pickle=False))
    sizes = {name: list(size) if isinstance(size, tuple) else size for name, size in asdict(data.sizes).items()}
    return Catalogue({"sizes": sizes, "utc_offset": settings.utc_offset}, tensors)


MAKERS: dict[str, Callable[[Any], Catalogue]] = {
    "vision": _vision,
    "language": _language,
    "sequences": _sequences,
    "travel": _travel,
}
