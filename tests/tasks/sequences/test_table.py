"""Any table of user, item and time: columns, times, names in answers, and the mistakes people make."""

import gzip
from dataclasses import replace
from types import SimpleNamespace

import duckdb
import numpy as np
import pytest
import torch

from intbmoe.recipes import load_recipe
from intbmoe.tasks import DataError, make_task
from intbmoe.tasks.serving import RequestError

ROWS = [("bob", "gym", 30), ("ann", "cafe", 11), ("ann", "gym", 10), ("ann", "park", 12), ("ann", "cafe", 12.5)]
ROWS += [("bob", "cafe", 20), ("bob", "home", 30)]
"""In the order of the file: bob's last two at the same time."""


def write(file, rows=ROWS, header=("user", "item", "time"), separator=","):
    file.write_text("\n".join(separator.join(map(str, row)) for row in (header, *rows)) + "\n", encoding="utf-8")
    return file


def task_of(path, items=None, **data):
    recipe = load_recipe("sequences")
    model = replace(recipe.model, items=items, length=4, dim=8, hidden=8, depth=1)
    return make_task(replace(recipe, model=model, data=replace(recipe.data, path=path and str(path), **data)))


def histories(task):
    sequences = task.sequences
    named = [sequences.names[item] for item in sequences.items]
    return [named[start:end] for start, end in zip(sequences.offsets[:-1], sequences.offsets[1:], strict=True)]


EXPECTED = [["gym", "cafe", "park", "cafe"], ["cafe", "gym", "home"]]


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("a.csv", ";"), ("a.tsv", "\t"), ("a.txt", "\t")])
def test_rows_are_sorted_by_user_and_time(tmp_path, name, separator):
    task = task_of(write(tmp_path / name, separator=separator))
    assert task.resolve().model.items == 4
    assert histories(task) == EXPECTED
    assert task.sequences.names == ("cafe", "gym", "home", "park")


def test_parquet_is_read_with_its_types(tmp_path):
    file = tmp_path / "a.parquet"
    values = ", ".join(
        f"('{user}', '{item}', TIMESTAMP '2024-01-01' + INTERVAL {time} SECOND)" for user, item, time in ROWS
    )
    duckdb.sql(f"COPY (SELECT * FROM (VALUES {values}) AS t(reviewerID, asin, date)) TO '{file}'")
    assert histories(task_of(file)) == EXPECTED


def test_times_may_be_dates_in_several_zones(tmp_path):
    rows = [
        ("a", "third", "2024-05-31 12:00:00"),
        ("a", "first", "2024-05-31T12:00:00+02:00"),
        ("a", "last", "2024-06-01"),
    ]
    rows += [("a", "second", "2024-05-31T11:00:00Z")]
    assert histories(task_of(write(tmp_path / "a.csv", rows))) == [["first", "second", "third", "last"]]


def test_columns_are_found_by_usual_names_or_given(tmp_path):
    rows = [(time, 5, user, item) for user, item, time in ROWS]
    usual = write(tmp_path / "usual.csv", rows, ("Timestamp", "rating", "userId", "movie_id"))
    assert histories(task_of(usual)) == EXPECTED
    odd = write(tmp_path / "odd.csv", rows, ("wann", "rating", 'wer "da"', "was"))
    assert histories(task_of(odd, user='wer "da"', item="was", time="wann")) == EXPECTED


def test_quotes_marks_and_gzip(tmp_path):
    rows = [("a", '"b, c"', 1), ("a", '"x ""y"""', 2), ("a", "#b", 3), ("a", "é", 4)]
    plain = write(tmp_path / "a.csv", rows)
    expected = [["b, c", 'x "y"', "#b", "é"]]
    assert histories(task_of(plain)) == expected
    packed = tmp_path / "b.csv.gz"
    packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + plain.read_bytes().replace(b"\n", b"\r\n")))
    assert histories(task_of(packed)) == expected


def test_numbers_as_names_are_in_the_order_of_numbers(tmp_path):
    rows = [("1", item, time) for time, item in enumerate((10, 9, 100, 9))]
    assert task_of(write(tmp_path / "a.csv", rows)).sequences.names == ("9", "10", "100")


def test_names_survive_into_requests_answers_and_pictures(tmp_path):
    task = task_of(write(tmp_path / "a.csv"))
    task.resolve()
    about = task.catalogue().about
    assert about == {"first_id": 0, "items": ["cafe", "gym", "home", "park"]}
    torch.manual_seed(0)
    model = task.make_model().eval()
    artifact = SimpleNamespace(recipe=task.recipe, catalogue=about, model=lambda device: model)
    predictor = task.find_predictor().load(artifact, "cpu")
    assert predictor.request_schema["examples"][0]["history"] == ["cafe", "gym", "home"]
    assert [request["history"] for request in task.golden_requests(predictor, 2)] == [["gym", "cafe"], ["cafe"]]
    encoded = predictor.encode({"history": ["park", "gym"], "explain": True})
    assert encoded.payload["items"].tolist() == [3, 1]
    [answer] = predictor.answer([encoded])
    assert {result["id"] for result in answer["results"]} == {"cafe", "gym", "home", "park"}
    with torch.no_grad():
        scores = model(torch.tensor([[3, 1]]))[0]
    best = about["items"][int(scores.argmax())]
    assert answer["results"][0] == {"id": best, "score": pytest.approx(scores.max().item())}
    assert answer["tokens"] == ["item park", "item gym"]
    with pytest.raises(RequestError, match=r"history\[1\].*one of the 4 items that the model was trained on"):
        predictor.encode({"history": ["park", "moon"]})
    shown = task.shown(task.split("valid"))
    batch = task.split("valid").batch([0], 0, 0)
    assert [token and token.text for token in shown.describe(batch, 0, 0).tokens] == ["gym", "cafe", None, None]


def test_items_that_are_numbers_may_be_asked_for_as_numbers(tmp_path):
    rows = [("1", item, time) for time, item in enumerate((10, 9, 100, 9))]
    task = task_of(write(tmp_path / "a.csv", rows))
    task.resolve()
    predictor = task.find_predictor().encoder(SimpleNamespace(recipe=task.recipe, catalogue=task.catalogue().about))
    assert predictor.encode({"history": [100, "9"]}).payload["items"].tolist() == [2, 0]
    with pytest.raises(RequestError):
        predictor.encode({"history": [True]})


def test_changed_rows_are_another_fingerprint_and_are_refused(tmp_path):
    file = write(tmp_path / "a.csv")
    recipe = task_of(file).resolve()
    assert make_task(recipe).resolve() == recipe
    shuffled = write(tmp_path / "b.csv", [ROWS[place] for place in (5, 0, 6, 4, 3, 2, 1)])
    assert task_of(shuffled).resolve().data.fingerprint == recipe.data.fingerprint
    write(file, [*ROWS, ("ann", "gym", 40)])
    with pytest.raises(DataError, match=r"a\.csv is not what this run was trained on"):
        make_task(recipe).split("valid")


MANY = [(user, item, time) for user in "abcd" for time, item in enumerate("xyzx")]


def changed(row, column, value):
    rows = [list(one) for one in MANY]
    rows[row][column] = value
    return rows


DAYS = [(user, item, f"2024-01-0{time + 1}") for user, item, time in MANY]
ALONE = [(f"user{number}", item, time) for number, (_, item, time) in enumerate(MANY)]


@pytest.mark.parametrize(
    ("rows", "header", "data", "message"),
    [
        ([], ("user", "item", "time"), {}, r"a\.csv has no row below the names"),
        (MANY, ("who", "item", "time"), {}, r"no column with a usual name for the user, only who, item, time: name it"),
        (MANY[1:], MANY[0], {}, "The first line must have the columns' names"),
        (MANY, ("user", "", "time"), {}, r"a\.csv, line 1: '' is empty or used twice"),
        (
            MANY,
            None,
            {"item": "itemm"},
            r"'itemm' \(data\.item\), only user, item, time; did you mean 'item'",
        ),
        (
            changed(5, 2, "noon"),
            None,
            {},
            r"csv, line 7: the time 'noon' \(column 'time'\) is not a number, as the other times are",
        ),
        (
            [*DAYS, ("a", "x", "31.12.24")],
            None,
            {},
            r"csv, line 18: the time '31\.12\.24' .* is not a date such as 20",
        ),
        (
            [(*row[:2], "late") for row in MANY],
            None,
            {},
            r"line 2: the time 'late' .* is not a number or a date such",
        ),
        (changed(2, 2, "nan"), None, {}, r"line 4: the time 'nan'"),
        (changed(3, 1, ""), None, {}, r"a\.csv, line 5: the column 'item' is empty: expected one in every row"),
        (ALONE, None, {}, r"a\.csv leaves nothing to evaluate: expected users with 3 events or more"),
        ([row for row in MANY if row[2] < 3], None, {}, r"a\.csv leaves nothing to train on"),
        (changed(1, 2, "1,7"), None, {}, r"a\.csv cannot be read: .*Line: 3"),
    ],
)
def test_mistakes_are_named(tmp_path, rows, header, data, message):
    file = write(tmp_path / "a.csv", rows, header or ("user", "item", "time"))
    with pytest.raises(DataError, match=message):
        task_of(file, **data).resolve()


def test_paths_and_settings_that_do_not_fit(tmp_path):
    with pytest.raises(DataError, match=r"sequences needs a \.csv.*: set data\.path"):
        task_of(None).resolve()
    with pytest.raises(DataError, match=r"a\.csv does not exist: data\.path must be a \.csv, \.tsv or \.parquet file"):
        task_of(tmp_path / "a.csv").resolve()
    np.savez(tmp_path / "a.npz", user=[1])
    with pytest.raises(DataError, match=r"a\.npz ends in '\.npz': data\.path must be a \.csv"):
        task_of(tmp_path / "a.npz").resolve()
    (tmp_path / "a").touch()
    with pytest.raises(DataError, match=r"a has no suffix: data\.path must be a \.csv"):
        task_of(tmp_path / "a").resolve()
    with pytest.raises(DataError, match="is a folder with no table"):
        task_of(tmp_path).resolve()
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read"):
        task_of(tmp_path / "a.parquet").resolve()
    (tmp_path / "a.parquet").unlink()
    (tmp_path / "a.csv").write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.csv is empty"):
        task_of(tmp_path / "a.csv").resolve()
    write(tmp_path / "a.csv")
    assert task_of(tmp_path).resolve().model.items == 4  # the only table in a folder
    with pytest.raises(DataError, match=r"a\.csv gives model\.items=4, not 7: set it to 4"):
        task_of(tmp_path / "a.csv", items=7).resolve()
    with pytest.raises(ValueError, match="user='who' is not allowed: only source='table' reads user"):
        replace(load_recipe("yelp").data, user="who")
    with pytest.raises(ValueError, match=r"model\.items comes from the data"):
        task_of(tmp_path / "a.csv").make_model()
