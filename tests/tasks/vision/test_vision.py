"""The vision task: models under the budget, splits, losses and metrics, and the paper's recipe taking a real step."""

import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from fake_images import encode, picture, vit, write_folder
from torch import nn

import intbmoe
from intbmoe.models.vit import ViTConfig
from intbmoe.recipes import load_recipe, recipe_from_dict, recipe_to_dict
from intbmoe.registry import list_methods
from intbmoe.tasks import DataError, make_task
from intbmoe.tasks.recipe import MoESettings, Recipe
from intbmoe.tasks.vision.settings import Augmentation
from intbmoe.tasks.vision.task import VisionData, VisionRecipe

DIGITS = vit(image_size=8, patch_size=2, channels=1, classes=10)


def recipe(moe=None, model=DIGITS, augmentation=None, **data):
    data = VisionData(augmentation=augmentation or Augmentation(), **data)
    return VisionRecipe("test", "vision", data, model, moe or MoESettings("switch", 4))


class Scores(nn.Module):
    """A fake model that returns what it was given."""

    def forward(self, images):
        return images


def test_a_misspelt_task_gets_a_suggestion():
    with pytest.raises(KeyError, match=r"no task is called 'visoin': did you mean 'vision'\?"):
        make_task(Recipe("test", "visoin", None, None))
    with pytest.raises(TypeError, match="takes a VisionRecipe, but this recipe is a Recipe"):
        make_task(Recipe("test", "vision", None, None))


def test_recipes_survive_being_written_down():
    one = recipe(MoESettings("intbmoe", 4, {"top_k": 1}), augmentation=Augmentation(kind="light", pad=1, mixup=0.2))
    assert recipe_from_dict(recipe_to_dict(one)) == one


@pytest.mark.parametrize("method", list_methods())
def test_every_method_learns_from_a_batch_of_digits(method):
    task = make_task(recipe(MoESettings(method, 4), augmentation=Augmentation(label_smoothing=0.1)))
    model = task.make_model().train()
    batch = task.prepare(task.split("train").batch(range(8), 0, 0), torch.Generator().manual_seed(0))
    total, count = task.loss(model, batch)
    assert count.item() == 8
    total.backward()
    assert torch.isfinite(total)
    assert model.head.weight.grad.abs().sum() > 0
    held = [layer for layer in model.modules() if isinstance(layer, intbmoe.MoELayer)]
    assert len(held) == (0 if method == "dense" else 1)


def test_the_dense_model_is_the_plain_vit_and_the_others_get_the_papers_budget():
    dense = make_task(recipe(MoESettings("dense", 4))).make_model()
    assert all(block.moe is None for block in dense.blocks)
    switch = make_task(recipe(MoESettings("switch", 4))).make_model()
    assert switch.blocks[0].moe.config.experts == 5  # E + 1 without a shared path
    assert switch.blocks[1].moe is None
    soft = make_task(recipe(MoESettings("soft", 4))).make_model()
    assert soft.blocks[0].moe.config.slots == 16 // 5  # one slot per patch, over all experts
    ours = make_task(recipe(MoESettings("intbmoe", 4, {"top_k": 1, "blocks": 3}))).make_model().blocks[0].moe.config
    assert (ours.experts, ours.top_k, ours.blocks) == (4, 1, 3)


def test_bad_mixtures_are_refused():
    with pytest.raises(KeyError, match="did you mean 'switch'"):
        make_task(recipe(MoESettings("swich"))).make_model()
    with pytest.raises(TypeError, match="has no option 'top_q': did you mean 'top_k'"):
        make_task(recipe(MoESettings("intbmoe", 4, {"top_q": 1}))).make_model()
    with pytest.raises(ValueError, match=r"moe.options=.*must be empty for the dense model"):
        make_task(recipe(MoESettings("dense", 4, {"top_k": 1}))).make_model()


def test_splits_do_not_depend_on_method_or_seed():
    one, two = make_task(recipe()), make_task(recipe(MoESettings("dense")))
    for name in ("valid", "test"):
        a, b = one.split(name), two.split(name)
        everything = range(len(a))
        assert torch.equal(a.batch(everything, 0, 0)["images"], b.batch(everything, 5, 9)["images"])


def test_only_training_images_are_varied():
    task = make_task(recipe(augmentation=Augmentation(kind="light", pad=2)))
    first, second = (task.split("train").batch(range(20), epoch, 0)["images"] for epoch in (0, 1))
    assert not torch.equal(first, second)
    first, second = (task.split("valid").batch(range(20), epoch, 0)["images"] for epoch in (0, 1))
    assert torch.equal(first, second)


def test_data_is_read_when_a_split_is_asked_for():
    task = make_task(load_recipe("imagenet"))
    assert [tuple(x.shape) for x in task.example_inputs()] == [(1, 3, 224, 224)]
    with pytest.raises(DataError, match=r"set data.path"):
        task.split("train")


def test_loss_is_a_sum_against_soft_targets():
    task = make_task(recipe())
    scores, labels = torch.randn(6, 10), torch.tensor([1, 2, 3, 4, 5, 6])
    batch = {"images": scores, "labels": labels}
    total, count = task.loss(Scores(), batch)
    assert total.item() == pytest.approx(F.cross_entropy(scores, labels).item() * 6, rel=1e-5)
    assert count.item() == 6
    smoothed = make_task(recipe(augmentation=Augmentation(label_smoothing=0.1)))
    total, _ = smoothed.loss(Scores(), smoothed.prepare(batch, torch.Generator()))
    expected = F.cross_entropy(scores, labels, label_smoothing=0.1) * 6
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    # Evaluation uses no smoothing and no mixing.
    assert smoothed.prepare(batch, None) is batch


def test_mixing_happens_in_prepare_and_repeats_with_the_generator():
    task = make_task(recipe(augmentation=Augmentation(mixup=0.8, cutmix=1.0, label_smoothing=0.1)))
    batch = task.split("train").batch(range(8), 0, 0)
    before = batch["images"].clone()
    first, again = (task.prepare(batch, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first["images"], again["images"])
    assert torch.equal(first["targets"], again["targets"])
    assert not torch.equal(first["images"], before)
    assert torch.equal(batch["images"], before)
    assert torch.allclose(first["targets"].sum(1), torch.ones(8))


def test_metrics_come_from_sums_over_batches():
    task = make_task(recipe())
    scores = torch.zeros(4, 10)
    scores[0, 3] = 9.0  # first
    scores[1, :5] = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])  # label 4 is fifth
    scores[2, :6] = torch.tensor([6.0, 5.0, 4.0, 3.0, 2.0, 1.0])  # label 5 is sixth
    scores[3, 7] = 9.0
    labels = torch.tensor([3, 4, 5, 7])
    whole = task.evaluate(Scores(), {"images": scores, "labels": labels})
    parts = [task.evaluate(Scores(), {"images": scores[i : i + 2], "labels": labels[i : i + 2]}) for i in (0, 2)]
    added = {name: float(parts[0][name] + parts[1][name]) for name in whole}
    assert added == pytest.approx({name: float(value) for name, value in whole.items()}, rel=1e-6)
    metrics = task.metrics(added)
    assert metrics["accuracy"] == 0.5
    assert metrics["accuracy5"] == 0.75
    assert metrics["loss"] == pytest.approx(F.cross_entropy(scores, labels).item(), rel=1e-6)
    with pytest.raises(ValueError, match="no example was evaluated"):
        task.metrics({**added, "count": 0})


def test_with_fewer_than_five_classes_the_top_five_are_all():
    task = make_task(recipe(model=replace(DIGITS, classes=3)))
    sums = task.evaluate(Scores(), {"images": torch.randn(4, 3), "labels": torch.tensor([0, 1, 2, 0])})
    assert sums["accuracy5"] == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VisionData(source="mnist"), "source='mnist'.*'digits', 'tiny-imagenet', 'imagenet'"),
        (lambda: VisionData(valid_fraction=-0.1), "valid_fraction=-0.1"),
        (lambda: VisionData(valid_fraction=1.0), "valid_fraction=1.0"),
        (lambda: recipe(augmentation=Augmentation(kind="deit")), "'none' or 'light' with 1 channel"),
        (lambda: recipe(augmentation=Augmentation(kind="light", pad=8)), r"pad=8 .*below image_size \(8\)"),
        (lambda: replace(recipe(), task="language"), "task='language'"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def fast_recipe(name):
    """The recipe with its own data and model settings, for fake data of three classes."""
    full = load_recipe(name)
    return replace(full, model=replace(full.model, classes=3))


def step(task, count):
    """One real optimizer step, as the loop takes it."""
    torch.manual_seed(0)
    model = task.make_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    batch = task.prepare(task.split("train").batch(range(count), 0, 0), torch.Generator().manual_seed(0))
    total, images = task.loss(model, batch)
    (total / images + intbmoe.aux_loss(model)).backward()
    intbmoe.before_step(model, optimizer)
    optimizer.step()
    intbmoe.after_step(model, optimizer)
    assert torch.isfinite(total)
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    return model, moved


def test_the_imagenet_pipeline_takes_a_step_on_an_image_folder(tmp_path):
    one = fast_recipe("imagenet")
    small = replace(one.model, image_size=64, depth=2, moe_layers=(0,), dim=48, hidden=96)
    one = replace(one, data=replace(one.data, path=str(write_folder(tmp_path))), model=small)
    _, moved = step(make_task(one), count=4)
    assert "head.weight" in moved
    assert any(".moe." in name for name in moved)


@pytest.mark.slow
def test_the_imagenet_recipe_takes_a_real_step_at_full_size(tmp_path):
    for label in range(1000):
        for split, count in (("train", 2), ("val", 1)):
            folder = tmp_path / split / f"n{label:08d}"
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"{number}.JPEG").write_bytes(encode(picture(label % 6, number, 260, 240)))
    full = load_recipe("imagenet")
    assert full.model == ViTConfig()
    task = make_task(replace(full, data=replace(full.data, path=str(tmp_path))))
    start = time.perf_counter()
    model, moved = step(task, count=4)
    assert time.perf_counter() - start < 120
    assert sum(parameter.numel() for parameter in model.parameters()) == 24_293_132
    assert "head.weight" in moved
    with torch.no_grad():
        sums = task.evaluate(model.eval(), task.split("test").batch([0, 999], 0, 0))
    assert sums["count"] == 2
