"""How, when and via in addition to where: the same backbone, separate labels, and nothing seen too early."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fake_journeys import fake_journeys
from intbmoe.export import load_artifact
from intbmoe.export.export import export_run
from intbmoe.models.travel import TravelConfig
from intbmoe.tasks import DataError, make_task
from intbmoe.tasks.recipe import MoESettings, TrainSettings
from intbmoe.tasks.travel import task as module
from intbmoe.tasks.travel.data import find_departures
from intbmoe.tasks.travel.task import TravelData, TravelRecipe
from intbmoe.train import train

SMALL = TravelConfig(dim=16, depth=1, heads=2, hidden=24, sessions=8, place_rows=31, cell_rows=8, code_rows=64)
ALL = ("where", "how", "when", "via")


def recipe(tasks=ALL, model=SMALL, **data):
    return TravelRecipe("test", "travel", TravelData(tasks=tasks, **data), model, MoESettings("intbmoe", 4))


@pytest.fixture
def fake(monkeypatch):
    data = fake_journeys()
    rng = np.random.default_rng(0)
    shards = [replace(shard, depart=rng.integers(1, 50, len(shard.time)).astype(np.int32)) for shard in data.shards]
    data = replace(data, shards=shards)
    monkeypatch.setattr(module, "open_data", lambda settings: data)
    return data


def made(tasks, seed=0):
    torch.manual_seed(seed)
    task = make_task(recipe(tasks))
    return task, task.make_model().double().eval()


def test_where_is_the_same_with_other_tasks_beside_it(fake):
    alone, beside = made(("where",)), made(ALL)
    batch = alone[0].split("train").batch(range(4), 0, 0)
    more = beside[0].split("train").batch(range(4), 0, 0)
    assert {*more} - {*batch} == {"depart"}
    assert torch.equal(alone[1](batch), beside[1](more)["where"])
    sums, others = alone[0].evaluate(alone[1], batch), beside[0].evaluate(beside[1], more)
    assert all(torch.equal(value, others["where loss" if name == "loss" else name]) for name, value in sums.items())


@torch.no_grad()
def test_losses_and_metrics_by_hand(fake):
    task, model = made(ALL)
    batch = task.split("train").batch(range(4), 0, 0)
    tokens, mask = model.tokens(batch)
    outputs = model.backbone(tokens, mask)
    expected = {name: [] for name in ALL}
    hours, right, via = [], [], []
    for b, s in batch["targets"].nonzero().tolist():
        scenario, before = outputs[b, 6 + 3 * s], outputs[b, 6 + 3 * s - 2]  # the previous session's intention
        candidates = model.encode_places(batch["candidates"][b, s])
        expected["where"].append(-(candidates @ scenario / 4).log_softmax(0)[0])
        label = int(batch["depart"][b, s]) - 1
        expected["when"].append(F.cross_entropy(model.heads["when"](scenario), torch.tensor(label)))
        hours.append(abs(int(model.heads["when"](scenario).argmax()) - label))
        mode = int(batch["feedback"][b, s, 0])
        if mode:
            scores = model.heads["how"](scenario)
            expected["how"].append(F.cross_entropy(scores, torch.tensor(mode - 1)))
            right.append(mode - 1 in scores.topk(3).indices.tolist())
        if s:
            scores = candidates @ model.heads["via"](before) / 4
            expected["via"].append(-scores.log_softmax(0)[0])
            via.append(bool((scores[1:] < scores[0]).all()))
    total, count = task.loss(model, batch)
    assert count == len(expected["where"])
    assert total.item() == pytest.approx(sum(float(sum(losses)) for losses in expected.values()), abs=1e-9)
    metrics = task.metrics({name: float(value) for name, value in task.evaluate(model, batch).items()})
    for name, losses in expected.items():
        assert metrics[f"{name} loss"] == pytest.approx(float(sum(losses)) / len(losses), abs=1e-9)
    assert metrics["loss"] == pytest.approx(total.item() / count.item(), abs=1e-12)
    assert metrics["when hours-off"] == pytest.approx(np.mean(hours))
    assert metrics["how accuracy@3"] == pytest.approx(np.mean(right))
    assert metrics["via HR@1"] == pytest.approx(np.mean(via))


def test_via_sees_the_place_it_starts_from_and_nothing_later(fake):
    task, model = made(ALL)
    batch = task.split("train").batch(range(4), 0, 0)
    base = model(batch)["via"]
    rows = batch["targets"][:, 1:].nonzero()[:, 1]  # the session each score starts from
    for s in (2, 4):
        changed = {name: value.clone() for name, value in batch.items()}
        for name in ("scenario", "place", "feedback", "via"):
            changed[name][:, s + 1 :] = 0
        changed["feedback"][:, s] = 0
        after = model(changed)["via"]
        assert torch.equal(base[rows <= s], after[rows <= s])
        changed["place"][:, s] = 0
        assert not torch.equal(base[rows == s], model(changed)["via"][rows == s])


def test_a_batch_without_labels_has_a_loss_of_zero(fake):
    task, model = made(ALL)
    batch = task.split("train").batch(range(2), 0, 0)
    batch["targets"][:] = False
    total, count = task.loss(model.train(), batch)
    total.backward()
    assert (total, count) == (0, 0)


def test_more_travel_modes_than_the_model_has_are_named(fake):
    with pytest.raises(DataError, match=r"model.modes=2: the data has 3 travel modes"):
        make_task(recipe(model=replace(SMALL, modes=2))).split("train")


def test_departures_against_reading_every_row():
    rng = np.random.default_rng(3)
    for _ in range(50):
        number = int(rng.integers(1, 60))
        rows = {name: rng.integers(low, high, number) for name, low, high in (("place", -1, 3), ("cell", 0, 2))}
        rows["user"] = np.sort(rng.integers(0, 3, number))
        rows["time"] = rng.integers(0, 80 * 3_600_000, number)
        order = np.lexsort((rows["time"], rows["user"]))
        rows = {name: column[order] for name, column in rows.items()}
        sets_out = rng.random(number) < 0.2
        begins = (rng.random(number) < 0.7) | (np.diff(rows["user"], prepend=-1) > 0)
        first = np.flatnonzero(begins)
        expected = []
        for start, end in zip(first, [*first[1:], number], strict=True):
            same = [
                j for j in range(start, number) if all(rows[n][j] == rows[n][start] for n in ("user", "place", "cell"))
            ]
            out = [j for j in range(start, end) if sets_out[j]] + [j for j in same if sets_out[j]]
            gap = (rows["time"][out[0]] - rows["time"][start]) // 3_600_000 if out else 48
            expected.append(0 if rows["place"][start] < 0 else 1 + min(gap, 48))
        assert find_departures(rows, first, sets_out).tolist() == expected


def test_a_run_with_all_tasks_is_trained_exported_and_served(tmp_path):
    """On generated journeys, whose places have names and coordinates, which must reach the artifact."""
    one = replace(recipe(users=60), train=TrainSettings(steps=3, batch=8))
    run = train(one, tmp_path, quiet=True)
    assert {"HR@5", "how accuracy", "when accuracy", "via HR@5"} <= run.result["test"].keys()
    task = make_task(one)
    asked = load_artifact(export_run(run, tmp_path / "artifact").path).predictor("cpu")
    request = task.golden_requests(asked, 2)[0]
    answer = asked.answer([asked.encode({**request, "top_n": 10, "explain": True})])[0]
    data = module.open_data(one.data).places
    rows = np.searchsorted(data.ids, [result["id"] for result in answer["results"]])
    assert [result["name"] for result in answer["results"]] == [data.names[row].decode() for row in rows]
    box = answer["viewport"]
    assert (box["west"], box["east"]) == (data.longitude[rows].min(), data.longitude[rows].max())
    assert (box["south"], box["north"]) == (data.latitude[rows].min(), data.latitude[rows].max())
    assert len(answer["how"]) == len(answer["when"]) == 3
    assert 0 < sum(one["score"] for one in answer["when"]) <= 1
    assert "via" not in answer
    visited = [session["place"] for session in request["history"][-7:]]
    named = data.names[np.searchsorted(data.ids, visited[-1])].decode()
    assert any(token.endswith(named) for token in answer["tokens"])


@pytest.mark.parametrize("method", ["mmoe", "ple", "dsfnet", "intbmoe", "mixtral"])
def test_the_head_may_be_told_its_task(fake, method):
    """Each task then has its own predictions and gradients in the same head; otherwise all tasks share one."""
    torch.manual_seed(0)
    given = replace(recipe(model=replace(SMALL, head_by_task=True)), moe=MoESettings(method, 4))
    task = make_task(given)
    model = task.make_model().double()
    batch = task.split("train").batch(range(4), 0, 0)
    tokens, mask = model.tokens(batch)
    states = model.backbone.states(tokens, mask)
    told = [model.backbone.predict(states, mask, **model.head_inputs(name)) for name in ALL]
    differ = [bool((told[0] - other).abs().max() > 1e-9) for other in told[1:]]
    assert differ == [method != "mixtral"] * 3
    total, count = task.loss(model, batch)
    (total / count).backward()
    assert all(parameter.grad is not None for parameter in model.backbone.head.parameters())
    where = model.eval().backbone(tokens, mask, **model.head_inputs("where"))
    assert torch.equal(model.predict(batch), where[:, 6::3])
    plain = make_task(replace(given, model=SMALL)).make_model()
    assert getattr(plain.backbone.head.config, "conditioning_dim", 0) == 0
