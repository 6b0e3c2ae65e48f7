"""Both forms of a file become the same sequences, and every kind of error is reported with its place."""

import numpy as np
import pytest
from fake_items import check_ins, item_lists, sequences, write

from intbmoe.tasks import DataError
from intbmoe.tasks.sequences.source import read_check_ins, read_item_lists

HISTORIES = ([3, 1, 3, 0], [2], [4, 4, 2])


@pytest.fixture
def file(tmp_path):
    return tmp_path / "some.npz"


@pytest.mark.parametrize(("read", "make"), [(read_check_ins, check_ins), (read_item_lists, item_lists)])
def test_both_forms_become_the_same_sequences(file, read, make):
    found = read(write(file, make(*HISTORIES)), 5)
    expected = sequences(*HISTORIES)
    assert found.items.tolist() == expected.items.tolist()
    assert found.offsets.tolist() == expected.offsets.tolist() == [0, 4, 5, 8]
    assert found.item_count == 5
    assert found.items.dtype == found.offsets.dtype == np.int64


def test_users_without_an_event_leave_no_trace_among_check_ins_and_equal_times_keep_their_order(file):
    arrays = check_ins(*HISTORIES)
    arrays["user"] = arrays["user"] * 10 + 5
    arrays["time"][:] = 7
    found = read_check_ins(write(file, arrays), 5)
    assert found.offsets.tolist() == [0, 4, 5, 8]
    assert found.items.tolist() == [3, 1, 3, 0, 2, 4, 4, 2]


def test_other_arrays_are_left_alone(file):
    arrays = {**check_ins(*HISTORIES), "names": np.array(["a", "b"])}
    assert len(read_check_ins(write(file, arrays), 5).items) == 8


def test_first_visits_are_counted_user_by_user():
    found = sequences([3, 1, 3, 0], [3], [0, 0, 1])
    assert found.first_visits().tolist() == [True, True, False, True, True, True, False, True]


def with_value(arrays, name, row, value):
    arrays[name][row] = value
    return arrays


def without(arrays, name):
    return {key: value for key, value in arrays.items() if key != name}


BAD_CHECK_INS = {
    "missing": (lambda a: without(a, "time"), r"the array 'time' is missing.*found 'user', 'poi'"),
    "real numbers": (lambda a: {**a, "poi": a["poi"].astype(float)}, r"'poi' is float64 of shape \(8,\)"),
    "text": (lambda a: {**a, "user": a["user"].astype(str)}, r"'user' is <U\d+ of shape \(8,\)"),
    "two dimensions": (lambda a: {**a, "time": a["time"][:, None]}, r"'time' is int64 of shape \(8, 1\)"),
    "lengths": (lambda a: {**a, "poi": a["poi"][:-1]}, r"'poi' has 7 rows and 'user' has 8"),
    "empty": (lambda a: {name: value[:0] for name, value in a.items()}, r"'user' is empty"),
    "below": (lambda a: with_value(a, "poi", 6, -1), r"'poi', row 6, is -1: expected ids from 0 to 4.*model.items=5"),
    "above": (lambda a: with_value(a, "poi", 0, 9), r"'poi', row 0, is 9: expected ids from 0 to 4"),
    "users": (lambda a: with_value(a, "user", 4, 7), r"'user', row 5, is 2: expected rows sorted by \(user"),
    "times": (lambda a: with_value(a, "time", 3, 5), r"'time', row 3, is 5: expected each user's rows sorted by time"),
    "objects": (
        lambda a: {**a, "poi": np.array([{}] * 8)},
        r"'poi' cannot be read: Object arrays.*store whole",
    ),
    "beyond": (
        lambda a: with_value({**a, "poi": a["poi"].astype(np.uint64)}, "poi", 3, 2**63),
        r"'poi', row 3, is 9223372036854775808: expected numbers of at most 9223372036854775807",
    ),
}
BAD_ITEM_LISTS = {
    "missing": (lambda a: without(a, "offsets"), r"the array 'offsets' is missing"),
    "zero": (lambda a: with_value(a, "items", 2, 0), r"'items', row 2, is 0: expected ids from 1 to 5"),
    "above": (lambda a: with_value(a, "items", 2, 6), r"'items', row 2, is 6: expected ids from 1 to 5"),
    "end": (lambda a: with_value(a, "offsets", -1, 9), r"'offsets' runs from 0 to 9: expected from 0 to 8"),
    "start": (lambda a: with_value(a, "offsets", 0, 1), r"'offsets' runs from 1 to 8"),
    "falling": (
        lambda a: with_value(a, "offsets", 1, 6),
        r"'offsets', row 2, is 5: expected offsets that never decrease",
    ),
    "unsigned": (
        lambda a: with_value({**a, "offsets": a["offsets"].astype(np.uint64)}, "offsets", 1, 6),
        r"'offsets', row 2, is 5",
    ),
}


@pytest.mark.parametrize("case", BAD_CHECK_INS)
def test_bad_check_ins_are_named(file, case):
    change, message = BAD_CHECK_INS[case]
    with pytest.raises(DataError, match=message) as error:
        read_check_ins(write(file, change(check_ins(*HISTORIES))), 5)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("case", BAD_ITEM_LISTS)
def test_bad_item_lists_are_named(file, case):
    change, message = BAD_ITEM_LISTS[case]
    with pytest.raises(DataError, match=message) as error:
        read_item_lists(write(file, change(item_lists(*HISTORIES))), 5)
    assert str(file) in str(error.value)


def test_another_number_of_items_than_the_recipes_is_an_error_with_the_right_one(file):
    with pytest.raises(DataError, match=r"'items' goes up to 5.*for this file set model.items=5"):
        read_item_lists(write(file, item_lists(*HISTORIES)), 6)
    with pytest.raises(DataError, match=r"'poi' goes up to 4.*for this file set model.items=5"):
        read_check_ins(write(file, check_ins(*HISTORIES)), 8000)


def test_no_path_no_file_and_files_of_another_kind(file, tmp_path):
    with pytest.raises(DataError, match=r"check-ins needs .*set data\.path"):
        read_check_ins(None, 5)
    with pytest.raises(DataError, match=r"some\.npz does not exist: data.path must be an \.npz file"):
        read_check_ins(str(file), 5)
    with pytest.raises(DataError, match=r"cannot be read.*expected an \.npz file"):
        read_check_ins(str(tmp_path), 5)
    file.write_text("user,poi,time\n")
    with pytest.raises(DataError, match=r"some\.npz cannot be read"):
        read_check_ins(str(file), 5)
    file.write_bytes(b"")
    with pytest.raises(DataError, match=r"some\.npz cannot be read"):
        read_check_ins(str(file), 5)
    single = tmp_path / "single.npy"
    np.save(single, np.arange(3))
    with pytest.raises(DataError, match="holds a single array"):
        read_check_ins(str(single), 5)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.95, 0.999])
def test_a_truncated_file_is_never_read_in_part(file, share):
    rng = np.random.default_rng(0)
    histories = [*rng.integers(0, 50, (40, 30)).tolist(), [49]]
    whole = write(file, check_ins(*histories))
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=r"some\.npz"):
        read_check_ins(whole, 50)


def test_a_damaged_array_is_named(file):
    rng = np.random.default_rng(0)
    histories = [*rng.integers(0, 50, (40, 30)).tolist(), [49]]
    write(file, check_ins(*histories))
    content = bytearray(file.read_bytes())
    place = content.index(b"poi.npy") + 200
    content[place : place + 40] = bytes(40)
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"the array 'poi' cannot be read.*get the file again"):
        read_check_ins(str(file), 50)
