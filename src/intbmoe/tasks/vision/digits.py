"""scikit-learn's handwritten digits: 1,797 images of 8×8 grey pixels, ten classes, nothing to download.

A fifth of each class is the test set, always the same images; validation is held out from the rest.
"""

import numpy as np

from intbmoe.models.vit import ViTConfig
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.vision.source import ArrayImages, Normalisation, Source, check_image_size, check_labels, hold_out

TEST_FRACTION = 0.2
SIDE = 8
LEVELS = 16  # pixels are stored as 0…16
NORMALISATION = Normalisation((0.305,), (0.376,))


def read(path: str | None, model: ViTConfig, valid_fraction: float) -> Source:
    if path is not None:
        raise DataError(f"data.path={path!r}: digits come with scikit-learn and need no path: leave it out")
    check_image_size(model.image_size, model.channels, (SIDE, 1), "digits")
    from sklearn.datasets import load_digits  # slow to import, and only this source needs it

    digits = load_digits()
    labels = digits.target.astype(np.int64)
    check_labels(labels, model.classes, "scikit-learn's digits")
    array = np.rint(digits.images * (255 / LEVELS)).astype(np.uint8)[..., None]
    images = ArrayImages(array, labels)
    known, test = hold_out(labels, TEST_FRACTION, "digits")
    train, valid = hold_out(labels[known], valid_fraction, "digits")
    splits = (images.subset(known[train]), images.subset(known[valid]), images.subset(test))
    return Source(*splits, NORMALISATION, tuple(str(name) for name in digits.target_names))
