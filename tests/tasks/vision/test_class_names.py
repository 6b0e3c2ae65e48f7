"""What the classes are called, where the source says so."""

import json

import pytest
from fake_images import sheets, vit, write_folder, write_tar

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.vision import digits, imagenet, tiny_imagenet


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
    found = imagenet.read(str(write_folder(tmp_path)), vit(), 0.2).class_names
    assert found == ("n00000000", "n00000001", "n00000002")
    grey = vit(image_size=8, patch_size=4, channels=1, classes=10)
    assert digits.read(None, grey, 0.1).class_names == tuple("0123456789")
