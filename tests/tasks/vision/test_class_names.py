"""The names of the classes, if the source has them."""

import json
from dataclasses import replace
from importlib.util import find_spec

import pytest
from fake_images import sheets, vit, write_folder, write_tar

from intbmoe.recipes import load_recipe
from intbmoe.tasks import make_task
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.vision import class_names, digits, imagenet, tiny_imagenet
from intbmoe.tasks.vision.class_names import imagenet_class_names
from intbmoe.tasks.vision.timm_data import timm_data

missing = [name for name in ("timm", "torchvision") if find_spec(name) is None]
needs_timm = pytest.mark.skipif(bool(missing), reason=f"{missing} not installed")  # a bare import of them may fail


def read_tar(tmp_path, content):
    members = {**sheets(), "classes.json": content}
    return tiny_imagenet.read(str(write_tar(tmp_path / "tiny.tar", members)), vit(), 0.2).class_names


def test_tiny_imagenet_has_the_first_of_each_name(tmp_path):
    classes = [{"label": 1, "name": "newt, eft"}, {"label": 0, "name": "goldfish, Carassius auratus"}]
    assert read_tar(tmp_path, json.dumps(classes).encode()) == ("goldfish", "newt", "2"), "the third has none"


def test_classes_of_one_name_are_told_apart(tmp_path):
    classes = [{"label": label, "name": name} for label, name in enumerate(("crane, bird", "crane", "ox"))]
    assert read_tar(tmp_path, json.dumps(classes).encode()) == ("crane (0)", "crane (1)", "ox")


@pytest.mark.parametrize("content", [b"{", b"[1]", b'[{"label": 0}]'])
def test_a_broken_list_is_named(tmp_path, content):
    with pytest.raises(DataError, match=r"tiny\.tar: classes\.json is not a list of objects"):
        read_tar(tmp_path, content)


def test_an_older_tar_has_none(tmp_path):
    members = {name: content for name, content in sheets().items() if name != "classes.json"}
    assert tiny_imagenet.read(str(write_tar(tmp_path / "tiny.tar", members)), vit(), 0.2).class_names is None


def test_imagenet_folders_and_digits(tmp_path):
    pytest.importorskip("sklearn")
    source = imagenet.read(str(write_folder(tmp_path)), vit(), 0.2)
    assert (source.class_names, source.class_folders) == (None, ("n00000000", "n00000001", "n00000002"))
    (tmp_path / "classes.json").write_text(json.dumps([{"label": 1, "name": "newt, eft"}]))
    assert imagenet.read(str(tmp_path), vit(), 0.2).class_names == ("0", "newt", "2")
    grey = vit(image_size=8, patch_size=4, channels=1, classes=10)
    assert digits.read(None, grey, 0.1).class_names == tuple("0123456789")


@needs_timm
def test_imagenet_names_by_wordnet_id_and_by_label():
    every = imagenet_class_names(None, 1000)
    assert (every[0], every[8], every[195], every[999]) == ("tench", "hen", "Boston bull", "toilet tissue")
    assert len(set(every)) == 1000, "no two classes share a name"
    assert imagenet_class_names(["n02096585", "n01514859"], 2) == ("Boston bull", "hen")
    assert imagenet_class_names(["n02096585", "my cats"], 2) is None
    assert imagenet_class_names(None, 10) is None, "these may be any classes"
    # timm's own names agree, except for two that torchvision tells apart.
    info = timm_data().ImageNetInfo()
    words = [info.label_name_to_description(wnid).split(",")[0] for wnid in info.label_names()]
    assert [label for label in range(1000) if words[label] != every[label]] == [134, 639]


def test_without_timm_folders_keep_their_names(monkeypatch):
    def absent():
        raise ModuleNotFoundError("No module named 'timm'", name="timm")

    monkeypatch.setattr(class_names, "timm_data", absent)
    assert imagenet_class_names(["n02096585"], 1) is None


@needs_timm
def test_the_task_names_its_classes_and_shows_their_ids(tmp_path):
    write_folder(tmp_path)
    for split in ("train", "val"):
        for old, new in (("n00000000", "n01514859"), ("n00000001", "n02096585"), ("n00000002", "n03126707")):
            (tmp_path / split / old).rename(tmp_path / split / new)
    recipe = load_recipe("imagenet")
    data = replace(recipe.data, path=str(tmp_path), valid_fraction=0.2)
    task = make_task(replace(recipe, data=data, model=vit()))
    assert task.class_names() == ("hen", "Boston bull", "crane")
    (view,) = task.views()
    assert view.labels == ("hen (n01514859)", "Boston bull (n02096585)", "crane (n03126707)")
    assert view.places_of(["boston bull", "n01514859", "2"]) == [1, 0, 2]
    assert view.of_examples(task.split("test")).tolist() == [0, 0, 1, 1, 2, 2]
