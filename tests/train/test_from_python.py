"""``intbmoe.train(recipe, data=…)``: data sets that live in Python.

Hugging Face data sets are replaced by classes with the same interface; if ``datasets`` is installed, one test uses it.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

import intbmoe
from intbmoe.recipes import load_recipe, override
from intbmoe.tasks import DataError, find_task
from intbmoe.train import RunConflictError, RunDirectory, evaluate

SMALL = {"model.dim": 12, "model.hidden": 8, "model.depth": 1, "moe.experts": 2, "train.epochs": 1, "train.batch": 8}
IMAGES = {**SMALL, "model.image_size": 8, "model.patch_size": 4, "model.moe_layers": [0], "train.workers": 0}
TEXT = {**SMALL, "model.heads": 2, "data.length": 16, "data.tokenizer": "bytes"}
SEQUENCES = {**SMALL, "model.length": 6}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("INTBMOE_CACHE", str(tmp_path / "cache"))


class Tensors(Dataset):
    """A map-style torch data set with the attribute names of torchvision's."""

    classes = ("red", "green", "blue")

    def __init__(self, count=30, seed=0):
        self.images = torch.rand(count, 3, 10, 12, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], index % 3


class Table:
    """Like a Hugging Face Dataset: column_names, features, rows as dicts, columns by name."""

    def __init__(self, features=None, **columns):
        self.columns_, self.features, self.column_names = columns, features or dict.fromkeys(columns), list(columns)

    def __len__(self):
        return len(next(iter(self.columns_.values())))

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.columns_[key]
        return {name: column[key] for name, column in self.columns_.items()}


class ClassLabel:
    names = ("zebra", "ant", "cow")


def train(recipe, data, root, settings):
    return intbmoe.train(recipe, data=data, root=root, settings=settings, quiet=True)


def test_images_of_a_torch_dataset(tmp_path):
    data = Tensors()
    run = train("images", data, tmp_path, IMAGES)
    assert isinstance(run, RunDirectory)
    assert run.finished
    recipe = run.recipe
    assert recipe.model.classes == 3
    task = find_task("vision")(recipe)
    assert task.class_names() == data.classes
    images = task.split("train").images
    for index in range(3):
        number = int(images.path(index).stem)
        assert images.labels[index] == number % 3
        expected = data.images[number].mul(255).round().byte().permute(1, 2, 0).numpy()
        assert np.array_equal(np.asarray(images.image(index)), expected)
    assert evaluate(run)["accuracy"] == run.result["test"]["accuracy"]  # the data set itself is not needed any more
    assert intbmoe.load(run)(torch.zeros(1, 3, 8, 8)).shape == (1, 3)


def test_the_same_data_goes_on_and_other_data_is_another_run(tmp_path):
    run = train("images", Tensors(), tmp_path, IMAGES)
    assert train("images", Tensors(), tmp_path, IMAGES).path == run.path
    assert len(list((tmp_path / "images").glob("data-*"))) == 1
    assert not list((tmp_path / "images").glob(".data*"))
    with pytest.raises(RunConflictError, match=r"data\.path: .*\n.*data\.fingerprint"):
        train("images", Tensors(seed=1), tmp_path, IMAGES)


def test_images_of_a_hugging_face_dataset_by_split(tmp_path):
    def part(count, mode):
        random = np.random.default_rng(count)
        pictures = [Image.fromarray(random.integers(0, 256, (9, 14, 3), np.uint8)).convert(mode) for _ in range(count)]
        return Table({"img": None, "label": ClassLabel}, img=pictures, label=[index % 3 for index in range(count)])

    data = {"train": part(12, "RGB"), "validation": part(6, "L"), "test": part(3, "RGBA")}
    run = train("images", data, tmp_path, IMAGES)
    task = find_task("vision")(run.recipe)
    assert task.class_names() == ClassLabel.names  # labels do not change, whatever the order of the names
    assert [len(task.split(name)) for name in ("train", "valid", "test")] == [12, 6, 3]
    assert task.split("test").images.labels.tolist() == [0, 1, 2]


def test_labels_may_be_names_and_images_arrays(tmp_path):
    data = [(np.full((8, 8), 20 * index, np.uint8), ("dog", "cat")[index % 2]) for index in range(12)]
    run = train("images", data, tmp_path, {**IMAGES, "model.channels": 1})
    task = find_task("vision")(run.recipe)
    assert task.class_names() == ("cat", "dog")
    assert task.split("train").images.image(0).mode == "L"


@pytest.mark.parametrize(
    "data", [[f"document {n} " * 20 for n in range(30)], Table(text=[f"document {n} " * 20 for n in range(30)])]
)
def test_texts(tmp_path, data):
    run = train("text", data, tmp_path, TEXT)
    assert run.recipe.model.vocabulary == 257
    task = find_task("language")(run.recipe)
    joined = (
        np.concatenate([task._source.splits[name] for name in ("train", "valid", "test")]).astype(np.uint8).tobytes()
    )
    assert all(f"document {number} ".encode() in joined for number in range(30))


def events():
    return [(f"u{user}", f"i{(user + time) % 7}", time) for user in range(12) for time in range(6)]


@pytest.mark.parametrize("kind", ["rows", "dicts", "columns", "dataset", "arrays"])
def test_events(tmp_path, kind):
    rows = events()
    users, items, times = map(list, zip(*rows, strict=True))
    data = {
        "rows": rows,
        "dicts": [{"user_id": user, "item_id": item, "timestamp": time} for user, item, time in rows],
        "columns": {"user": users, "item": items, "time": times},
        "dataset": Table(userId=users, movieId=items, timestamp=times),
        "arrays": {"user": np.array(users), "item": np.array(items), "time": np.array(times, "datetime64[s]")},
    }[kind]
    run = train("sequences", data, tmp_path, SEQUENCES)
    assert run.recipe.model.items == 7
    task = find_task("sequences")(run.recipe)
    history = [task.sequences.names[item] for item in task.sequences.items[:6]]
    assert history == [item for user, item, _ in rows if user == "u0"]


def iterator():
    yield "text"


@pytest.mark.parametrize(
    ("recipe", "data", "message"),
    [
        ("images", [(1, 2, 3)], r"data\['train'\]\[0\] is tuple: expected \(image, label\), or a dict"),
        ("images", [{"picture": 1}], r"data\['train'\]\[0\] has no 'image', only picture"),
        ("images", [(torch.randn(3, 8, 8), 0)], r"\[0\]: pixels go from .*: floating-point pixels must be from 0"),
        ("images", [(np.zeros((8, 8)), "dog")] * 2, r"data\['train'\] has one label, 'dog': expected two or more"),
        ("images", [(torch.zeros(8, 8, 3), 0)], r"\[0\]: the image is Tensor of shape \(8, 8, 3\): expected a PIL"),
        ("images", [(np.full((8, 8), 300), 0)], r"\[0\]: pixels go from 300 to 300: expected 0 to 255"),
        ("images", [(np.zeros((8, 8)), 0.5)], r"\[0\] has the label 0\.5: expected a whole number"),
        ("images", {"train": Tensors(6), "test": [(np.zeros((8, 8)), 7)]}, r"data\['test'\] has the label 7, which"),
        ("images", [], r"data\['train'\] is empty"),
        ("images", {"test": Tensors()}, r"data has the keys test but no 'train'"),
        ("images", {"first": Tensors()}, r"data has the keys first: expected 'train'"),
        ("text", "a story", r"data\['train'\] is a str: give a list of examples"),
        ("text", iterator(), r"data\['train'\] is generator, which has no length .*give a map-style data set"),
        ("text", ["a", 3], r"data\['train'\]\[1\] is int: expected a string, or a dict with 'text'"),
        ("text", [{"body": "a"}], r"\[0\] has no 'text', only body.*settings=\{\"data\.column\": NAME\}"),
        ("sequences", [("a", "b")], r"data\[0\] is \('a', 'b'\): expected \(user, item, time\)"),
        ("sequences", [{"user": 1}, {"item": 2}], r"data\[1\] has item, but data\[0\] has user"),
        ("sequences", {"user": [1, 2], "item": [3, 4], "time": [5]}, r"different lengths: user 2, item 2, time 1"),
        ("sequences", {"who": [1], "item": [2], "time": [3]}, r"no column with a usual name for the user"),
    ],
)  # fmt: skip
def test_mistakes_are_named_and_leave_nothing(tmp_path, recipe, data, message):
    with pytest.raises(DataError, match=message):
        train(recipe, data, tmp_path, {})
    assert not list(tmp_path.rglob("config.yaml"))
    assert not list(tmp_path.rglob(".data*"))


def test_recipes_that_take_no_data(tmp_path):
    with pytest.raises(
        ValueError, match=r"'digits' reads data\.source='digits', not data from Python: use 'images' or"
    ):
        train("digits", Tensors(), tmp_path, {})
    with pytest.raises(ValueError, match="the task 'travel' does not accept data from Python"):
        train("journeys", Tensors(), tmp_path, {})
    with pytest.raises(ValueError, match=r"data\.path='here' and data= were both given"):
        train("images", Tensors(), tmp_path, {"data.path": "here"})


def test_settings_overrule_a_recipe_by_their_names():
    recipe = load_recipe("stdlib")
    assert override(recipe, {}) is recipe
    changed = override(recipe, {"moe.name": "switch", "train.epochs": 3, "model.dim": 96, "name": "mine"})
    assert (changed.name, changed.moe.name, changed.moe.options, changed.model.dim) == ("mine", "switch", {}, 96)
    assert (changed.train.steps, changed.train.epochs) == (None, 3)
    assert override(recipe, {"moe.options.top-k": 1}).moe.options == {**recipe.moe.options, "top_k": 1}


def test_nested_settings_and_those_of_the_command_line_mean_the_same():
    recipe = load_recipe("images")
    for nested, dotted in [
        ({"train": {"epochs": 1}}, {"train.epochs": 1}),
        ({"model": {"dim": 96, "image-size": 64}}, {"--model.dim": 96, "model.image_size": 64}),
        ({"moe": {"name": "switch", "options": {"jitter": 0.1}}}, {"moe.name": "switch", "moe.options.jitter": 0.1}),
        ({"data": {"augmentation": {"flip": 0.1}}}, {"data.augmentation.flip": 0.1}),
    ]:
        assert override(recipe, nested) == override(recipe, dotted)
    assert override(recipe, {"train": {"epochs": 1}}).train == replace(recipe.train, epochs=1.0, steps=None)
    assert override(recipe, {"moe": {"name": "switch"}}).moe.experts == recipe.moe.experts
    assert override(recipe, {"moe": {"options": {"top_k": 1}}}).moe.options == {"top_k": 1}
    assert override(recipe, {"train": {}}) is recipe


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("epochs", "epochs: no such setting: did you mean 'train.epochs'?"),
        ("train.epoch", "train.epoch: no such setting: did you mean 'train.epochs'?"),
        ("trian.epochs", "trian.epochs: no such setting: did you mean 'train.epochs'?"),
        ("train.name", "train.name: no such setting: did you mean 'name' or 'moe.name'?"),
        ("moe.name.x", "moe.name.x: no such setting: known: moe.name, moe.experts, moe.options, moe.label"),
        ("zzz", "zzz: no such setting: known: name, task, "),
    ],
)
def test_an_unknown_setting_gets_a_suggestion(name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        override(load_recipe("stdlib"), {name: 1})


def test_a_run_whose_data_has_changed_is_refused(tmp_path, monkeypatch):
    data = [("u", str(number % 5), number) for number in range(30)]
    lines = ["user,item,time", *(",".join(map(str, row)) for row in data)]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    settings = {**SEQUENCES, "data.path": str(tmp_path / "a.csv")}
    run = intbmoe.train("sequences", tmp_path / "runs", quiet=True, settings=settings)
    (tmp_path / "a.csv").write_text("\n".join([*lines, "u,1,99"]) + "\n")
    with pytest.raises(RunConflictError, match="The data itself has changed since that run began"):
        intbmoe.train("sequences", tmp_path / "runs", quiet=True, settings=settings)
    with pytest.raises(DataError, match="is not what this run was trained on"):
        evaluate(run)


def test_images_are_checked_before_the_training_begins(tmp_path):
    for name in "ab":
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8)).save(tmp_path / "data" / name / f"{number}.png")
    (tmp_path / "data" / "b" / "2.png").write_bytes(b"\x89PNG")
    settings = {**IMAGES, "data.path": str(tmp_path / "data")}
    with pytest.raises(DataError, match=r"b/2\.png cannot be read as an image"):
        intbmoe.train("images", tmp_path / "runs", quiet=True, settings=settings)
    assert not (tmp_path / "runs").exists()


def test_data_sets_of_hugging_face_give_the_same_runs_as_lists(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    images = [Image.fromarray(np.random.default_rng(n).integers(0, 256, (9, 8, 3), np.uint8)) for n in range(24)]
    labels = [n % 3 for n in range(24)]
    texts = [f"{n} times {n} is {n * n}. " * 6 for n in range(40)]
    events = {"user": [n % 8 for n in range(64)], "item": [n * n % 11 for n in range(64)], "time": list(range(64))}
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["zebra", "ant", "cow"]))
    part = datasets.Dataset.from_dict
    theirs = {
        "images": part({"image": images, "label": labels}, features=features),
        "text": datasets.DatasetDict(
            train=datasets.Dataset.from_dict({"text": texts[:32]}),
            test=datasets.Dataset.from_dict({"text": texts[32:]}),
        ),
        "sequences": part(events),
    }
    lists = {
        "images": Table({"label": ClassLabel()}, image=images, label=labels),
        "text": {"train": texts[:32], "test": texts[32:]},
        "sequences": events,
    }
    for recipe, settings in (("images", IMAGES), ("text", TEXT), ("sequences", SEQUENCES)):
        runs = [train(recipe, data[recipe], tmp_path / str(n), settings) for n, data in enumerate((theirs, lists))]
        assert runs[0].result["test"] == runs[1].result["test"]
        assert runs[0].model_path.read_bytes() == runs[1].model_path.read_bytes()
    with pytest.raises(DataError, match="IterableDataset, which has no length"):
        train("text", theirs["text"]["train"].to_iterable_dataset(), tmp_path, TEXT)
