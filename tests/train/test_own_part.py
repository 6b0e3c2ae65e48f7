"""Each rank reads only its own part of the data, checked by which files it opens and how much it reads."""

import io
import pickle
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from intbmoe.models.vit import ViTConfig
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.language.packed import TokenExamples
from intbmoe.tasks.recipe import TrainSettings
from intbmoe.tasks.travel.examples import JourneyExamples, JourneyReader
from intbmoe.tasks.travel.generator import make_journeys
from intbmoe.tasks.travel.inttravel import prepare
from intbmoe.tasks.travel.rows import Budget
from intbmoe.tasks.travel.store import open_journeys
from intbmoe.tasks.vision import folder, imagenet
from intbmoe.tasks.vision.datasets import save_images
from intbmoe.tasks.vision.examples import ImageExamples
from intbmoe.tasks.vision.imagenet import ParquetImages
from intbmoe.tasks.vision.settings import Augmentation
from intbmoe.tasks.vision.task import VisionData
from intbmoe.train.data import micro_batches, plan_batches, read_ahead
from inttravel_tables import write_tables

WORLD = 2
PICTURES = [(np.full((8, 8, 3), 10 * number, np.uint8), number % 3) for number in range(24)]


class CountingTokens(np.ndarray):
    """Counts the tokens that are read from it."""

    taken = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        CountingTokens.taken += np.size(found)
        return found


class Opened:
    """Records the files under a folder that this process opens inside the ``with`` block."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.watching = str(folder), [], False
        sys.addaudithook(self._look)  # audit hooks cannot be removed, so it ignores later events

    def _look(self, event: str, arguments: tuple) -> None:
        if self.watching and event == "open" and str(arguments[0]).startswith(self.folder):
            self.files.append(str(Path(arguments[0]).relative_to(self.folder)))

    def __enter__(self) -> "Opened":
        self.files, self.watching = [], True
        return self

    def __exit__(self, *_: object) -> None:
        self.watching = False


def epoch_of(examples, batch: int, rank: int, world: int = WORLD):
    """What a rank reads in an epoch, as [(indices, batch)]."""
    plan = plan_batches(len(examples), TrainSettings(epochs=1, batch=batch), world)
    reads = micro_batches(plan, 5, rank, 0)
    return [(read.indices, batch) for read, batch in read_ahead(examples, reads, 5, workers=0)]


def joined(epochs, name: str) -> torch.Tensor:
    """The entries of all ranks, in the order in which a single process has them."""
    return torch.cat([batch[name] for step in zip(*epochs, strict=True) for _, batch in step])


def test_a_rank_takes_only_its_tokens_from_the_file(tmp_path):
    ids = np.arange(64 * 16 + 1, dtype=np.uint16)
    ids.tofile(tmp_path / "tokens.bin")
    examples = TokenExamples(np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r"), 16)
    alone = epoch_of(examples, 8, 0, world=1)
    examples.tokens = examples.tokens.view(CountingTokens)
    ranks = []
    for rank in range(WORLD):
        CountingTokens.taken = 0
        ranks.append(epoch_of(examples, 8, rank))
        assert CountingTokens.taken == 64 * 17 // WORLD  # each piece with the token after it
    assert torch.equal(joined(ranks, "ids"), joined([alone], "ids"))


@pytest.fixture
def images(tmp_path):
    """24 images of three classes to train on, as many to test on."""
    save_images({"train": PICTURES, "test": PICTURES}, tmp_path)
    model = ViTConfig(
        image_size=8, patch_size=4, channels=3, classes=3, dim=16, depth=1, heads=2, hidden=16, moe_layers=(0,)
    )
    return folder.read(VisionData(source="folder", path=str(tmp_path), valid_fraction=0.0), model)


def test_a_rank_opens_only_its_images(images, tmp_path):
    examples = ImageExamples(images.train, images.normalisation, 8, Augmentation(kind="light", pad=2))
    opened, ranks = Opened(tmp_path), []
    for rank in range(WORLD):
        with opened:
            ranks.append(epoch_of(examples, 8, rank))
        own = [index for indices, _ in ranks[-1] for index in indices]
        assert len(own) == 24 / WORLD
        assert Counter(opened.files) == Counter(str(images.train.path(one).relative_to(tmp_path)) for one in own)
    assert torch.equal(joined(ranks, "images"), joined([epoch_of(examples, 8, 0, world=1)], "images"))


def test_ranks_share_the_check_of_all_images(images, tmp_path, monkeypatch):
    opened, found = Opened(tmp_path), []
    monkeypatch.setenv("WORLD_SIZE", str(WORLD))
    for rank in range(WORLD):
        monkeypatch.setenv("RANK", str(rank))
        with opened:
            folder.check_images(images)
        found.append(opened.files)
    assert [len(files) for files in found] == [24, 24]
    assert len({*found[0], *found[1]}) == 48


def test_a_row_group_is_read_once_for_a_batch(images, tmp_path, monkeypatch):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = []
    for array, label in PICTURES:
        Image.fromarray(array).save(content := io.BytesIO(), "PNG")
        rows.append({"image": {"bytes": content.getvalue(), "path": None}, "label": label})
    (tmp_path / "data").mkdir()
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "data" / "train-0.parquet", row_group_size=4)
    monkeypatch.setattr(imagenet, "KEPT_GROUPS", 1)  # as if there were far more groups than the cache keeps
    packed = ParquetImages.find(tmp_path, "train")
    examples = ImageExamples(packed, images.normalisation, 8, Augmentation())
    read, read_group = [], imagenet._read

    def count(opened, file, group, column):
        read.append(group)
        return read_group(opened, file, group, column)

    monkeypatch.setattr(imagenet, "_read", count)
    ranks = [epoch_of(examples, 24, rank) for rank in range(WORLD)]
    groups = [{int(packed.rows[index, 1]) for index in indices} for [(indices, _)] in ranks]
    assert sorted(read) == sorted([*groups[0], *groups[1]])
    assert torch.equal(joined(ranks, "images"), joined([epoch_of(examples, 24, 0, world=1)], "images"))


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    pytest.importorskip("duckdb")
    monkeypatch.setenv("INTBMOE_CACHE", str(tmp_path / "cache"))
    journeys = make_journeys(seed=3, users=60, weeks=4, sessions=(5, 20), side=3)
    write_tables(journeys, tmp_path / "raw")
    prepare(tmp_path / "raw", tmp_path / "out", skip_bad=False, progress=lambda *_: None, budget=Budget(shard_rows=60))
    return tmp_path / "out"


def test_a_rank_opens_only_the_shards_of_its_journeys(prepared):
    data, opened, ranks = open_journeys(prepared), Opened(prepared), []
    in_memory = JourneyExamples(JourneyReader(replace(data, shards=list(data.shards)), 8), "train")
    with opened:
        JourneyExamples(JourneyReader(open_journeys(prepared), 8), "train")  # finds the windows for all processes
    assert len(data.shards) > 4
    assert len({name for name in opened.files if name.endswith("time.npy")}) == len(data.shards)
    for rank in range(WORLD):
        with opened:
            examples = JourneyExamples(JourneyReader(open_journeys(prepared), 8), "train")
            assert not [name for name in opened.files if name.startswith("shards")]
            examples.batch([0, 1], 0, 0)
        assert {Path(name).parent.name for name in opened.files if name.startswith("shards")} == {"00000"}
        ranks.append(epoch_of(pickle.loads(pickle.dumps(examples)), 4, rank))
    for name in ranks[0][0][1]:
        assert torch.equal(joined(ranks, name), joined([epoch_of(in_memory, 4, 0, world=1)], name))


def test_windows_are_found_again_for_other_data_and_settings(prepared, monkeypatch):
    def find(sessions, split):
        return len(JourneyExamples(JourneyReader(open_journeys(prepared), sessions), split))

    assert find(8, "train") > find(16, "train") > 0
    kept = len(list((prepared.parent / "cache" / "journeys").glob("*/ends.npy")))
    find(8, "train")
    find(8, "test")
    assert len(list((prepared.parent / "cache" / "journeys").glob("*/ends.npy"))) == kept + 1
    (prepared.parent / "file").write_text("")
    monkeypatch.setenv("INTBMOE_CACHE", str(prepared.parent / "file"))
    with pytest.raises(DataError, match=r"cannot be kept in .*file: .*set INTBMOE_CACHE"):
        find(8, "train")
