"""Augmentation is a function of (seed, epoch, index), leaves the global generators alone, and does what it says."""

import random
import sys

import numpy as np
import pytest
import torch
from fake_images import picture, vit, write_folder
from PIL import Image

from intbmoe.tasks.vision import digits, imagenet, timm_data
from intbmoe.tasks.vision.augment import DeiT, example_draws, seeded, shift_and_flip
from intbmoe.tasks.vision.examples import ImageExamples
from intbmoe.tasks.vision.settings import Augmentation
from intbmoe.tasks.vision.source import IMAGENET_NORMALISATION, ArrayImages

NOISE = np.random.default_rng(0).integers(256, size=(6, 32, 32, 3), dtype=np.uint8)


def examples(kind, **settings):
    images = ArrayImages(NOISE, np.arange(6))
    return ImageExamples(images, IMAGENET_NORMALISATION, 32, Augmentation(kind=kind, **settings))


@pytest.mark.parametrize("kind", ["none", "light", "deit"])
def test_an_example_is_the_same_in_any_order_and_batch(kind):
    some = examples(kind)
    together = some.batch([0, 1, 2, 3], epoch=3, seed=7)
    torch.rand(5), np.random.rand(5), random.random()
    apart = [examples(kind).batch([index], epoch=3, seed=7) for index in (3, 1)]
    backwards = some.batch([5, 3, 1], epoch=3, seed=7)
    for index, single in zip((3, 1), apart, strict=True):
        assert torch.equal(single["images"][0], together["images"][index])
        assert single["labels"].tolist() == [index]
    assert torch.equal(backwards["images"][1:], together["images"][[3, 1]])
    assert together["images"].shape == (4, 3, 32, 32)
    assert together["images"].dtype == torch.float32
    assert together["labels"].dtype == torch.int64


@pytest.mark.parametrize("kind", ["light", "deit"])
@pytest.mark.parametrize("change", [{"epoch": 4}, {"seed": 8}])
def test_another_epoch_or_seed_gives_another_image(kind, change):
    some = examples(kind)
    first = some.batch(range(6), epoch=3, seed=7)["images"]
    other = some.batch(range(6), **{"epoch": 3, "seed": 7, **change})["images"]
    assert sum(torch.equal(a, b) for a, b in zip(first, other, strict=True)) <= 1


@pytest.mark.parametrize("kind", ["light", "deit"])
def test_indices_have_randomness_of_their_own(kind):
    images = ArrayImages(np.stack([NOISE[0]] * 6), np.zeros(6, dtype=np.int64))
    batch = ImageExamples(images, IMAGENET_NORMALISATION, 32, Augmentation(kind=kind)).batch(range(6), 0, 0)
    assert len({tuple(image.flatten().tolist()) for image in batch["images"]}) >= 5


@pytest.mark.parametrize("kind", ["none", "light", "deit"])
def test_the_global_generators_stay_where_they_were(kind):
    some = examples(kind)
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    some.batch(range(6), 0, 0)
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_the_global_generators_come_back_after_an_error_too():
    before = torch.get_rng_state()

    def fail():
        with seeded((0, 0, 0)):
            torch.rand(3)
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        fail()
    assert torch.equal(torch.get_rng_state(), before)


def test_without_augmentation_pixels_are_only_normalised():
    batch = examples("none").batch([2, 0], 0, 0)
    mean, std = (np.array(values) for values in IMAGENET_NORMALISATION)
    expected = ((NOISE[[2, 0]] / 255 - mean) / std).transpose(0, 3, 1, 2)
    assert np.allclose(batch["images"].numpy(), expected, atol=1e-5)


def test_light_shifts_within_the_padding_and_flips_half():
    count = 400
    pixels = np.zeros((count, 9, 9, 1), dtype=np.uint8)
    pixels[:, 4, 3] = 255  # left of the middle, so that a flip is visible
    draws = example_draws(0, 0, range(count))
    still = shift_and_flip(pixels, draws, pad=2, flip=0.0)
    found = np.argwhere(still[..., 0])
    rows, columns = found[:, 1] - 4, found[:, 2] - 3
    assert len(found) == count
    assert set(rows.tolist()) == set(columns.tolist()) == {-2, -1, 0, 1, 2}
    flipped = np.argwhere(shift_and_flip(pixels, draws, pad=2, flip=0.5)[..., 0])[:, 2]
    assert 0.4 < (flipped != columns + 3).mean() < 0.6


def test_light_works_on_one_channel():
    source = digits.read(None, vit(image_size=8, patch_size=2, channels=1, classes=10), 0.1)
    some = ImageExamples(source.train, source.normalisation, 8, Augmentation(kind="light", pad=1, flip=0.0))
    assert some.batch([0, 5], 0, 0)["images"].shape == (2, 1, 8, 8)


def test_deit_is_the_appendix():
    """Read from the transforms that timm builds: sizes, probabilities, operations, and their order."""
    steps = DeiT(224, IMAGENET_NORMALISATION, Augmentation(kind="deit"))._transform.transforms
    names = [type(step).__name__ for step in steps]
    assert names == [
        "RandomResizedCropAndInterpolation",
        "RandomHorizontalFlip",
        "RandAugment",
        "MaybeToTensor",
        "Normalize",
        "RandomErasing",
    ]
    crop, flip, augment, _, _, erase = steps
    assert (crop.size, crop.scale, crop.ratio) == ((224, 224), (0.08, 1.0), (0.75, 1.33))
    assert "bicubic" in repr(crop)
    assert flip.p == 0.5
    assert augment.num_layers == 2
    assert {(op.magnitude, op.magnitude_std) for op in augment.ops} == {(9, 0.5)}
    assert (erase.probability, erase.per_pixel, erase.min_count, erase.max_count) == (0.25, True, 1, 1)


def test_full_magnitude_posterizes_to_black():
    """timm asks for 0 bits there, which newer versions of Pillow refuse."""
    augment = DeiT(32, IMAGENET_NORMALISATION, Augmentation(kind="deit"))._transform.transforms[2]
    (posterize,) = [op for op in augment.ops if op.name == "PosterizeIncreasing"]
    posterize.prob, posterize.magnitude_std = 1.0, 0
    images = {}
    for magnitude in (0, 9, 10):
        posterize.magnitude = magnitude
        images[magnitude] = np.unique(np.asarray(posterize(Image.fromarray(NOISE[0])))).tolist()
    assert images == {0: list(range(0, 256, 16)), 9: [0, 128], 10: [0]}


def test_every_operation_works_at_any_magnitude():
    augment = DeiT(32, IMAGENET_NORMALISATION, Augmentation(kind="deit"))._transform.transforms[2]
    for operation in augment.ops:
        operation.prob, operation.magnitude_std = 1.0, 0
        for magnitude in (0, 5, 9, 10):
            operation.magnitude = magnitude
            assert operation(Image.fromarray(NOISE[0])).size == (32, 32)


def test_erasing_strikes_a_quarter_of_the_images():
    """On a flat image only the noise has many colours."""
    settings = Augmentation(kind="deit", rand_augment="rand-m0-n0")
    deit = DeiT(32, IMAGENET_NORMALISATION, settings)
    image = Image.fromarray(picture(1, 1))
    erased = [len(deit(image, (0, 0, index))[0].unique()) > 3 for index in range(300)]
    assert 0.17 < np.mean(erased) < 0.33


def test_deit_takes_images_of_any_size(tmp_path):
    source = imagenet.read(str(write_folder(tmp_path)), vit(), 0.3)
    some = ImageExamples(source.train, source.normalisation, 32, Augmentation(kind="deit"))
    assert some.batch([0, 3, 2], 0, 0)["images"].shape == (3, 3, 32, 32)


def test_a_missing_timm_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.data", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'intbmoe\[images\]'"):
        timm_data.timm_data()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "heavy"}, "kind='heavy'"),
        ({"flip": 1.5}, r"flip=1.5 .*in \[0, 1\]"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
        ({"mixup": -1.0}, "mixup=-1.0"),
        ({"cutmix": float("nan")}, "cutmix=nan"),
        ({"pad": 0}, "pad=0"),
        ({"crop_scale": (0.5, 0.1)}, r"crop_scale=\(0.5, 0.1\)"),
        ({"crop_scale": (0.5, 1.1)}, r"crop_scale=.*at most 1"),
        ({"crop_ratio": (1.0,)}, "crop_ratio"),
        ({"rand_augment": "augmix-m5"}, "rand_augment='augmix-m5'"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        Augmentation(**settings)


def test_timm_leaves_colour_jitter_out_beside_rand_augment():
    """The released code also asks for jitter 0.4, but gets the same transform as ours, which asks for none."""
    make = timm_data.timm_data().create_transform
    asked = make(224, is_training=True, color_jitter=0.4, auto_augment="rand-m9-mstd0.5-inc1")
    names = [type(step).__name__ for step in asked.transforms]
    assert "RandAugment" in names
    assert "ColorJitter" not in names
    alone = make(224, is_training=True, color_jitter=0.4)
    assert "ColorJitter" in [type(step).__name__ for step in alone.transforms]
