"""Views for ``analyse``: tokens by the class of their image; single images, one per class, with patches by position."""

from collections.abc import Sequence

import numpy as np
from PIL import Image

from intbmoe.models.vit import ViTConfig
from intbmoe.tasks.base import Batch
from intbmoe.tasks.looking import Content, Shown, Token, View
from intbmoe.tasks.vision.class_names import class_labels
from intbmoe.tasks.vision.decode import png_base64
from intbmoe.tasks.vision.examples import ImageExamples

MOST_IMAGES = 6


def class_view(names: Sequence[str], keys: Sequence[str]) -> View:
    """Return a view of tokens by the class of their image; ``keys`` are the classes' WordNet ids or numbers."""
    return View(
        "class",
        class_labels(names, keys),
        lambda batch: batch["labels"].unsqueeze(1),
        words=tuple(zip(names, keys, strict=True)),
        of_examples=lambda split: split.images.labels,
    )


def show_images(split: ImageExamples, names: tuple[str, ...], model: ViTConfig) -> Shown:
    side = model.image_size // model.patch_size
    tokens = [Token("patch", f"row {row}, column {column}") for row in range(side) for column in range(side)]
    if not model.class_token_ffn:
        tokens.insert(0, Token("class token", ""))

    def describe(batch: Batch, row: int, index: int) -> Content:
        pixels = split.images.pixels([index], model.image_size)[0]
        picture = Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)
        return Content(names[int(batch["labels"][row])], tokens, png_base64(picture))

    return Shown("image", one_per_class(split.images.labels), describe)


def one_per_class(labels: np.ndarray) -> list[int]:
    """Return the first image of some classes, evenly spread over all classes."""
    classes, first = np.unique(labels, return_index=True)
    number = min(MOST_IMAGES, len(classes))
    return [int(first[place * len(classes) // number]) for place in range(number)]
