"""Any folder of class folders: layouts, sizes, and the mistakes people make."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from intbmoe.recipes import load_recipe
from intbmoe.tasks import DataError, make_task
from intbmoe.tasks.vision.decode import SQUARES

CLASSES = ("cat", "dog", "fish")


def save_images(folder, classes=CLASSES, count=6, suffixes=(".png", ".jpg")):
    random = np.random.default_rng(len(str(folder.name)))
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(count):
            height, width = random.integers(9, 40, 2)
            pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}{suffixes[index % len(suffixes)]}")
    return folder


def task_of(path, classes=None, channels=3, **data):
    recipe = load_recipe("images")
    sizes = {"image_size": 8, "patch_size": 4, "dim": 12, "hidden": 8, "depth": 1, "moe_layers": (0,)}
    model = replace(recipe.model, classes=classes, channels=channels, **sizes)
    return make_task(replace(recipe, model=model, data=replace(recipe.data, path=path and str(path), **data)))


def names_of(images):
    return {images.path(index).relative_to(images.folder).as_posix() for index in range(len(images.labels))}


def lengths(task):
    return {name: len(task.split(name)) for name in ("train", "valid", "test")}


def test_one_folder_is_divided_class_by_class_and_always_alike(tmp_path):
    save_images(tmp_path / "pets", count=10)
    task = task_of(tmp_path / "pets", valid_fraction=0.2, test_fraction=0.3)
    recipe = task.resolve()
    assert recipe.model.classes == 3
    assert recipe is task.recipe
    assert task.class_names() == CLASSES
    splits = {name: names_of(task.split(name).images) for name in ("train", "valid", "test")}
    assert sorted(map(len, splits.values())) == [3, 9, 18]  # a fifth of the seven outside the test split is one
    assert len(set().union(*splits.values())) == 30
    again = task_of(tmp_path / "pets", valid_fraction=0.2, test_fraction=0.3)
    assert names_of(again.split("test").images) == splits["test"]
    other = task_of(tmp_path / "pets", valid_fraction=0.2, test_fraction=0.3, split_seed=1)
    assert names_of(other.split("test").images) != splits["test"]


@pytest.mark.parametrize("other", ["val", "valid", "Validation", "test", "dev"])
def test_the_one_folder_beside_train_is_the_test(tmp_path, other):
    save_images(tmp_path / "Train", count=10)
    save_images(tmp_path / other, count=2)
    assert lengths(task_of(tmp_path)) == {"train": 27, "valid": 3, "test": 6}


def test_three_folders_are_taken_as_they_are(tmp_path):
    save_images(tmp_path / "train", count=3)
    save_images(tmp_path / "val", count=2)
    save_images(tmp_path / "test", classes=CLASSES[1:], count=1)
    task = task_of(tmp_path)
    assert lengths(task) == {"train": 9, "valid": 6, "test": 2}
    assert task.split("test").images.labels.tolist() == [1, 2]  # a class without test images keeps its number


def test_a_class_may_be_called_train_and_splits_may_have_company(tmp_path):
    save_images(tmp_path / "vehicles", classes=("bus", "test", "train"))
    assert task_of(tmp_path / "vehicles").class_names() == ("bus", "test", "train")
    save_images(tmp_path / "pets" / "train")
    (tmp_path / "pets" / "notes").mkdir()
    assert task_of(tmp_path / "pets").class_names() == CLASSES


def test_images_of_any_size_and_mode_become_squares(tmp_path):
    folder = save_images(tmp_path / "pets")
    Image.new("P", (50, 9)).save(folder / "cat" / "palette.png")
    Image.new("RGBA", (9, 50)).save(folder / "cat" / "clear.webp")
    for channels in (1, 3):
        task = task_of(folder, channels=channels)
        for name in ("train", "valid", "test"):
            split = task.split(name)
            images = split.batch(range(len(split)), 0, 0)["images"]
            assert images.shape == (len(split), channels, 8, 8)
            assert images.isfinite().all()


def test_how_images_become_square():
    image = Image.fromarray(np.repeat(np.arange(16, dtype=np.uint8)[None] * 10, 8, 0))  # 16 wide, 8 high, brighter
    crop, stretch, pad = (SQUARES[name](image, 8).astype(int) for name in ("crop", "stretch", "pad"))
    assert np.array_equal(crop[0], np.arange(4, 12) * 10)
    assert stretch[0, 0] < 20
    assert stretch[0, -1] > 130
    assert np.all(pad[0] == 0)
    assert np.all(pad[-1] == 0)
    assert np.all(pad[4] == stretch[4])


@pytest.mark.parametrize("resize", ["crop", "stretch", "pad"])
def test_a_served_image_is_seen_as_in_evaluation(tmp_path, resize):
    folder = save_images(tmp_path / "pets", suffixes=(".png",))
    task = task_of(folder, resize=resize)
    task.resolve()
    found = task.catalogue()
    assert found.about["classes"] == list(CLASSES)
    artifact = SimpleNamespace(recipe=task.recipe, catalogue=found.about)
    predictor = task.find_predictor().encoder(artifact)
    split = task.split("valid")
    for index, request in enumerate(task.golden_requests(predictor, len(split))):
        pixels = predictor.encode(request).payload["pixels"]
        assert np.array_equal(pixels, split.images.pixels([index], 8)[0])


def test_a_resolved_recipe_builds_its_model_without_the_data(tmp_path):
    task = task_of(save_images(tmp_path / "pets"))
    with pytest.raises(ValueError, match=r"model\.classes comes from the data"):
        task.make_model()
    recipe = task.resolve()
    (tmp_path / "pets").rename(tmp_path / "away")
    model = make_task(recipe).make_model().eval()
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 8, 8)).shape == (1, 3)


def test_names_of_classes_may_be_given(tmp_path):
    folder = save_images(tmp_path / "pets")
    names = [{"label": label, "name": name} for label, name in enumerate(("a cat", "a dog", "a cat"))]
    (folder / "classes.json").write_text(json.dumps(names), encoding="utf-8")
    assert task_of(folder).class_names() == ("a cat (0)", "a dog", "a cat (2)")
    (folder / "classes.json").write_text("a cat\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"classes\.json is not a list of objects with label, name"):
        task_of(folder).class_names()


def test_nothing_need_be_held_out_for_validation(tmp_path):
    save_images(tmp_path / "train", count=1)
    save_images(tmp_path / "test", count=1)
    assert lengths(task_of(tmp_path, valid_fraction=0)) == {"train": 3, "valid": 0, "test": 3}


def test_other_files_are_another_fingerprint_and_are_refused(tmp_path):
    folder = save_images(tmp_path / "pets")
    recipe = task_of(folder).resolve()
    assert task_of(folder).resolve() == recipe
    assert make_task(recipe).resolve() == recipe
    moved = folder.rename(tmp_path / "moved")
    assert task_of(moved).resolve().data.fingerprint == recipe.data.fingerprint
    (moved / "cat" / "0.png").unlink()
    assert task_of(moved).resolve().data.fingerprint != recipe.data.fingerprint
    there = replace(recipe, data=replace(recipe.data, path=str(moved)))
    with pytest.raises(DataError, match="moved is not what this run was trained on"):
        make_task(there).split("valid")


def _empty(root):
    (root / "pets").mkdir()


def _flat(root):
    save_images(root, classes=("pets",))


def _one_class(root):
    save_images(root / "pets", classes=("cat",))


def _bare_class(root):
    save_images(root / "pets")
    (root / "pets" / "horse").mkdir()


def _too_deep(root):
    save_images(root / "pets" / "images")
    (root / "pets" / "more").mkdir()


def _unknown_class(root):
    save_images(root / "pets" / "train")
    save_images(root / "pets" / "val", classes=("cat", "whale"))


def _no_train(root):
    save_images(root / "pets" / "val")
    save_images(root / "pets" / "test")


def _flat_splits(root):
    save_images(root / "pets", classes=("train", "val"))


def _two_vals(root):
    for name in ("train", "val", "valid"):
        save_images(root / "pets" / name)


def _few(root):
    save_images(root / "pets", count=2)


def _broken(root):
    save_images(root / "pets")
    (root / "pets" / "dog" / "3.jpg").write_bytes(b"no image")


def _archive(root):
    (root / "pets").write_bytes(b"PK")


def _fine(root):
    save_images(root / "pets")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, r"pets does not exist: data\.path must be a folder with one folder of images per class"),
        (_archive, "pets is a file: .* an archive must be unpacked first"),
        (_empty, "pets has no class folder, it is empty: expected one folder per class"),
        (_flat, "pets has no class folder, only 6 images: expected one folder per class"),
        (_one_class, "pets has one class, 'cat': expected two or more"),
        (_bare_class, "horse holds no image: expected files ending in .jpeg, .jpg, .png"),
        (
            _too_deep,
            r"images holds no image: .*if its folders \(.*\) are the classes.* set data\.path=.*images",
        ),
        (_unknown_class, "val has classes that .*train lacks: whale"),
        (_no_train, "pets has test, val but no train"),
        (_flat_splits, "train has no class folder, only 6 images"),
        (_two_vals, "pets has several folders for valid: val, valid; keep one"),
        (_few, "cat has too few images to hold some out: expected 3 or more per class"),
        (_broken, r"dog/3\.jpg cannot be read as an image: .*get it again, or remove it"),
    ],
)
def test_mistakes_are_named(tmp_path, make, message):
    make(tmp_path)
    with pytest.raises(DataError, match=message):
        task_of(tmp_path / "pets").resolve()


def test_settings_that_do_not_fit(tmp_path):
    _fine(tmp_path)
    with pytest.raises(DataError, match=r"images needs a folder .*: set data\.path"):
        task_of(None).resolve()
    with pytest.raises(DataError, match=r"pets gives model\.classes=3, not 5: set it to 3, or leave it out"):
        task_of(tmp_path / "pets", classes=5).resolve()
    with pytest.raises(DataError, match=r"model\.channels=2: images are grey \(1\) or in colour \(3\)"):
        task_of(tmp_path / "pets", channels=2).resolve()
    with pytest.raises(ValueError, match="resize='pad' is not allowed: only source='folder' reads resize"):
        replace(load_recipe("digits").data, resize="pad")
