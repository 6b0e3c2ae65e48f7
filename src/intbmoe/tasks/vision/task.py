"""Image classification with the Vision Transformer: digits, Tiny-ImageNet-200, ImageNet-1K, any folder.

A batch has ``images`` (B, channels, size, size) and ``labels`` (B,); in training with smoothed or mixed labels,
``prepare`` adds ``targets`` (B, classes), which the loss then uses.

In an artifact, ``catalogue.json`` has classes, a name for each, and mean and std: pixels in [0, 1] become
(pixel − mean) / std, channel by channel. Its graphs take images (B, channels, H, W) and return scores (B, classes).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.checks import require
from intbmoe.models.vit import ViT, ViTConfig
from intbmoe.registry import register_task
from intbmoe.settings import Checked, MustBe, NonNegativeInt, Share
from intbmoe.tasks.base import Batch, Examples, Task
from intbmoe.tasks.looking import Shown, View
from intbmoe.tasks.mixture import ffn_maker
from intbmoe.tasks.own_data import require_known, require_unused, resolved
from intbmoe.tasks.preparation import Preparation
from intbmoe.tasks.recipe import Recipe
from intbmoe.tasks.serving import Catalogue, Request
from intbmoe.tasks.vision import digits, folder, imagenet, tiny_imagenet
from intbmoe.tasks.vision.class_names import imagenet_class_names
from intbmoe.tasks.vision.datasets import save_images
from intbmoe.tasks.vision.examples import ImageExamples
from intbmoe.tasks.vision.looking import class_view, show_images
from intbmoe.tasks.vision.mixing import mix, smooth
from intbmoe.tasks.vision.serving import ClassifyPredictor, image_requests
from intbmoe.tasks.vision.settings import Augmentation
from intbmoe.tasks.vision.source import Source

SOURCES = {"digits": digits.read, "tiny-imagenet": tiny_imagenet.read, "imagenet": imagenet.read}
TOP = 5


@dataclass(frozen=True, kw_only=True)
class VisionData(Checked):
    """Which images to use, and how they are augmented in training."""

    source: Literal["digits", "tiny-imagenet", "imagenet", "folder"] = "digits"
    """folder is any folder of class folders; digits come with scikit-learn; docs/data.md says how to get the others."""
    path: str | None = None
    """Where the data is: a tar for tiny-imagenet, a folder for imagenet and folder. digits need none."""
    valid_fraction: Share = 0.1
    """Share of each class's training images held out for validation, the same for every method and seed; 0: none."""
    augmentation: Augmentation = field(default_factory=Augmentation)
    test_fraction: Annotated[float, MustBe("a number between 0 and 1", lambda value: 0 < value < 1)] = 0.1
    """folder: share of each class held out as the test split, if there is no test folder."""
    split_seed: NonNegativeInt = 0
    """folder: another number holds out other images."""
    resize: Literal["crop", "stretch", "pad"] = "crop"
    """folder: how images become square: their middle; the whole, distorted; or the whole with black bars."""
    fingerprint: str | None = None
    """folder: fingerprint of the files. Set when a run begins; different files are then refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_unused(self, "folder", ("test_fraction", "split_seed", "resize", "fingerprint"))


@dataclass(frozen=True)
class VisionRecipe(Recipe):
    """A recipe of the vision task."""

    task: Literal["vision"]
    data: VisionData
    model: ViTConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        augmentation, channels = self.data.augmentation, self.model.channels
        if augmentation.kind == "deit":
            require(channels == 3, "data.augmentation.kind", "deit", f"'none' or 'light' with {channels} channel(s)")
        if augmentation.kind == "light":
            size = self.model.image_size
            require(augmentation.pad < size, "data.augmentation.pad", augmentation.pad, f"below image_size ({size})")


@register_task("vision")
class VisionTask(Task):
    recipe_type: ClassVar[type[Recipe]] = VisionRecipe
    metric = "accuracy"
    higher_is_better = True
    reported: ClassVar = {"accuracy5": "ACC@5"}
    dense_in_place = "dense"
    inputs = ("images",)
    preparations: ClassVar[Mapping[str, Preparation]] = {
        "imagenet": Preparation(
            "a folder with data/train-*.parquet and data/validation-*.parquet",
            "intbmoe.tasks.vision.unpack_parquet:prepare",
        )
    }
    predictor = ClassifyPredictor
    own_source = "folder"

    def make_model(self) -> nn.Module:
        config = self.recipe.model
        require_known(config.classes, "model.classes")
        # The paper's dense row is the backbone itself, so there is no mixture that the class token must bypass.
        return ViT(config, ffn_maker(self.recipe.moe, config.dim, config.hidden, tokens=config.mixture_tokens))

    def read_split(self, name: str) -> Examples:
        source = self._source
        augmentation = self.recipe.data.augmentation if name == "train" else Augmentation()
        return ImageExamples(getattr(source, name), source.normalisation, self.recipe.model.image_size, augmentation)

    def class_names(self) -> tuple[str, ...]:
        """Return the names that the source or ImageNet gives the classes; otherwise their folders or numbers."""
        source, classes = self._source, self.recipe.model.classes
        known = source.class_names
        if known is None and self.recipe.data.source == "imagenet":
            known = imagenet_class_names(source.class_folders, classes)
        return known or source.class_folders or tuple(map(str, range(classes)))

    @cached_property
    def _source(self) -> Source:
        data, model = self.recipe.data, self.recipe.model
        if data.source == "folder":
            return folder.read(data, model)
        return SOURCES[data.source](data.path, model, data.valid_fraction)

    def resolve(self) -> Recipe:
        if self.recipe.data.source == "folder":
            source = self._source
            folder.check_images(source)
            self.recipe = resolved(self.recipe, source.fingerprint, classes=len(source.class_names))
        return self.recipe

    @classmethod
    def save_data(cls, data: Any, folder: Path, settings: VisionData) -> None:
        save_images(data, folder)

    def prepare(self, batch: Batch, generator: torch.Generator | None) -> Batch:
        augmentation, classes = self.recipe.data.augmentation, self.recipe.model.classes
        if generator is None or not (augmentation.mixes or augmentation.label_smoothing):
            return batch
        targets = smooth(batch["labels"], classes, augmentation.label_smoothing)
        images = batch["images"]
        if augmentation.mixes:
            images, targets = mix(images, targets, augmentation, generator)
        return {**batch, "images": images, "targets": targets}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        scores, labels = model(batch["images"]).float(), batch["labels"]
        count = labels.new_full((), len(labels))  # created on the device: a copy could not be part of a CUDA graph
        return F.cross_entropy(scores, batch.get("targets", labels), reduction="sum"), count

    def evaluate_examples(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        scores, labels = model(batch["images"]).float(), batch["labels"]
        best = scores.topk(min(TOP, scores.shape[1]), dim=1).indices
        hits = best == labels.unsqueeze(1)
        return {
            "count": torch.ones_like(labels),
            "loss": F.cross_entropy(scores, labels, reduction="none"),
            "accuracy": hits[:, 0],
            "accuracy5": hits.sum(1),
        }

    def example_inputs(self) -> tuple[Tensor]:
        config = self.recipe.model
        return (torch.zeros(1, config.channels, config.image_size, config.image_size),)

    def catalogue(self) -> Catalogue:
        mean, std = self.held_out().normalisation
        return Catalogue({"classes": list(self.class_names()), "mean": list(mean), "std": list(std)})

    def golden_requests(self, predictor: ClassifyPredictor, count: int) -> list[Request]:
        return image_requests(self.held_out(), count)

    def views(self) -> list[View]:
        names = self.class_names()
        keys = self._source.class_folders or tuple(map(str, range(len(names))))
        return [class_view(names, keys)]

    def shown(self, split: ImageExamples) -> Shown:
        return show_images(split, self.class_names(), self.recipe.model)
