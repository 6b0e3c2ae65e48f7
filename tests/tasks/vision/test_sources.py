"""Every source reads what it should, always holds out the same images, and says what is wrong with a bad file."""

import os
import pickle
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from fake_images import encode, picture, sheet, sheets, vit, write_folder, write_parquet, write_rows, write_tar
from PIL import Image

from intbmoe.tasks import DataError, list_preparations
from intbmoe.tasks.vision import digits, imagenet, tiny_imagenet
from intbmoe.tasks.vision.decode import middle_square
from intbmoe.tasks.vision.pack_tiny_imagenet import pack
from intbmoe.tasks.vision.source import hold_out

DIGITS = vit(image_size=8, patch_size=2, channels=1, classes=10)


def told(pixels):
    """(label, number) that each fake picture encodes in its colours."""
    middle = pixels[:, pixels.shape[1] // 2, pixels.shape[2] // 2].astype(float)
    return [(round((red - 20) / 40), round((green - 20) / 10)) for red, green, _ in middle]


def contents(images, size=32):
    """What each image encodes; its label is checked."""
    found = told(images.pixels(range(len(images.labels)), size))
    assert [label for label, _ in found] == images.labels.tolist()
    return found


def test_holding_out_is_by_class_disjoint_and_the_same_whatever_else_there_is():
    labels = np.array([0] * 20 + [1] * 40 + [2] * 5)
    kept, held = hold_out(labels, 0.1, "here")
    assert sorted([*kept, *held]) == list(range(65))
    assert np.bincount(labels[held]).tolist() == [2, 4, 1]
    again = hold_out(labels, 0.1, "here")
    assert np.array_equal(kept, again[0])
    assert np.array_equal(held, again[1])
    first_two = hold_out(labels[:60], 0.1, "here")[1]
    assert np.array_equal(held[:6], first_two)


def test_a_class_too_small_to_share_is_an_error():
    with pytest.raises(DataError, match=r"here: class 1 has 1 training image\(s\), too few"):
        hold_out(np.array([0, 0, 0, 1]), 0.5, "here")


def test_digits_are_split_once_and_for_all():
    source = digits.read(None, DIGITS, 0.1)
    assert [len(split.labels) for split in (source.train, source.valid, source.test)] == [1295, 143, 359]
    splits = (source.train, source.valid, source.test)
    for split in splits:
        assert set(split.labels.tolist()) == set(range(10))
    # Every image of the set is in one split; its pixels come back exactly.
    from sklearn.datasets import load_digits

    ours = np.concatenate([split.array for split in splits]).reshape(1797, -1)
    theirs = load_digits().data
    back = np.rint(ours * (16 / 255))
    assert np.array_equal(back[np.lexsort(back.T)], theirs[np.lexsort(theirs.T)])
    # The test images stay the same when the held-out share changes.
    assert np.array_equal(digits.read(None, DIGITS, 0.3).test.array, source.test.array)
    mean, std = source.normalisation
    assert abs(ours.mean() / 255 - mean[0]) < 1e-3
    assert abs(ours.std() / 255 - std[0]) < 1e-3


def test_digits_take_no_path_and_one_size():
    with pytest.raises(DataError, match="need no path"):
        digits.read("somewhere", DIGITS, 0.1)
    with pytest.raises(DataError, match=r"model.image_size=8 and model.channels=1 \(they are 32 and 3\)"):
        digits.read(None, vit(), 0.1)
    with pytest.raises(DataError, match=r"10 classes.*expected model.classes=7"):
        digits.read(None, vit(image_size=8, patch_size=2, channels=1, classes=7), 0.1)


def test_tiny_imagenet_cuts_its_sheets_row_by_row(tmp_path):
    source = tiny_imagenet.read(str(write_tar(tmp_path / "tiny.tar", sheets())), vit(), 0.2)
    train, valid, test = contents(source.train), contents(source.valid), contents(source.test)
    assert sorted(train + valid) == [(label, number) for label in range(3) for number in range(10)]
    assert len(valid) == 6
    assert test == [(label, number) for label in range(3) for number in range(6)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train/001.jpg": None}, r"tiny.tar: train/ holds 2 classes, numbered 0 to 2: expected model.classes=3"),
        ({"val/000.jpg": None, "val/001.jpg": None, "val/002.jpg": None}, "tiny.tar: val/ holds no image"),
        ({"train/003.jpg": sheet(3, 1, 2)}, "holds 4 classes, numbered 0 to 3: expected model.classes=3"),
        ({"train/002.jpg": sheet(2, 2, 2, tile=30)}, r"tiny.tar: train/002.jpg is 60×60 px: .*multiples of 32"),
        ({"val/001.jpg": b"not a picture"}, r"tiny.tar: val/001.jpg cannot be read as an image"),
        ({"val/001.jpg": encode(sheet(1, 2, 3))[:300]}, r"tiny.tar: val/001.jpg cannot be read as an image.*whole"),
    ],
)
def test_a_tar_that_is_not_as_it_should_be(tmp_path, change, message):
    members = sheets()
    for name, content in change.items():
        if content is None:
            del members[name]
        else:
            members[name] = content if isinstance(content, bytes) else encode(content)
    with pytest.raises(DataError, match=message):
        tiny_imagenet.read(str(write_tar(tmp_path / "tiny.tar", members)), vit(), 0.2)


def test_tiny_imagenet_needs_a_tar(tmp_path):
    with pytest.raises(DataError, match=r"needs the tar .*set data.path .*docs/data.md"):
        tiny_imagenet.read(None, vit(), 0.2)
    with pytest.raises(DataError, match=r"nowhere.tar does not exist: data.path must be the tar"):
        tiny_imagenet.read(str(tmp_path / "nowhere.tar"), vit(), 0.2)
    with pytest.raises(DataError, match="is not a file"):
        tiny_imagenet.read(str(tmp_path), vit(), 0.2)
    (tmp_path / "text.tar").write_bytes(b"hello" * 1000)
    with pytest.raises(DataError, match=r"text.tar cannot be read as a tar"):
        tiny_imagenet.read(str(tmp_path / "text.tar"), vit(), 0.2)
    whole = write_tar(tmp_path / "whole.tar", sheets()).read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[: len(whole) // 3])
    with pytest.raises(DataError, match=r"cut.tar"):
        tiny_imagenet.read(str(tmp_path / "cut.tar"), vit(), 0.2)
    with pytest.raises(DataError, match=r"model.image_size=32 and model.channels=3 \(they are 64 and 3\)"):
        tiny_imagenet.read(str(tmp_path / "whole.tar"), vit(image_size=64), 0.2)


@pytest.mark.skipif("INTBMOE_DATA" not in os.environ, reason="INTBMOE_DATA, the real tiny-imagenet tar, is not set")
def test_the_real_tiny_imagenet():
    source = tiny_imagenet.read(os.environ["INTBMOE_DATA"], vit(classes=200), 0.05)
    assert [len(split.labels) for split in (source.train, source.valid, source.test)] == [95_000, 5_000, 10_000]
    assert np.bincount(source.test.labels).tolist() == [50] * 200
    # A broken loader would show: by raw pixels, the nearest training image has the right class for 2.7 %.
    train = source.train.array.reshape(95_000, -1).astype(np.float32)
    test = source.test.array[::25].reshape(400, -1).astype(np.float32)
    distances = (train**2).sum(1) - 2 * test @ train.T
    accuracy = (source.train.labels[distances.argmin(1)] == source.test.labels[::25]).mean()
    assert 0.01 < accuracy < 0.06


def test_the_official_tiny_imagenet_folder_is_packed_into_the_tar(tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    wnids = ["n03", "n01", "n02"]
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("\n".join(wnids))
    (folder / "words.txt").write_text("n01\tone\nn02\ttwo\nn03\tthree\n")
    annotations = []
    for wnid in wnids:
        label = int(wnid[1:]) - 1
        (folder / "train" / wnid / "images").mkdir(parents=True)
        for number in range(12):  # 10 and 11 come after 9, not after 1
            content = encode(picture(label, number, 64, 64))
            (folder / "train" / wnid / "images" / f"{wnid}_{number}.JPEG").write_bytes(content)
            (folder / "val" / "images" / f"val_{12 * label + number}.JPEG").write_bytes(content)
            annotations.append(f"val_{12 * label + number}.JPEG\t{wnid}\t0\t0\t1\t1")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(annotations))
    pack(folder, tmp_path / "packed.tar")
    source = tiny_imagenet.read(str(tmp_path / "packed.tar"), vit(), 0.2)
    expected = [(label, number) for label in range(3) for number in range(12)]
    assert contents(source.test) == expected
    assert sorted(contents(source.train) + contents(source.valid)) == expected
    shutil.rmtree(folder / "train" / "n02")
    with pytest.raises(DataError, match="no train image of n02"):
        pack(folder, tmp_path / "again.tar")
    (folder / "words.txt").unlink()
    with pytest.raises(DataError, match=r"words.txt cannot be read: expected the official"):
        pack(folder, tmp_path / "again.tar")


@pytest.mark.parametrize("write", [write_folder, write_parquet])
def test_imagenet_reads_folders_and_parquet_alike(tmp_path, write):
    source = imagenet.read(str(write(tmp_path)), vit(), 0.3)
    known = sorted(contents(source.train) + contents(source.valid))
    assert known == [(label, number) for label in range(3) for number in range(6)]
    assert len(source.valid.labels) == 6
    assert sorted(contents(source.test)) == [(label, number) for label in range(3) for number in range(2)]
    assert source.train.image(0).size == (40, 36)
    assert source.train.image(0).mode == "RGB"


def unpack(source, target, skip_bad=False, progress=lambda *_: None):
    return list_preparations()["imagenet"].run(source, target, skip_bad=skip_bad, progress=progress)


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_parquet_unpacks_into_the_folder_with_the_same_labels(tmp_path):
    packed = write_parquet(tmp_path / "packed")
    counted = unpack(packed, tmp_path / "folder")
    assert counted == {"train images": 18, "val images": 6, "skipped": 0}
    source = imagenet.read(str(tmp_path / "folder"), vit(), 0.3)
    assert sorted(contents(source.train) + contents(source.valid)) == [
        (label, number) for label in range(3) for number in range(6)
    ]
    assert sorted(contents(source.test)) == [(label, number) for label in range(3) for number in range(2)]


class StoppedError(Exception):
    pass


def test_unpacking_that_was_stopped_goes_on(tmp_path, monkeypatch):
    packed, target = write_parquet(tmp_path / "packed"), tmp_path / "folder"
    unpack(packed, tmp_path / "whole")
    begun = []

    def stop_in_each_file(stage, done, total):
        if stage not in begun:
            begun.append(stage)
            raise StoppedError

    for _ in range(3):
        with pytest.raises(StoppedError):
            unpack(packed, target, progress=stop_in_each_file)
        with pytest.raises(DataError, match=r"is not finished.*intbmoe prepare imagenet SOURCE .* resumes it"):
            imagenet.read(str(target), vit(), 0.3)
    finished = target / "train" / "0000" / "00000000.JPEG"
    before = finished.stat().st_ino
    unpack(packed, target, progress=stop_in_each_file)
    assert finished.stat().st_ino == before, "a finished file was unpacked again"
    assert files_of(target) == files_of(tmp_path / "whole")
    write_rows(packed / "data" / "train-00000-of-00002.parquet", [(b"", 0)])
    with pytest.raises(DataError, match=r"made from other files than these \(train-00000-of-00002.parquet differ\)"):
        unpack(packed, target)


def test_rows_that_are_no_images_stop_the_unpacking_or_are_counted(tmp_path):
    packed = write_parquet(tmp_path / "packed")
    write_rows(packed / "data" / "validation-00000-of-00001.parquet", [(b"x", 0), (None, 1), (b"y", None)])
    with pytest.raises(DataError, match=r"validation-00000-of-00001.parquet, row 1: the column 'image' has no bytes"):
        unpack(packed, tmp_path / "folder")
    assert unpack(packed, tmp_path / "folder", skip_bad=True) == {"train images": 18, "val images": 1, "skipped": 2}


def pixels_of(images):
    return images.pixels(range(4), 32)


@pytest.mark.parametrize("write", [write_folder, write_parquet])
def test_imagenet_can_be_read_in_other_processes(tmp_path, write):
    images = imagenet.read(str(write(tmp_path)), vit(), 0.3).train
    expected = pixels_of(images)  # opens files here first
    assert np.array_equal(pixels_of(pickle.loads(pickle.dumps(images))), expected)
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        assert np.array_equal(pool.submit(pixels_of, images).result(timeout=300), expected)


shared = []
"""Read by a forked process without pickling, as in a data loader's worker."""


def opens_files_of_its_own():
    images = shared[-1]
    inherited, was_open = images._open(0), images._open.cache_info().currsize == 1
    pixels_of(images)
    return was_open and images._open(0) is not inherited


def test_a_forked_worker_does_not_share_open_parquet_files(tmp_path):
    images = imagenet.read(str(write_parquet(tmp_path)), vit(), 0.3).train
    pixels_of(images)
    assert images._open.cache_info().currsize == 1
    shared.append(images)
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        assert pool.submit(opens_files_of_its_own).result(timeout=300)
    shared.clear()


def test_few_row_groups_are_kept(tmp_path):
    images = imagenet.read(str(write_parquet(tmp_path, train=20)), vit(), 0.1).train
    contents(images)
    assert images._group.cache_info().currsize == 4


def test_evaluation_takes_the_middle_square():
    array = np.zeros((64, 128, 3), dtype=np.uint8)
    array[:, 32:96] = 200
    square = middle_square(Image.fromarray(array), 56)
    assert square.shape == (56, 56, 3)
    assert (square[:, 2:-2] > 190).all()
    for size in ((7, 300), (300, 7), (33, 33)):
        assert middle_square(Image.new("RGB", size), 32).shape == (32, 32, 3)


def test_grey_and_transparent_images_become_rgb(tmp_path):
    write_folder(tmp_path)
    folder = tmp_path / "val" / "n00000000"
    Image.fromarray(picture(0, 0)[..., 0]).save(folder / "image_0.JPEG")
    Image.fromarray(picture(0, 1)).convert("RGBA").save(folder / "image_1.png")
    test = imagenet.read(str(tmp_path), vit(), 0.3).test
    assert test.pixels([0, 1, 2], 32).shape == (3, 32, 32, 3)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: shutil.rmtree(root / "val"), r"val is missing: data.path must be a folder with train/<class>/"),
        (lambda root: shutil.rmtree(root / "train"), r"train is missing: data.path must be"),
        (lambda root: shutil.rmtree(root / "val" / "n00000001"), "must have the same class folders.*'n00000001'"),
        (lambda root: [shutil.rmtree(folder) for folder in (root / "val").iterdir()], "val has no class folder"),
        (
            lambda root: [file.unlink() for file in (root / "train" / "n00000002").iterdir()],
            r"train/n00000002 holds no image: expected files ending in .jpeg",
        ),
    ],
)
def test_a_folder_that_is_not_as_it_should_be(tmp_path, spoil, message):
    spoil(write_folder(tmp_path))
    with pytest.raises(DataError, match=message):
        imagenet.read(str(tmp_path), vit(), 0.3)


@pytest.mark.parametrize("write", [write_folder, write_parquet])
def test_imagenet_checks_the_number_of_classes_and_channels(tmp_path, write):
    write(tmp_path)
    with pytest.raises(DataError, match=r"holds 3 classes, numbered 0 to 2: expected model.classes=1000"):
        imagenet.read(str(tmp_path), vit(classes=1000), 0.3)
    with pytest.raises(DataError, match=r"set model.channels=3 \(it is 1\)"):
        imagenet.read(str(tmp_path), vit(channels=1), 0.3)


def test_imagenet_needs_a_path():
    with pytest.raises(DataError, match=r"imagenet needs a folder .*--data.path.*docs/data.md"):
        imagenet.read(None, vit(), 0.3)


def test_a_truncated_image_is_named_when_it_is_read(tmp_path):
    write_folder(tmp_path)
    file = tmp_path / "val" / "n00000001" / "image_1.JPEG"
    file.write_bytes(file.read_bytes()[:-200])
    test = imagenet.read(str(tmp_path), vit(), 0.3).test
    with pytest.raises(DataError, match=r"val/n00000001/image_1.JPEG cannot be read as an image"):
        test.pixels(range(6), 32)


def test_parquet_that_is_not_as_it_should_be(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_parquet(tmp_path)
    validation = tmp_path / "data" / "validation-00000-of-00001.parquet"
    whole = validation.read_bytes()

    def read_one():
        return imagenet.read(str(tmp_path), vit(), 0.3).test.image(1)

    def expect(message):
        with pytest.raises(DataError, match=message):
            read_one()

    validation.write_bytes(whole[:-50])
    expect(r"validation-00000-of-00001.parquet cannot be read as parquet")
    pq.write_table(pa.table({"pixels": [1], "label": [0]}), validation)
    expect(r"validation-00000-of-00001.parquet has no column 'image', only pixels, label")
    write_rows(validation, [(encode(picture(label, 0)) if label != 1 else b"no", label) for label in range(3)])
    expect(r"validation-00000-of-00001.parquet, row group 0, row 1 cannot be read as an image")
    pq.write_table(pa.table({"image": [{"path": "x"}] * 3, "label": [0, 1, 2]}), validation)
    expect(r"row group 0, row 1: the column 'image' has no bytes")
    pq.write_table(pa.table({"image": [], "label": pa.array([], pa.int64())}), validation)
    expect("hold no row|holds no image")
    validation.unlink()
    expect(r"data has no validation-\*.parquet")
