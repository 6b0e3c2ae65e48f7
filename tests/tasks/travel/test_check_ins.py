"""Check-ins as journeys: what is known before the answer, and a split by time over all users."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from intbmoe.models.travel import PLACE, PROFILE, SCENARIO, mean_before
from intbmoe.recipes import load_recipe
from intbmoe.tasks import make_task
from intbmoe.tasks.errors import DataError
from intbmoe.tasks.travel.check_ins import read_check_ins

PLACES, USERS, VISITS = 90, 12, 40
CELL, REGION = SCENARIO.index("cell"), SCENARIO.index("region")


def made_up(**changes):
    """People who visit random places, sorted by (user, time); ``hour`` and ``dow`` are five hours behind UTC."""
    random = np.random.default_rng(3)
    number = USERS * VISITS
    time = np.sort(random.integers(1_333_000_000, 1_360_000_000, (USERS, VISITS)), axis=1).ravel()
    hours = (time - 5 * 3600) // 3600
    arrays = {
        "user": np.repeat(np.arange(USERS) * 3, VISITS),
        "poi": random.integers(PLACES, size=number),
        "time": time,
        "hour": hours % 24,
        "dow": (hours // 24 + 3) % 7,
        "poi_lat": random.uniform(40.6, 40.8, PLACES),
        "poi_lon": random.uniform(-74.1, -73.9, PLACES),
        "poi_category": random.integers(7, size=PLACES),
    }
    return {name: array for name, array in (arrays | changes).items() if array is not None}


@pytest.fixture
def write(tmp_path):
    def write(**changes):
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.npz"  # a process reads the same path once
        np.savez(file, **made_up(**changes))
        return str(file)

    return write


def task_of(path, sessions=6, **data):
    recipe = load_recipe("checkins")
    sizes = {"dim": 8, "hidden": 16, "depth": 1, "place_rows": 128, "cell_rows": 128, "code_rows": 256}
    return make_task(
        replace(
            recipe,
            data=replace(recipe.data, path=path, **data),
            model=replace(recipe.model, sessions=sessions, **sizes),
        )
    )


def targets(task, split):
    """For each target of a split, its session in the shard."""
    (windows,) = task.split(split).windows
    ends = zip(windows.stop, windows.targets, strict=True)
    return np.concatenate([np.arange(stop - count, stop) for stop, count in ends])


def test_every_event_is_a_target_once_and_no_target_is_earlier_than_what_was_trained_on(write):
    path = write()
    time = read_check_ins(path).shards[0].time
    found = {split: targets(task_of(path), split) for split in ("train", "valid", "test")}
    assert np.array_equal(np.sort(np.concatenate(list(found.values()))), np.arange(len(time)))
    assert time[found["train"]].max() < time[found["valid"]].min()
    assert time[found["valid"]].max() < time[found["test"]].min()
    assert len(found["test"]) == pytest.approx(len(time) / 10, abs=1)


def test_a_prediction_sees_the_place_before_and_the_hour_and_nothing_of_the_answer(write):
    """Changing the answer of a window's last event changes no other input, and no prediction."""
    arrays = made_up()
    task = task_of(write())
    last = int(task.split("test").windows[0].stop[0]) - 1
    poi = arrays["poi"].copy()
    poi[last] = (poi[last] + 1) % PLACES
    other = task_of(write(poi=poi))
    batches = [one.split("test").batch([0], 0, 0) for one in (task, other)]
    at = int(batches[0]["mask"].sum()) - 1
    assert not torch.equal(batches[0]["place"][0, at], batches[1]["place"][0, at])
    for name in ("profile", "scenario", "feedback", "via", "mask", "targets"):
        assert torch.equal(batches[0][name], batches[1][name]), name
    torch.manual_seed(0)
    model = task.make_model().eval()
    said = [model.predict(batch)[0, at] for batch in batches]
    assert torch.equal(*said)
    scenario, before = batches[0]["scenario"][0, at], batches[0]["place"][0, at - 1]
    assert scenario[CELL] == before[PLACE.index("cell")]
    assert scenario[REGION] == before[PLACE.index("region")]
    assert scenario[SCENARIO.index("hour")] == 1 + arrays["hour"][last]
    assert scenario[SCENARIO.index("weekday")] == 1 + arrays["dow"][last]
    assert batches[0]["profile"][0].tolist() == [1 + last // VISITS, *[0] * (len(PROFILE) - 1)]


def test_a_served_model_scores_as_in_training_copies_included(write):
    """Requests made from windows get the scores that the model gives the windows themselves."""
    task = task_of(write(hour=None, dow=None), sessions=VISITS)  # so that windows start where histories start
    torch.manual_seed(0)
    model = task.make_model().double().eval()
    assert model.copy_scale is not None
    found, tensors = task.catalogue(), task.catalogue().tensors
    artifact = SimpleNamespace(
        recipe=task.recipe, catalogue=found.about, catalogue_tensors=tensors, model=lambda device: model
    )
    predictor = task.find_predictor().load(artifact, "cpu")
    windows = task.split("valid")
    requests = task.golden_requests(predictor, len(windows))
    batch = windows.batch(range(len(windows)), 0, 0)
    with torch.no_grad():
        predictions = model.predict(batch)[torch.arange(len(windows)), batch["mask"].sum(1) - 1]
        scores = predictions @ model.encode_places(tensors["codes"][1:]).T * task.recipe.model.dim**-0.5
    for number in range(0, len(windows), 2):  # every other request excludes visited places
        (answer,) = predictor.answer([predictor.encode({**requests[number], "top_n": 5})])
        best = scores[number].topk(5)
        assert [result["id"] for result in answer["results"]] == best.indices.tolist()
        assert [result["score"] for result in answer["results"]] == pytest.approx(best.values.tolist(), rel=1e-5)


def test_the_mean_is_of_what_was_known_before():
    x = torch.arange(12.0).view(1, 4, 3)
    known = torch.tensor([[True, False, True, True]])
    found = mean_before(x, known)[0]
    assert found.tolist() == [[0.0] * 3, x[0, 0].tolist(), x[0, 0].tolist(), ((x[0, 0] + x[0, 2]) / 2).tolist()]


def test_without_hours_and_categories_the_clock_is_the_recipes(write):
    path = write(hour=None, dow=None, poi_category=None)
    here = task_of(path, utc_offset=-5.0).split("test").batch([0], 0, 0)
    given = task_of(write()).split("test").batch([0], 0, 0)
    assert torch.equal(here["scenario"], given["scenario"])
    assert not here["place"][..., PLACE.index("category")].any()


def test_floors_and_views_need_no_category(write):
    task = task_of(write(poi_category=None))
    assert {*task.floors()} == {"popularity", "visit counter"}
    assert {*task.floors()["popularity"]} == {"HR@1", "HR@2", "HR@5", "NDCG@2", "NDCG@5"}, "nothing on categories"
    assert task.ceilings() == {}
    assert [view.name for view in task.views()] == ["token type", "hour of day"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"poi_lat": None}, "the array 'poi_lat' is missing"),
        ({"poi_lon": np.zeros(3)}, "'poi_lon' has 3 rows and 'poi_lat' has 90"),
        ({"poi_lat": np.full(PLACES, np.nan)}, "'poi_lat', row 0, is nan: expected degrees from −90 to 90"),
        ({"poi": np.full(USERS * VISITS, 90)}, "'poi', row 0, is 90: expected numbers from 0 to 89"),
        ({"hour": np.full(USERS * VISITS, 24)}, "'hour', row 0, is 24: expected numbers from 0 to 23"),
        ({"user": np.arange(USERS * VISITS)[::-1]}, r"'user', row 1, .* rows sorted by \(user, time\)"),
        ({"time": np.arange(USERS * VISITS) - 1}, "'time', row 0, is -1: expected seconds since 1970"),
    ],
)
def test_a_file_that_is_not_as_described_is_refused(write, changes, message):
    with pytest.raises(DataError, match=message):
        read_check_ins(write(**changes))


def test_what_check_ins_do_not_say_cannot_be_asked(write):
    with pytest.raises(DataError, match=r"data\.tasks has when, which check-ins do not have: use only where and via"):
        task_of(write(), tasks=("where", "when")).split("train")
    with pytest.raises(DataError, match=r"check-ins needs an \.npz file of check-ins with places: set data\.path"):
        task_of(None).split("train")
    with pytest.raises(DataError, match=r"data\.planted=0\.5: .* leave it at 0"):
        task_of(write(), planted=0.5).split("train")
