"""Mixup, CutMix and smoothing give what timm's ``Mixup`` gives for the same λ and box."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from intbmoe.tasks.vision.mixing import cut_box, cutmix, mix, mixup, smooth
from intbmoe.tasks.vision.settings import Augmentation
from intbmoe.tasks.vision.timm_data import timm_data

CLASSES = 5
SETTINGS = Augmentation(mixup=0.8, cutmix=1.0, label_smoothing=0.1)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    labels = torch.tensor([0, 3, 1, 4, 2, 2])
    return torch.randn(6, 3, 12, 16, generator=generator), labels


def timms(**settings):
    timm_data()
    from timm.data import mixup as timm_mixup

    return timm_mixup, timm_mixup.Mixup(label_smoothing=0.1, num_classes=CLASSES, mode="batch", **settings)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.85, 1.0])
def test_mixup_is_timms(batch, monkeypatch, share):
    images, labels = batch
    _, theirs = timms(mixup_alpha=0.8)
    monkeypatch.setattr(theirs, "_params_per_batch", lambda: (share, False))
    expected_images, expected_targets = theirs(images.clone(), labels)
    mixed, targets = mixup(images, smooth(labels, CLASSES, 0.1), share)
    assert torch.allclose(mixed, expected_images, atol=1e-6)
    assert torch.allclose(targets, expected_targets, atol=1e-6)


@pytest.mark.parametrize("share", [0.01, 0.4, 0.75, 0.999])
@pytest.mark.parametrize("at", [(0, 0), (6, 9), (11, 15)])
def test_cutmix_is_timms_for_the_same_box(batch, monkeypatch, share, at):
    images, labels = batch
    module, theirs = timms(mixup_alpha=0.0, cutmix_alpha=1.0)
    monkeypatch.setattr(theirs, "_params_per_batch", lambda: (share, True))
    places = iter(at)
    monkeypatch.setattr(module.np.random, "randint", lambda *bounds, size=None: next(places))
    expected_images, expected_targets = theirs(images.clone(), labels)
    mixed, targets = cutmix(images, smooth(labels, CLASSES, 0.1), cut_box(12, 16, share, *at))
    assert torch.equal(mixed, expected_images)
    assert torch.allclose(targets, expected_targets, atol=1e-6)


def test_cutmix_weighs_targets_by_what_was_cut(batch):
    images, labels = batch
    mixed, targets = cutmix(images, smooth(labels, CLASSES, 0.0), (slice(2, 8), slice(4, 8)))
    assert torch.equal(mixed[0, :, 2:8, 4:8], images[5, :, 2:8, 4:8])
    assert torch.equal(mixed[0, :, :2], images[0, :, :2])
    assert targets[0].tolist() == pytest.approx([1 - 24 / 192, 0, 24 / 192, 0, 0])


def test_smoothing_spreads_evenly():
    targets = smooth(torch.tensor([2]), 4, 0.2)
    assert targets[0].tolist() == pytest.approx([0.05, 0.05, 0.85, 0.05])


def test_the_generator_decides_and_nothing_else(batch):
    images, labels = batch
    targets = smooth(labels, CLASSES, 0.1)
    original = images.clone()

    def mixed(seed):
        return mix(images, targets, SETTINGS, torch.Generator().manual_seed(seed))

    first = mixed(3)
    torch.rand(4), np.random.rand(4)
    again = mixed(3)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], mixed(4)[0])
    assert torch.equal(images, original)  # the given batch is not written to
    generator = torch.Generator().manual_seed(3)
    one, two = (mix(images, targets, SETTINGS, generator) for _ in range(2))
    assert not torch.equal(one[0], two[0])


def kinds(images, settings, count=400):
    """How often a batch is left alone, cut (a pixel from one of the two images) or blended."""
    targets = smooth(torch.arange(len(images)) % CLASSES, CLASSES, 0.1)
    generator = torch.Generator().manual_seed(0)
    found = {"same": 0, "cut": 0, "blend": 0}
    for _ in range(count):
        mixed, soft = mix(images, targets, settings, generator)
        assert torch.allclose(soft.sum(1), torch.ones(len(images)))
        from_one = (mixed == images) | (mixed == images.flip(0))
        same = torch.equal(mixed, images) and torch.equal(soft, targets)
        found["same" if same else "cut" if from_one.all() else "blend"] += 1
    return found


def test_probabilities_are_as_set(batch):
    images, _ = batch
    both = kinds(images, SETTINGS)
    # A CutMix box can be empty: λ near 1 cuts less than a pixel.
    assert both["same"] < 30
    assert 160 < both["blend"] < 240
    assert kinds(images, replace(SETTINGS, mix_switch=0.0))["blend"] == 400
    assert kinds(images, replace(SETTINGS, cutmix=0.0))["blend"] == 400
    assert kinds(images, replace(SETTINGS, mixup=0.0))["blend"] == 0
    half = kinds(images, replace(SETTINGS, mix_probability=0.5, cutmix=0.0))
    assert 160 < half["same"] < 240


def test_lambda_follows_beta(batch):
    images = torch.stack([torch.zeros(1, 2, 2), torch.ones(1, 2, 2)])
    targets = smooth(torch.tensor([0, 1]), 2, 0.0)
    generator = torch.Generator().manual_seed(0)
    settings = replace(SETTINGS, cutmix=0.0)
    shares = np.array([float(mix(images, targets, settings, generator)[1][0, 0]) for _ in range(3000)])
    # Beta(0.8, 0.8): mean 1/2, variance 1 / (4 (2·0.8 + 1)).
    assert abs(shares.mean() - 0.5) < 0.02
    assert abs(shares.var() - 1 / 10.4) < 0.006


def test_an_odd_batch_leaves_its_middle_alone(batch):
    images, labels = batch[0][:5], batch[1][:5]
    mixed, targets = mixup(images, smooth(labels, CLASSES, 0.0), 0.3)
    assert torch.allclose(mixed[2], images[2])
    assert targets[2].tolist() == pytest.approx([0, 1, 0, 0, 0])
