"""Windows of journeys: the split by time, targets once, candidates, codes, and nothing that depends on the batch."""

from dataclasses import fields, replace
from datetime import UTC, datetime

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_journeys import HOUR, PLACES, fake_journeys, fake_places
from intbmoe.tasks.base import SPLITS
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.travel.candidates import Candidates, session_keys
from intbmoe.tasks.travel.examples import JourneyExamples, JourneyReader, place_codes
from intbmoe.tasks.travel.windows import find_windows, split_ranges

SESSIONS = 8


def examples(split, sessions=SESSIONS, data=None, **options):
    return JourneyExamples(JourneyReader(data or fake_journeys(), sessions, **options), split)


def targets_of(split, data, sessions):
    """(shard, session) of every target in the windows of a split."""
    found = []
    for number, windows in enumerate(examples(split, sessions, data).windows):
        for stop, count in zip(windows.stop.tolist(), windows.targets.tolist(), strict=True):
            found += [(number, session) for session in range(stop - count, stop)]
    return found


@given(st.lists(st.integers(0, 25), min_size=1, max_size=8), st.integers(1, 9))
@settings(deadline=None, max_examples=40)
def test_every_session_is_a_target_of_its_own_split_exactly_once(counts, sessions):
    """Nothing trained on is evaluated, nothing is evaluated twice, nothing is left out."""
    data = fake_journeys((counts, (4, 12)))
    bounds = {"train": (0, data.valid_from), "valid": (data.valid_from, data.test_from), "test": (data.test_from, 1e18)}
    for split, (start, end) in bounds.items():
        found = targets_of(split, data, sessions)
        expected = [
            (number, session)
            for number, shard in enumerate(data.shards)
            for session, time in enumerate(shard.time.tolist())
            if start <= time < end
        ]
        assert sorted(found) == expected


@given(st.lists(st.integers(0, 25), min_size=1, max_size=8), st.integers(1, 9))
@settings(deadline=None, max_examples=40)
def test_windows_stay_with_their_user_and_have_as_much_history_as_there_is(counts, sessions):
    data = replace(fake_journeys((counts,)), test_from=600 * HOUR)
    shard = data.shards[0]
    aimed = max(1, sessions // 2)
    windows = find_windows(shard, *split_ranges(data, shard, "test"), sessions, aimed)
    oldest, newest = shard.offsets[windows.user], shard.offsets[windows.user + 1]
    start = windows.stop - windows.length
    assert (windows.length <= sessions).all()
    assert (windows.targets >= 1).all()
    assert (start >= oldest).all()
    assert (windows.stop <= newest).all()
    # The first target has sessions/2 sessions before it, or all that the user has.
    history = windows.length - windows.targets
    assert ((history >= sessions - aimed) | (start == oldest)).all()


@given(st.lists(st.integers(0, 25), min_size=1, max_size=8), st.integers(1, 9))
@settings(deadline=None, max_examples=40)
def test_the_newest_session_of_each_user_is_the_test(counts, sessions):
    data = fake_journeys((counts, (4, 12)))
    expected = {split: [] for split in SPLITS}
    for number, shard in enumerate(data.shards):
        for user in range(len(shard.offsets) - 1):
            own = [(number, session) for session in range(shard.offsets[user], shard.offsets[user + 1])]
            expected["train"] += own[:-2]
            expected["valid"] += own[-2:-1]
            expected["test"] += own[-1:]
    reader = JourneyReader(data, sessions, by="newest")
    for split in SPLITS:
        windows = JourneyExamples(reader, split).windows
        found = [
            (number, session)
            for number, part in enumerate(windows)
            for stop, count in zip(part.stop.tolist(), part.targets.tolist(), strict=True)
            for session in range(stop - count, stop)
        ]
        assert sorted(found) == expected[split]


def test_no_target_of_training_comes_after_validation_begins():
    data = fake_journeys()
    for split in SPLITS:
        for number, windows in enumerate(examples(split, data=data).windows):
            time = data.shards[number].time
            last = time[windows.stop - 1]
            first = time[windows.stop - windows.targets]
            if split == "train":
                assert (last < data.valid_from).all()
            else:
                assert (first >= (data.valid_from if split == "valid" else data.test_from)).all()


def test_a_batch_says_what_the_arrays_say():
    data = fake_journeys()
    places = data.places
    one = examples("test", data=data)
    batch = one.batch(range(len(one)), 0, 0)
    row = 0
    for shard, windows in zip(data.shards, one.windows, strict=True):
        for w in range(len(windows)):
            length, stop, user = int(windows.length[w]), int(windows.stop[w]), int(windows.user[w])
            assert batch["mask"][row].tolist() == [True] * length + [False] * (SESSIONS - length)
            assert batch["profile"][row].tolist() == shard.profile[user].tolist()
            for s, i in enumerate(range(stop - length, stop)):
                when = datetime.fromtimestamp(shard.time[i] / 1000, UTC)
                scenario = batch["scenario"][row, s].tolist()
                assert scenario[:3] == [shard.cell[i], shard.region[i], shard.weather[i]]
                assert scenario[3:5] == [1 + when.hour, 1 + when.weekday()]
                minutes = (shard.time[i] - shard.time[i - 1]) / 60_000
                assert scenario[5] == (0 if i == shard.offsets[user] else 1 + int(np.log2(1 + minutes)))
                p = shard.place[i]
                codes = [0] * 4 if p < 0 else [1 + p, places.cell[p], places.category[p], places.region[p]]
                assert batch["place"][row, s].tolist()[:4] == codes
                assert batch["via"][row, s, 0] == shard.via[i] + 1
                assert batch["feedback"][row, s].tolist() == [shard.mode[i], shard.action[i]]
                target = s >= length - windows.targets[w] and p >= 0
                assert batch["targets"][row, s] == target
                if target:
                    assert torch.equal(batch["candidates"][row, s, 0], batch["place"][row, s])
                    assert (batch["candidates"][row, s, 1:, 0] != 1 + p).all()
            row += 1
    assert (batch["scenario"][~batch["mask"]] == 0).all()
    assert (batch["candidates"][~batch["targets"]] == 0).all()


def test_clocks_are_ahead_of_utc():
    here, there = examples("train").batch([0], 0, 0), examples("train", utc_offset=8).batch([0], 0, 0)
    mask = here["mask"]
    hours, later = here["scenario"][mask][:, 3], there["scenario"][mask][:, 3]
    assert torch.equal((hours - 1 + 8) % 24, later - 1)


@pytest.mark.parametrize("split", SPLITS)
def test_an_example_does_not_depend_on_the_batch_around_it(split):
    one = examples(split)
    together = one.batch(range(len(one)), 3, 7)
    for index in range(len(one)):
        alone = one.batch([index], 3, 7)
        assert all(torch.equal(together[name][index], value[0]) for name, value in alone.items())
    turned = one.batch(list(reversed(range(len(one)))), 3, 7)
    assert all(torch.equal(together[name], value.flip(0)) for name, value in turned.items())


def test_negatives_change_with_epoch_and_seed_in_training_only():
    for split in SPLITS:
        one = examples(split)
        batches = [one.batch(range(4), epoch, seed)["candidates"] for epoch, seed in ((0, 0), (1, 0), (0, 1))]
        for other in batches[1:]:
            assert torch.equal(batches[0], other) == (split != "train")


def test_a_sessions_negatives_do_not_depend_on_the_window_it_lies_in():
    short, long = examples("test", 4), examples("test", 20)
    found = []
    for one in (short, long):
        batch = one.batch(range(len(one)), 0, 0)
        rows = batch["candidates"][batch["targets"]][..., 0]
        found.append(sorted(map(tuple, rows.tolist())))
    assert found[0] == found[1]


@pytest.mark.parametrize("cell", [None, np.ones(90), np.r_[np.ones(80), np.arange(2, 12)], np.arange(90) + 1])
def test_negatives_are_distinct_and_half_of_them_neighbours(cell):
    """Cells of all sizes: one for all places, one for each place, one that holds nearly all."""
    places = fake_places(cell)
    candidates = Candidates(places)
    answers = np.repeat(np.arange(PLACES), 30)
    drawn = candidates.draw(answers, session_keys(1, 2, 3, np.arange(len(answers))))
    assert (drawn[:, 0] == answers).all()
    ordered = np.sort(drawn, 1)
    assert (ordered[:, 1:] > ordered[:, :-1]).all()
    assert ordered.min() >= 0
    assert ordered.max() < PLACES
    near = (places.cell[drawn[:, 1:]] == places.cell[answers][:, None]).sum(1)
    size = np.bincount(places.cell)[places.cell[answers]]
    assert (near == np.maximum(np.minimum(32, size - 1), 64 - (PLACES - size))).all()


def test_more_negatives_can_be_neighbours():
    """The released code draws 50 of 64 in the true place's cell."""
    places = fake_places(np.r_[np.ones(60), np.full(30, 2)])
    drawn = Candidates(places, near=50).draw(np.arange(60), session_keys(1, 2, 3, np.arange(60)))
    assert (places.cell[drawn[:, 1:]] == 1).sum(1).tolist() == [50] * 60


def test_all_places_are_drawn_equally_often():
    places = fake_places(np.arange(90) % 2 + 1)
    drawn = Candidates(places, negatives=20).draw(np.zeros(9000, int), session_keys(0, 0, 0, np.arange(9000)))
    counts = np.bincount(drawn[:, 1:].ravel(), minlength=90)
    assert counts[0] == 0
    for group, expected in ((counts[2::2], 9000 * 10 / 44), (counts[1::2], 9000 * 10 / 45)):
        assert np.abs(group - expected).max() < 5 * expected**0.5


def test_a_part_of_a_split_is_spread_over_all_of_it():
    whole = examples("test")
    part = JourneyExamples(whole.reader, "test", at_most=3)
    assert len(whole) > len(part) == 3
    taken = [i * len(whole) // 3 for i in range(3)]
    found, expected = part.batch(range(3), 0, 0), whole.batch(taken, 0, 0)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert len(JourneyExamples(whole.reader, "test", at_most=10**6)) == len(whole)


def test_too_few_places_are_an_error():
    with pytest.raises(DataError, match="there are 64 places: 64 negatives and a true one need 65"):
        Candidates(fake_places(np.ones(64)))


def test_scores_are_coded_by_their_rank_whatever_their_scale():
    places = fake_places()
    codes = place_codes(places)[1:, 4]
    order = np.argsort(places.score)
    assert (np.diff(codes[order]) >= 0).all()
    assert (codes.min(), codes.max()) == (1, 32)
    assert (place_codes(replace(places, score=places.score * 1000 - 7))[1:, 4] == codes).all()
    unknown = np.where(np.arange(PLACES) < 5, np.nan, places.score)
    assert (place_codes(replace(places, score=unknown))[1:6, 4] == 0).all()
    assert (place_codes(replace(places, score=np.ones(PLACES)))[1:, 4] > 0).all()


def test_the_index_of_a_million_users_is_made_at_once():
    """16 bytes per window and no Python object per user: 162.8 M users take 163 times as much."""
    users = 1_000_000
    shard = fake_journeys(((3,),)).shards[0]
    repeated = {f.name: np.tile(getattr(shard, f.name), users) for f in fields(shard) if f.name in ("time", "place")}
    many = replace(shard, offsets=np.arange(users + 1) * 3, **repeated)
    windows = find_windows(many, many.offsets[:-1], many.offsets[1:], 40, 40)
    assert len(windows) == users
    assert windows.nbytes == 16 * users
