"""Preparing IntTravel's tables gives the same as the simple version, for any sizes, files and interruptions."""

import dataclasses
import gzip
import hashlib
import multiprocessing
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import naive_inttravel
import numpy as np
import pytest

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.travel.examples import JourneyReader
from intbmoe.tasks.travel.generator import make_journeys
from intbmoe.tasks.travel.inttravel import prepare
from intbmoe.tasks.travel.rows import Budget
from intbmoe.tasks.travel.store import open_journeys, read_json, shard_folder, write_json
from intbmoe.tasks.travel.tables import POI_BY_CELL, POI_INFO, USER_ACTION, USER_PROFILE
from inttravel_tables import write_tables
from thinned import thinned

pytest.importorskip("duckdb")
TINY = Budget(chunk_bytes=20_000, shard_rows=2_000)
FIELDS = ("time", "action", "place", "cell", "region", "weather", "mode", "via", "depart")


def run(source: Path, target: Path, skip_bad: bool = False, budget: Budget | None = None, progress=None):
    return prepare(source, target, skip_bad=skip_bad, progress=progress or (lambda *_: None), budget=budget)


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def journeys():
    return make_journeys(seed=3, users=120, weeks=4, sessions=(10, 40), side=4)


@pytest.fixture(scope="module")
def raw(journeys, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    write_tables(journeys, folder)
    return folder


@pytest.fixture(scope="module")
def whole(raw, tmp_path_factory):
    """The folder prepared in small parts without a stop, and the seconds that this took."""
    folder, began = tmp_path_factory.mktemp("prepared") / "whole", time.perf_counter()
    run(raw, folder, budget=TINY)
    return folder, time.perf_counter() - began


@pytest.fixture(scope="module")
def at_once(raw, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "at_once"
    run(raw, folder, budget=Budget(shard_rows=2_000))
    return folder


@pytest.mark.parametrize("header", [True, False])
def test_written_tables_give_the_same_journeys_back(journeys, tmp_path, header):
    write_tables(journeys, tmp_path / "raw", header=header)
    counted = run(tmp_path / "raw", tmp_path / "out")
    stored = open_journeys(tmp_path / "out")
    assert counted["rows"] == counted["sessions"] == len(journeys.shards[0].time)
    assert (stored.sizes, stored.valid_from, stored.test_from) == (
        journeys.sizes,
        journeys.valid_from,
        journeys.test_from,
    )
    for made, read in ((journeys.places, stored.places), (journeys.shards[0], stored.shards[0])):
        for field in dataclasses.fields(made):
            before, after = getattr(made, field.name), getattr(read, field.name)
            if before is None:  # a clock for each session, which only check-ins have
                assert after is None, field.name
                continue
            assert before.dtype == after.dtype, field.name
            assert np.array_equal(before, after), field.name


def test_shards_divide_the_users_and_keep_their_sessions(journeys, raw, tmp_path):
    counted = run(raw, tmp_path, budget=TINY)
    stored, whole = open_journeys(tmp_path), journeys.shards[0]
    assert counted["shards"] == len(stored.shards) > 1
    seen = []
    for number, shard in enumerate(stored.shards):
        users = np.load(shard_folder(tmp_path, number) / "user.npy")
        assert np.array_equal(naive_inttravel.shard_of(users, len(stored.shards)), np.full(len(users), number))
        for index, user in enumerate(users - 1):  # written as 1, 2, …
            here, there = slice(*shard.offsets[index : index + 2]), slice(*whole.offsets[user : user + 2])
            assert np.array_equal(shard.profile[index], whole.profile[user])
            for name in FIELDS:
                assert np.array_equal(getattr(shard, name)[here], getattr(whole, name)[there])
        seen += users.tolist()
    assert sorted(seen) == list(range(1, 121))


def write_random_tables(folder: Path, choose: random.Random) -> None:
    """Small tables with everything that is allowed: ties, empty fields, parts, gzip, CRLF, columns in another order."""
    ids = choose.sample(range(1, 10**12), choose.randint(1, 12))
    cells, regions = [choose.randrange(10**8) for _ in range(3)], [0, 7, 3000]

    def some(values, empty: float = 0.2) -> str:
        return "" if choose.random() < empty else str(choose.choice(values))

    places = [[poi, round(choose.random(), 6), some(cells), some(range(5)), some(regions)] for poi in ids]
    listed = choose.randint(1, len(places))
    by_cell: dict[str, list] = {}
    for place in choose.sample(places, len(places)):
        if place[2]:
            by_cell.setdefault(place[2], []).append(",".join(map(str, (place[0], place[1], *place[3:]))))
    known = {place[0] for place in places[:listed]} | {place[0] for place in places if place[2]}
    users = [choose.randrange(-5, 10**10) for _ in range(choose.randint(1, 6))]
    minutes = [choose.randrange(0, 90) for _ in range(20)]
    actions = [
        [
            choose.choice(users),
            choose.choice(minutes) * 60_000,
            some((0, 1, 2, 3, 7)),
            some(sorted(known)[:4], 0.1),
            some([*cells, 5]),
            some([*regions, 9]),
            some(range(20)),
            some(range(6), 0.5),
            some(sorted(known), 0.9),
        ]
        for _ in range(choose.randint(1, 80))
    ]
    profiles = [[user, *(some(range(4), 0.5) for _ in range(6))] for user in {*choose.sample(users, 1), *users[:3], 77}]
    tables = (
        (USER_ACTION, actions),
        (USER_PROFILE, profiles),
        (POI_INFO, places[:listed]),
        (POI_BY_CELL, [[cell, ";".join(items) + choose.choice(["", ";"])] for cell, items in by_cell.items()]),
    )
    for table, rows in tables:
        cut = choose.randint(0, len(rows)) if choose.random() < 0.5 else len(rows)
        for part, some_rows in enumerate((rows[:cut], rows[cut:])):
            if some_rows or (not part and table is not POI_BY_CELL):
                write_part(folder / f"{table.name}-{part}", table.columns, some_rows, choose)


def write_part(path: Path, columns: tuple[str, ...], rows: list[list], choose: random.Random) -> None:
    header = choose.random() < 0.5 or not rows
    order = choose.sample(range(len(columns)), len(columns)) if header else list(range(len(columns)))
    lines = [[columns[k] for k in order]] if header else []
    lines += [[row[k] for k in order] for row in rows]
    end = choose.choice(["\n", "\r\n"])
    text = "".join("\t".join(map(str, line)) + end for line in lines).encode()
    if choose.random() < 0.3:
        path.with_suffix(".tsv.gz").write_bytes(gzip.compress(text))
    else:
        path.with_suffix(choose.choice([".tsv", ".csv", ".txt"])).write_bytes(text)


@pytest.mark.usefixtures("one_database")
@pytest.mark.parametrize("seed", thinned(range(40), lambda seed: seed < 15))
def test_equals_the_plain_preparation(seed, tmp_path):
    choose = random.Random(seed)
    source, target = tmp_path / "raw", tmp_path / "out"
    source.mkdir()
    write_random_tables(source, choose)
    expected = naive_inttravel.prepare(source)
    budget = Budget(
        chunk_bytes=choose.choice([200, 1_000, 10_000]),
        shard_rows=choose.choice([3, 20, 1000]),
    )
    counted = run(source, target, budget=budget)
    data = open_journeys(target)

    sizes = expected["sizes"]
    assert (data.sizes.cells, data.sizes.regions) == (sizes["geographic_id"], sizes["administrative_region_id"])
    assert (data.sizes.weathers, data.sizes.modes) == (sizes["weather"], sizes["travel_mode"])
    assert (data.sizes.actions, data.sizes.categories) == (sizes["action_type"], sizes["category_id"])
    assert data.sizes.profile == tuple(sizes[f"profile_feature_{k}"] for k in range(1, 7))
    places = data.places
    rows = zip(places.score, places.cell, places.category, places.region, strict=True)
    assert dict(zip(places.ids.tolist(), rows, strict=True)) == expected["places"]
    for code in range(data.sizes.cells):
        members = places.cell_places[places.cell_offsets[code] : places.cell_offsets[code + 1]]
        assert np.array_equal(members, np.flatnonzero(places.cell == code))

    found, times = {}, []
    for number, shard in enumerate(data.shards):
        users = np.load(shard_folder(target, number) / "user.npy").tolist()
        times += shard.time.tolist()
        for index, user in enumerate(users):
            here = slice(*shard.offsets[index : index + 2])
            sessions = list(zip(*(getattr(shard, name)[here].tolist() for name in FIELDS), strict=True))
            found[user] = (tuple(shard.profile[index].tolist()), sessions)
    assert found == expected["users"]
    assert counted["sessions"] == len(times)
    for edge, share in ((data.valid_from, 0.8), (data.test_from, 0.9)):
        before = np.array(sorted(times))
        assert (before < edge).sum() >= share * len(times) > (before < edge - 8).sum()  # bins are 6 ms wide or less


@pytest.mark.parametrize(
    "budget", [TINY, Budget(chunk_bytes=2_000, shard_rows=2_000), Budget(1 << 27, 1, 10**6, 2_000)]
)
def test_sizes_of_chunks_and_memory_change_nothing(raw, at_once, tmp_path, budget):
    run(raw, tmp_path, budget=budget)
    assert digest(tmp_path) == digest(at_once)


class StoppedError(Exception):
    pass


@pytest.mark.usefixtures("one_database")
@pytest.mark.parametrize("zipped", [False, True])
def test_stopped_after_every_step_it_goes_on_to_the_same_bytes(raw, tmp_path, zipped):
    if zipped:  # the place to resume is in bytes of the text, with its own line breaks
        (tmp_path / "raw").mkdir()
        for file in raw.iterdir():
            text = file.read_bytes().replace(b"\n", b"\r\n")
            (tmp_path / "raw" / f"{file.name}.gz").write_bytes(gzip.compress(text))
        raw = tmp_path / "raw"
    budget = dataclasses.replace(TINY, chunk_bytes=8_000)
    run(raw, tmp_path / "whole", budget=budget)
    steps, stops = [], 0

    def stop_at_something_new(*step):
        if step not in steps:
            steps.append(step)
            raise StoppedError

    while True:
        try:
            run(raw, tmp_path / "stopped", budget=budget, progress=stop_at_something_new)
            break
        except StoppedError:
            stops += 1
            with pytest.raises(DataError, match=r"not finished.*intbmoe prepare inttravel SOURCE"):
                open_journeys(tmp_path / "stopped")
    assert stops > 10
    assert digest(tmp_path / "stopped") == digest(tmp_path / "whole")


@pytest.mark.usefixtures("one_database")
@pytest.mark.parametrize(("owner", "function"), [(os, "replace"), (np, "save")])
def test_stopped_in_the_middle_of_writing_it_goes_on_to_the_same_bytes(
    raw, whole, tmp_path, monkeypatch, owner, function
):
    original, calls, written = getattr(owner, function), 0, set()

    def stopping(file, *rest):
        """Stops the first time each file is written, half of the times before the write and half after."""
        nonlocal calls
        place = re.sub(r"\.[0-9a-z_]{8}\.part", "", str(file))  # folders have temporary names while they are filled
        if place in written:
            return original(file, *rest)
        written.add(place)
        calls += 1
        if calls % 2:
            original(file, *rest)
        raise StoppedError

    monkeypatch.setattr(owner, function, stopping)
    stops = 0
    while True:
        try:
            run(raw, tmp_path / "stopped", budget=TINY)
            break
        except StoppedError:
            stops += 1
    assert stops > 5
    assert digest(tmp_path / "stopped") == digest(whole[0])


def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(raw, whole, tmp_path):
    (straight, duration), choose = whole, random.Random(0)
    context, kills, finished = multiprocessing.get_context("fork"), 0, False
    while not finished:
        child = context.Process(target=run, args=(raw, tmp_path / "killed", False, TINY))
        child.start()
        child.join(choose.uniform(0.01, 0.3) * duration if kills < 12 else None)
        finished = not child.is_alive()
        if not finished:
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            kills += 1
    assert child.exitcode == 0
    assert kills > 2
    assert digest(tmp_path / "killed") == digest(straight)


def test_finished_work_is_not_done_again(raw, tmp_path, monkeypatch):
    first = run(raw, tmp_path)
    monkeypatch.setattr(np, "save", None)  # every write now fails
    assert run(raw, tmp_path) == first


def test_other_tables_do_not_go_into_a_finished_folder(journeys, raw, tmp_path):
    run(raw, tmp_path / "out")
    write_tables(make_journeys(users=3, weeks=4, sessions=(2, 5), side=2), tmp_path / "raw")
    with pytest.raises(DataError, match=r"was prepared from other tables: delete it"):
        run(tmp_path / "raw", tmp_path / "out")


def stop_at_sorting(stage, *_):
    if "sorting" in stage:
        raise StoppedError


def test_lost_chunks_are_made_again(raw, whole, tmp_path):
    with pytest.raises(StoppedError):
        run(raw, tmp_path / "out", budget=TINY, progress=stop_at_sorting)
    chunks = sorted((tmp_path / "out" / "work" / "user_action" / "user_action.tsv").glob("*"))
    assert len(chunks) > 4
    shutil.rmtree(chunks[0])
    (chunks[3] / "note.json").unlink()
    run(raw, tmp_path / "out", budget=TINY)
    assert digest(tmp_path / "out") == digest(whole[0])


def test_a_table_changed_after_an_interruption_is_read_again(journeys, whole, tmp_path):
    write_tables(make_journeys(users=50, weeks=4, sessions=(10, 40), side=3), tmp_path / "raw")
    with pytest.raises(StoppedError):
        run(tmp_path / "raw", tmp_path / "out", budget=TINY, progress=stop_at_sorting)
    write_tables(journeys, tmp_path / "raw")
    run(tmp_path / "raw", tmp_path / "out", budget=TINY)
    assert digest(tmp_path / "out") == digest(whole[0])


def test_folders_prepared_before_departures_and_locations_were_there_still_open(raw, tmp_path):
    run(raw, tmp_path)
    for name in ("places/names", "places/longitude", "places/latitude", "shards/00000/depart"):
        (tmp_path / f"{name}.npy").unlink()
    data = open_journeys(tmp_path)
    assert (data.places.longitude, data.places.names, data.shards[0].depart) == (None, None, None)
    JourneyReader(data, 8)
    with pytest.raises(DataError, match=r"do not say when users set out.*repeat intbmoe prepare inttravel"):
        JourneyReader(data, 8, departures=True)


def test_folders_that_cannot_be_opened_say_what_to_do(raw, tmp_path):
    with pytest.raises(DataError, match=r"holds no prepared journeys.*intbmoe prepare inttravel SOURCE"):
        open_journeys(tmp_path / "nothing")
    run(raw, tmp_path)
    meta = tmp_path / "meta.json"
    content = read_json(meta)
    write_json(meta, content | {"format": 99})
    with pytest.raises(DataError, match=r"has format 99.*delete the folder and repeat intbmoe prepare inttravel"):
        open_journeys(tmp_path)
    write_json(meta, content | {"shards": 2})
    with pytest.raises(DataError, match=r"00001 is missing.*repeat intbmoe prepare inttravel"):
        open_journeys(tmp_path)


def test_a_missing_table_is_named(raw, tmp_path):
    (tmp_path / "user_action.csv").write_bytes((raw / "user_action.tsv").read_bytes())
    with pytest.raises(DataError, match=r"has no file poi_info\.csv"):
        run(tmp_path, tmp_path / "out")
    with pytest.raises(DataError, match=r"nowhere is not a folder"):
        run(tmp_path / "nowhere", tmp_path / "out")
