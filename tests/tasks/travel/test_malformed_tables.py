"""Malformed rows of IntTravel's tables stop with file, row and field, or are counted and left out."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from intbmoe.tasks.errors import DataError
from intbmoe.tasks.travel.inttravel import prepare
from intbmoe.tasks.travel.rows import Budget
from intbmoe.tasks.travel.store import open_journeys
from thinned import thinned

pytest.importorskip("duckdb")
pytestmark = pytest.mark.usefixtures("one_database")


def rows(*lines: str) -> str:
    """Table rows from lines in which blanks separate fields and a dash is an empty field."""
    return "".join("\t".join("" if field == "-" else field for field in line.split()) + "\n" for line in lines)


ACTIONS = rows(
    "user_id timestamp action_type poi_id geographic_id administrative_region_id weather travel_mode via_poi_id",
    "1 1000000 2 10 500 7 2 4 -",
    "1 2000000 1 11 501 7 2 - -",
    "2 3000000 2 12 501 8 9 0 10",
    "2 4000000 3 10 - 8 9 0 -",
    "3 5000000 3 11 502 8 9 0 12",
)
PROFILES = rows("1 3 1 7 - - -", "2 - 0 1 7 - 0")
PLACES = rows(
    "poi_id normalized_score geographic_id category_id administrative_region_id",
    "12 0.5 501 4 8",
    "10 0.25 500 4 7",
    "11 1 501 0 7",
)
BY_CELL = rows("500 10,0.25,4,7", "501 11,1,0,7;12,0.5,4,8;13,0.125,4,8")
CHUNKS = [Budget(), Budget(chunk_bytes=60)]


def write(
    folder: Path, actions=ACTIONS, profiles=PROFILES, places=PLACES, by_cell=BY_CELL, locations: str | None = None
) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in (
        ("user_action.csv", actions),
        ("user_info.csv", profiles),  # the name it has in the published set
        ("poi_info.csv", places),
        ("poi_info_groupby_geographic.csv", by_cell),
    ):
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    if locations is not None:
        (folder / "poi_location.csv").write_text(locations)
    return folder


def run(source: Path, target: Path, skip_bad: bool = False, budget: Budget | None = None):
    return prepare(source, target, skip_bad=skip_bad, progress=lambda *_: None, budget=budget)


def test_the_tables_are_good(tmp_path):
    counted = run(write(tmp_path / "raw"), tmp_path / "out")
    assert counted == {"rows": 5, "sessions": 5, "users": 3, "places": 4, "shards": 1}
    data = open_journeys(tmp_path / "out")
    assert data.places.ids.tolist() == [10, 11, 12, 13]
    assert data.shards[0].via.tolist() == [-1, -1, 0, -1, 2]
    assert data.shards[0].profile[2].tolist() == [0] * 6  # user 3 has none


def change(text: str, row: int, field: int, value: str | None) -> str:
    """``text`` with a field (from 0) of a row (from 1) replaced, or without that field and all after it."""
    lines = text.split("\n")
    fields = lines[row - 1].split("\t")
    lines[row - 1] = "\t".join(fields[:field] if value is None else [*fields[:field], value, *fields[field + 1 :]])
    return "\n".join(lines)


BLANK_LINE = ACTIONS.replace("2\t3000", "\n2\t3000")
MALFORMED_ACTIONS = [
    (change(ACTIONS, 3, 7, None), "row 3, field travel_mode is missing: 7 fields, expected 9", "missing column"),
    (BLANK_LINE, "row 4, field timestamp is missing: 1 fields, expected 9", "missing column"),
    (change(ACTIONS, 6, 8, "12\t13"), "row 6, extra field: 10 fields, expected 9", "extra column"),
    (change(ACTIONS, 4, 1, "noon"), "row 4, field timestamp: 'noon' is not a number", "not a number"),
    (change(ACTIONS, 4, 6, "2.5"), "row 4, field weather: '2.5' is not a number", "not a number"),
    (change(ACTIONS, 4, 6, "0x9"), "row 4, field weather: '0x9' is not a number", "not a number"),
    (change(ACTIONS, 4, 6, " 9"), "row 4, field weather: ' 9' is not a number", "not a number"),
    (change(ACTIONS, 4, 6, "9" * 20), "row 4, field weather: '9{20}' is not a number", "not a number"),
    (change(ACTIONS, 4, 6, "9-"), "row 4, field weather: '9-' is not a number", "not a number"),
    (change(ACTIONS, 4, 6, "\x00é"), r"row 4, field weather: '\\x00é' is not a number", "not a number"),
    (change(ACTIONS, 2, 0, ""), "row 2, field user_id: an empty field where a value is needed", "empty field"),
    (change(ACTIONS, 2, 1, ""), "row 2, field timestamp: an empty field where", "empty field"),
    (change(ACTIONS, 5, 1, "-7"), "row 5, field timestamp: -7 is negative", "negative timestamp"),
    (change(ACTIONS, 5, 3, "99"), "row 5, field poi_id: 99 is not a place", "unknown place"),
    (change(ACTIONS, 6, 8, "99"), "row 6, field via_poi_id: 99 is not a place", "unknown place"),
    (ACTIONS[:-7], "row 6: the file is cut off here", "file cut off"),
    (ACTIONS[:-1], "row 6: the file is cut off here .*line break", "file cut off"),
]
MALFORMED_PROFILES = [
    (change(PROFILES, 2, 6, None), "row 2, field profile_feature_6 is missing", "missing column"),
    (change(PROFILES, 2, 4, "old"), "row 2, field profile_feature_4: 'old' is not a number", "not a number"),
    (
        PROFILES + rows("1 - - - - - -"),
        "row 3, field user_id: user 1 already has a profile in .*row 1",
        "repeated user",
    ),
]
MALFORMED_PLACES = [
    (change(PLACES, 2, 1, "good"), "row 2, field normalized_score: 'good' is not a number", "not a number"),
    (change(PLACES, 2, 1, "nan"), "row 2, field normalized_score: 'nan' is not a number", "not a number"),
    (change(PLACES, 2, 1, "1e60"), "row 2, field normalized_score: inf is not finite", "not a number"),
    (change(PLACES, 2, 1, ""), "row 2, field normalized_score: an empty field", "empty field"),
    (PLACES + rows("10 0.5 500 4 7"), "row 5, field poi_id: place 10 is already in .*row 3", "repeated place"),
]
MALFORMED_CELLS = [
    (change(BY_CELL, 2, 1, "11,1,0;12,0.5,4,8"), "row 2, field poi_info: '11,1,0' does not have 4", "malformed place"),
    (change(BY_CELL, 2, 1, "11,1,x,7"), "row 2, field poi_info: '11,1,x,7' does not consist of", "malformed place"),
    (change(BY_CELL, 1, 0, "501"), "row 1, field geographic_id: 501, but place 10 has 500", "differs from poi_info"),
    (BY_CELL + rows("502 13,0.125,4,8"), "row 3, field geographic_id: place 13 has 502, but 501", "repeated place"),
]
LOCATIONS = rows("poi_id longitude latitude name", "10 179.5 -16.5 Café", "13 -179 90 -", "12 - - x")
MALFORMED_LOCATIONS = [
    (change(LOCATIONS, 2, 1, "181"), "row 2, field longitude: place 10 lies beyond 180°", "not on Earth"),
    (
        change(LOCATIONS, 2, 2, ""),
        "row 2, field longitude: place 10 has a longitude or",
        "half a location",
    ),
    (change(LOCATIONS, 3, 2, "north"), "row 3, field latitude: 'north' is not a number", "not a number"),
    (change(LOCATIONS, 4, 0, "99"), "row 4, field poi_id: place 99 is not a place of poi_info", "unknown place"),
    (change(LOCATIONS, 4, 3, "x" * 201), "row 4, field name: 'x+…' is longer than 200 bytes", "long name"),
    (LOCATIONS + rows("10 - - y"), "row 5, field poi_id: place 10 is already in .*row 2", "repeated place"),
]
MALFORMED_ELSEWHERE = [
    *(
        ("locations", "poi_location.csv", text, message, f"poi_location: {kind}")
        for text, message, kind in MALFORMED_LOCATIONS
    ),
    *(
        ("profiles", "user_info.csv", text, message, f"user_profile: {kind}")
        for text, message, kind in MALFORMED_PROFILES
    ),
    *(("places", "poi_info.csv", text, message, f"poi_info: {kind}") for text, message, kind in MALFORMED_PLACES),
    *(
        ("by_cell", "poi_info_groupby_geographic.csv", text, message, f"poi_info_groupby_geographic: {kind}")
        for text, message, kind in MALFORMED_CELLS
    ),
]


# With a single chunk, rows are checked in the same way, and only their numbers are simpler.
@pytest.mark.parametrize(
    ("text", "message", "kind", "budget"),
    thinned(
        [(*case, budget) for case in MALFORMED_ACTIONS for budget in CHUNKS],
        lambda text, message, kind, budget: budget is CHUNKS[1] or text == MALFORMED_ACTIONS[0][0],
    ),
    ids=range(2 * len(MALFORMED_ACTIONS)),
)
def test_a_malformed_action_stops_or_is_left_out(tmp_path, text, message, kind, budget):
    source = write(tmp_path / "raw", actions=text)
    with pytest.raises(DataError, match=rf"{source}/user_action.csv, {message}.*--skip-bad"):
        run(source, tmp_path / "out", budget=budget)
    counted = run(source, tmp_path / "out", skip_bad=True, budget=budget)
    assert counted[f"user_action: {kind}"] == 1
    assert counted["rows"] == (5 if text is BLANK_LINE else 4)


@pytest.mark.parametrize(
    ("table", "file", "text", "message", "kind"), MALFORMED_ELSEWHERE, ids=range(len(MALFORMED_ELSEWHERE))
)
def test_other_malformed_rows_stop_or_are_left_out(tmp_path, table, file, text, message, kind):
    source = write(tmp_path / "raw", **{table: text})
    with pytest.raises(DataError, match=rf"{source}/{file}, {message}.*--skip-bad"):
        run(source, tmp_path / "out")
    assert run(source, tmp_path / "out", skip_bad=True)[kind] == 1


def test_places_carry_coordinates_and_names_where_they_are_given(tmp_path):
    run(write(tmp_path / "raw", locations=LOCATIONS), tmp_path / "out")
    places = open_journeys(tmp_path / "out").places  # 10, 11, 12, 13
    assert [name.decode() for name in places.names.tolist()] == ["Café", "", "x", ""]
    assert np.array_equal(places.longitude, [179.5, np.nan, np.nan, -179], equal_nan=True)
    assert np.array_equal(places.latitude, [-16.5, np.nan, np.nan, 90], equal_nan=True)


def test_several_malformed_rows_are_all_counted(tmp_path):
    text = change(change(change(ACTIONS, 2, 1, "x"), 3, 1, "y"), 5, 3, "99")
    counted = run(write(tmp_path / "raw", actions=text), tmp_path / "out", skip_bad=True)
    assert (counted["user_action: not a number"], counted["user_action: unknown place"]) == (2, 1)
    assert (counted["rows"], counted["users"]) == (2, 2)
    again = run(write(tmp_path / "raw", actions=text), tmp_path / "out", skip_bad=True)
    assert again == counted


def test_what_was_skipped_stops_when_it_must_not_be(tmp_path):
    """Chunks finished with --skip-bad are not used without it."""
    source = write(tmp_path / "raw", actions=change(ACTIONS, 4, 1, "noon"))

    def stop_at_sorting(stage, *_):
        if "sorting" in stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source, tmp_path / "out", skip_bad=True, progress=stop_at_sorting)
    with pytest.raises(DataError, match="row 4, field timestamp"):
        run(source, tmp_path / "out")
    assert run(source, tmp_path / "out", skip_bad=True)["user_action: not a number"] == 1


def test_a_missing_column_of_the_header_is_named(tmp_path):
    with pytest.raises(DataError, match=r"user_action.csv, row 1, field weather: the header has no such column"):
        run(write(tmp_path / "raw", actions=ACTIONS.replace("weather\t", "")), tmp_path / "out")


def test_columns_that_are_not_known_are_not_read(tmp_path):
    wider = "\n".join(f"{'x' if not row else 'a b'}\t{line}" for row, line in enumerate(PLACES.rstrip().split("\n")))
    run(write(tmp_path / "raw"), tmp_path / "plain")
    run(write(tmp_path / "wide", places=wider + "\n"), tmp_path / "out")
    for name in ("ids", "score", "cell", "category", "region"):
        plain, wide = (getattr(open_journeys(tmp_path / folder).places, name) for folder in ("plain", "out"))
        assert np.array_equal(plain, wide)


@pytest.mark.parametrize("budget", [Budget(), Budget(chunk_bytes=6_000)])
def test_a_cut_gzip_file_stops_or_gives_what_there_is(tmp_path, budget):
    text = rows(*(f"{user} {user * 977 % 100_003} 2 10 500 7 2 4 -" for user in range(2000)))
    source = write(tmp_path / "raw")
    (source / "user_action.csv").write_bytes(gzip.compress(text.encode())[:-3000])
    with pytest.raises(DataError, match=r"user_action.csv, row \d+: the file is cut off here \(.*end-of-stream"):
        run(source, tmp_path / "out", budget=budget)
    counted = run(source, tmp_path / "out", skip_bad=True, budget=budget)
    assert counted["user_action: file cut off"] == 1
    assert 100 < counted["rows"] < 2000


def test_an_empty_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"poi_info.csv is empty"):
        run(write(tmp_path / "raw", places=""), tmp_path / "out")
    header = ACTIONS.split("\n")[0] + "\n"
    with pytest.raises(DataError, match=r"user_action.csv holds no action"):
        run(write(tmp_path / "raw", actions=header), tmp_path / "out")


def test_numbers_written_in_unusual_ways_are_the_same_on_both_paths(tmp_path):
    """A malformed row sends its block down the slow path, which must read the good rows as the fast one does."""
    text = change(change(ACTIONS, 2, 0, "0001"), 3, 0, str(2**62 + 1))
    run(write(tmp_path / "raw", actions=text), tmp_path / "fast")
    run(write(tmp_path / "raw", actions=text + "x\n"), tmp_path / "slow", skip_bad=True)
    users = [np.load(tmp_path / name / "shards/00000/user.npy").tolist() for name in ("fast", "slow")]
    assert users[0] == users[1] == [1, 2, 3, 2**62 + 1]
