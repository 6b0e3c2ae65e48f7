"""Images in the form that the training loop reads: batches of normalised tensors."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from intbmoe.tasks.base import Batch
from intbmoe.tasks.vision.augment import DeiT, example_draws, shift_and_flip
from intbmoe.tasks.vision.settings import Augmentation
from intbmoe.tasks.vision.source import Images, Normalisation


class ImageExamples:
    def __init__(self, images: Images, normalisation: Normalisation, size: int, augmentation: Augmentation) -> None:
        self.images = images
        self.normalisation = normalisation
        self.size = size
        self.augmentation = augmentation
        self._deit: Callable[[Image.Image, tuple[int, int, int]], Tensor] | None = None
        if augmentation.kind == "deit":
            self._deit = DeiT(size, normalisation, augmentation)

    def __len__(self) -> int:
        return len(self.images.labels)

    def batch(self, indices: Sequence[int], epoch: int, seed: int) -> Batch:
        """Return the examples at ``indices``; an image depends on (seed, epoch, index) alone.

        They are read in the order of the files, so that a parquet row group is read only once.
        """
        indices = [int(index) for index in indices]
        labels = torch.from_numpy(self.images.labels[np.asarray(indices, dtype=np.int64)])
        by_file = np.argsort(indices, kind="stable")
        places = np.argsort(by_file)
        in_order = [indices[place] for place in by_file]
        if self._deit is not None:
            varied = [self._deit(self.images.image(index), (seed, epoch, index)) for index in in_order]
            return {"images": torch.stack([varied[place] for place in places]), "labels": labels}
        pixels = self.images.pixels(in_order, self.size)[places]
        if self.augmentation.kind == "light":
            draws = example_draws(seed, epoch, indices)
            pixels = shift_and_flip(pixels, draws, self.augmentation.pad, self.augmentation.flip)
        return {"images": self._normalise(pixels), "labels": labels}

    def _normalise(self, pixels: np.ndarray) -> Tensor:
        """(B, H, W, channels) uint8 → (B, channels, H, W) float32."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in self.normalisation)
        images = torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))
        return images.float().div_(255).sub_(mean).div_(std)  # in place: halves the time for a batch of small images
