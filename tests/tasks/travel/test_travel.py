"""The travel task: metrics by hand, floors, models under the budget, the appendix, and journeys that are learned."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import intbmoe
from fake_journeys import HOUR, PLACES, fake_journeys
from intbmoe.budget import TABLE_2
from intbmoe.layer import moe_layers
from intbmoe.models.travel import TravelConfig
from intbmoe.recipes import load_recipe
from intbmoe.tasks import DataError, list_preparations, make_task
from intbmoe.tasks.recipe import MoESettings, TrainSettings
from intbmoe.tasks.travel import task as module
from intbmoe.tasks.travel.examples import JourneyExamples, JourneyReader
from intbmoe.tasks.travel.floors import VisitCounter, floor_scores
from intbmoe.tasks.travel.generator import make_journeys
from intbmoe.tasks.travel.task import TravelData, TravelRecipe, ranking_gains
from intbmoe.train import train
from inttravel_tables import write_tables

SMALL = TravelConfig(dim=16, depth=1, heads=2, hidden=24, sessions=8, place_rows=31, cell_rows=8, code_rows=64)


def recipe(moe=None, model=SMALL, **data):
    return TravelRecipe("test", "travel", TravelData(**data), model, moe or MoESettings("switch", 4))


@pytest.fixture
def fake(monkeypatch):
    """The task on the tiny data set, in place of generated journeys."""
    data = fake_journeys()
    monkeypatch.setattr(module, "open_data", lambda settings: data)
    return data


class Scores(nn.Module):
    """A fake model that returns what it was given."""

    def forward(self, batch):
        return batch["scores"][batch["targets"]]


def scored(rows):
    """A batch of one user whose sessions have these scores, the true place's first; all but the last are targets."""
    scores = torch.tensor([rows])
    targets = torch.arange(len(rows)).unsqueeze(0) < len(rows) - 1
    candidates = torch.zeros(*scores.shape, 5, dtype=torch.int32)
    candidates[..., 2] = torch.arange(scores.shape[2]) % 3 + 1  # the categories: 1, 2, 3, 1, 2, …
    return {"scores": scores, "targets": targets, "candidates": candidates}


def test_metrics_by_hand():
    task = make_task(recipe())
    others = [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    batch = scored([[9.0, *others], [4.5, *others], [1.5, *others], [2.5, *others], [0.0, *others], [7.0, *others]])
    sums = task.evaluate(Scores(), batch)  # ranks 1, 3, 6, 5, 7; the last is no target
    metrics = task.metrics({name: float(value) for name, value in sums.items()})
    assert sums["count"] == 5
    assert metrics["HR@1"] == 1 / 5
    assert metrics["HR@5"] == 3 / 5
    assert metrics["HR@2"] == metrics["NDCG@2"] == 1 / 5
    assert metrics["NDCG@5"] == pytest.approx((1 + 1 / math.log2(4) + 1 / math.log2(6)) / 5)
    # The true place and the third and sixth of the others, at rank 3 or 4, have the right category.
    assert [metrics[f"CIR@{n}"] for n in (1, 2, 5, 10)] == [4 / 5, 4 / 5, 0, 0]
    expected = F.cross_entropy(batch["scores"][0, :5], torch.zeros(5, dtype=torch.int64))
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert task.metric in metrics
    with pytest.raises(ValueError, match="no example was evaluated"):
        task.metrics({"count": 0, "loss": 0, "HR@1": 0, "HR@5": 0, "NDCG@5": 0})


def test_category_inconsistency_leaves_unknown_categories_out_and_counts_ties_against():
    category = torch.tensor([[1, 2, 2], [0, 2, 2], [2, 2, 1]])
    gains = ranking_gains(torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 2.0], [1.0, 1.0, 0.0]]), category)
    sums = {name: values.sum() for name, values in gains.items()}
    assert sums["categories"] == 2
    assert (sums["CIR@1"], sums["CIR@2"]) == (1, 0)


def test_ties_and_what_is_no_number_count_against():
    flat = torch.zeros(1, 65)
    assert ranking_gains(flat, flat)["HR@5"] == 0
    assert ranking_gains(torch.full((1, 65), torch.nan), flat)["HR@5"] == 0
    tied = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]])
    gains = ranking_gains(tied, tied)
    assert (gains["HR@1"], gains["HR@5"]) == (0, 1)


def test_loss_is_a_sum_over_targets_and_sums_add_up():
    task = make_task(recipe())
    rows = torch.randn(6, 65, generator=torch.Generator().manual_seed(0)).tolist()
    total, count = task.loss(Scores(), scored(rows))
    expected = F.cross_entropy(torch.tensor(rows[:5]), torch.zeros(5, dtype=torch.int64), reduction="sum")
    assert count == 5
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    nothing = {"scores": torch.zeros(1, 1, 65, requires_grad=True), "targets": torch.tensor([[False]])}
    total, count = task.loss(Scores(), nothing)
    total.backward()
    assert (total, count) == (0, 0)


@pytest.mark.parametrize("method", TABLE_2)
def test_every_method_of_the_papers_table_learns_from_a_batch(fake, method):
    task = make_task(recipe(MoESettings(method, 4)))
    model = task.make_model().train()
    total, count = task.loss(model, task.split("train").batch(range(4), 0, 0))
    total.backward()
    assert torch.isfinite(total)
    assert count > 0
    assert model.places.tables.grad.abs().sum() > 0
    held = [name for name, _ in moe_layers(model)]
    # "dense" is a layer of the registry too, which the backbone makes for itself.
    assert held == ["backbone.blocks.0.ffn", "backbone.head"]


def test_a_method_that_looks_ahead_is_refused():
    with pytest.raises(ValueError, match="cannot be used in a causal model"):
        make_task(recipe(MoESettings("expert_choice", 4))).make_model()


def test_nothing_trained_on_is_evaluated(fake):
    """The same over whole batches: the answers of the three splits are disjoint and cover all sessions."""
    task = make_task(recipe())
    count = 0
    for name in ("train", "valid", "test"):
        examples = task.split(name)
        count += int(examples.batch(range(len(examples)), 0, 0)["targets"].sum())
    assert count == sum(int((shard.place >= 0).sum()) for shard in fake.shards)


def test_floors_are_counts_before_the_session(fake):
    """Compared with counts in plain Python, on the candidates that models get."""
    popular = Counter(p for s in fake.shards for p, t in zip(s.place, s.time, strict=True) if t < fake.valid_from)
    test = JourneyExamples(JourneyReader(fake, 8), "test")
    batch = test.batch(range(len(test)), 0, 0)
    rows = {}
    for shard in fake.shards:
        for user in range(len(shard.offsets) - 1):
            seen = Counter()
            for i in range(shard.offsets[user], shard.offsets[user + 1]):
                place, when = int(shard.place[i]), int(shard.time[i])
                if when >= fake.test_from and place >= 0:
                    rows[(when, place)] = dict(seen)
                seen[place] += 1
    expected = []
    for candidates in batch["candidates"][batch["targets"]][..., 0].tolist():
        expected.append([popular[c - 1] for c in candidates])
    chunks = [scores for scores, _ in floor_scores(fake)]
    found = np.concatenate([chunk["popularity"] for chunk in chunks])
    assert sorted(found.tolist()) == sorted(expected)
    counted = np.concatenate([chunk["visit counter"] for chunk in chunks])
    weight = max(count for place, count in popular.items() if place >= 0) + 1
    visits, rest = np.divmod(counted, weight)
    assert (rest == found).all()
    assert sorted(visits[:, 0].tolist()) == sorted(row.get(place, 0) for (_, place), row in rows.items())


def test_the_visit_counter_against_counting(fake):
    for shard in fake.shards:
        counter = VisitCounter(shard)
        sessions = np.arange(len(shard.time))
        places = np.tile(np.arange(PLACES), (len(sessions), 1))
        users = np.searchsorted(shard.offsets, sessions, side="right") - 1
        for i, row in zip(sessions, counter.count(sessions, places), strict=True):
            before = shard.place[shard.offsets[users[i]] : i]
            assert row.tolist() == np.bincount(before[before >= 0], minlength=PLACES).tolist()


def test_floors_have_the_metrics_of_the_models(fake):
    floors = make_task(recipe()).floors()
    assert set(floors) == {"popularity", "visit counter"}
    for values in floors.values():
        assert set(values) == {"HR@1", "HR@2", "HR@5", "NDCG@2", "NDCG@5", *(f"CIR@{n}" for n in (1, 2, 5, 10))}
        assert 0 <= values["HR@1"] <= values["NDCG@5"] <= values["HR@5"] <= 1


def test_flops_can_be_counted_on_a_full_sequence():
    task = make_task(load_recipe("inttravel"))
    (batch,) = task.example_inputs()
    model = make_task(recipe(model=replace(SMALL, sessions=40))).make_model()
    assert model.tokens(batch)[0].shape[1] == 126
    assert model(batch).shape == (1, 40, 16)


def test_inttravel_is_the_appendix():
    """Every value that the paper's appendix states for IntTravel, written down here a second time."""
    one = load_recipe("inttravel")
    run, model = one.train, one.model
    stated = {
        "steps": (run.steps, 610_000),
        "global batch": (run.batch, 64 * 8),
        "per device": (run.device_batch, 64),
        "learning rate": (run.lr, 1e-4),
        "schedule": (run.schedule, "constant"),
        "without warm-up": (run.warmup, 0),
        "Adam's betas": (run.betas, (0.9, 0.999)),
        "weight decay": (run.weight_decay, 1e-6),
        "seeds": (one.seeds, (42, 4981213, 211231244)),
        "first seed": (run.seed, 42),
        "H": (model.depth, 8),
        "d": (model.dim, 96),
        "heads": (model.heads, 1),
        "4d": (model.hidden, 4 * 96),
        "tokens": (model.backbone().max_length, 126),
        "source": (one.data.source, "inttravel"),
        "E": (one.moe.experts, 32),
        "options": (
            one.moe.options,
            {"blocks": 8, "top_k": 2, "code_dim": 32, "router_dim": 64, "hyper_dim": 16, "residual_scale": 0.0},
        ),
    }
    assert {name: found for name, (found, _) in stated.items()} == {name: value for name, (_, value) in stated.items()}


def test_inttravel_released_is_the_released_code():
    one, appendix = load_recipe("inttravel-released"), load_recipe("inttravel")
    assert one.model.primes == (5_008_057, 5_008_121, 5_008_259, 5_008_433)
    assert (one.model.dim // len(one.model.primes), one.model.table_std) == (24, 0.001)
    assert (one.data.tasks, one.data.split, one.data.near_negatives) == (("where",), "newest", 50)
    assert (one.train.lr, one.train.weight_decay, one.moe) == (1e-4, 1e-6, appendix.moe)


def test_the_paper_size_model_takes_a_real_step(monkeypatch):
    """On two sequences of 40 sessions among places numbered up to 7.3 million."""
    small = fake_journeys(((45, 60),))
    monkeypatch.setattr(module, "open_data", lambda settings: replace(small, valid_from=2000 * HOUR))
    task = make_task(load_recipe("inttravel"))
    torch.manual_seed(0)
    model = task.make_model().train()
    batch = task.split("train").batch([0, 2], 0, 0)
    for name in ("place", "via", "candidates"):
        batch[name][..., 0] *= 7_300_000 // PLACES
    assert batch["mask"].all()
    assert batch["candidates"][..., 0].max() > 7_000_000
    layers = dict(moe_layers(model))
    assert len(layers) == 9
    c = layers["backbone.head"].config
    assert (c.experts, c.blocks, c.top_k, c.hidden, c.shared_hidden) == (32, 8, 2, (384,), 256)
    backbone = sum(parameter.numel() for parameter in model.backbone.parameters())
    tables = 2 * (262_144 + 65_536 + 65_536) * 96 + 3 * 96
    assert sum(parameter.numel() for parameter in model.parameters()) == backbone + tables + 9 * 96 + 2 * 96 + 97 * 96
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-6, fused=True)
    before = {name: value.detach().clone() for name, value in model.named_parameters() if "tables" not in name}
    total, count = task.loss(model, batch)
    (total / count + intbmoe.aux_loss(model)).backward()
    intbmoe.before_step(model, optimizer)
    optimizer.step()
    intbmoe.after_step(model, optimizer)
    assert total.item() / count.item() == pytest.approx(math.log(65), abs=1)
    still = {name for name, value in model.named_parameters() if name in before and torch.equal(value, before[name])}
    # The first step moves a residual scale of 0 only if its gradient is not zero.
    assert not {name for name in still if "attn" in name or "place" in name}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TravelData(source="yelp"), "source='yelp'.*'journeys', 'inttravel', 'check-ins'"),
        (lambda: TravelData(users=0), "users=0"),
        (lambda: TravelData(tasks=("how",)), r"tasks=.*where among them"),
        (lambda: TravelData(tasks=("where", "why")), r"tasks.*'why'"),
        (lambda: TravelConfig(primes=(5, 7, 11, 13, 17)), r"primes=.*divides dim \(96\)"),
        (lambda: TravelData(utc_offset=25), "utc_offset=25"),
        (lambda: replace(recipe(), task="vision"), "task='vision'"),
        (lambda: TravelConfig(sessions=0), "sessions=0"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_data_is_read_when_a_split_is_asked_for():
    task = make_task(load_recipe("inttravel"))
    with pytest.raises(DataError, match=r"inttravel needs the folder that intbmoe prepare inttravel.*--data.path"):
        task.split("train")
    with pytest.raises(DataError, match=r"journeys are generated and need no path"):
        make_task(recipe(path="x")).split("train")


def test_prepared_tables_train_like_the_journeys_they_were_written_from(tmp_path, monkeypatch):
    """From raw tables through ``prepare`` and memory maps to a finished run, with a process that reads ahead."""
    pytest.importorskip("duckdb")
    monkeypatch.setenv("INTBMOE_CACHE", str(tmp_path / "cache"))
    journeys = make_journeys(users=40)
    write_tables(journeys, tmp_path / "raw")
    list_preparations()["inttravel"].run(
        tmp_path / "raw", tmp_path / "prepared", skip_bad=False, progress=lambda *_: None
    )
    stored = recipe(source="inttravel", path=str(tmp_path / "prepared"))
    expected = JourneyExamples(JourneyReader(journeys, SMALL.sessions), "test")
    found = make_task(stored).split("test")
    assert len(found) == len(expected) > 0
    batches = [examples.batch(range(len(examples)), 0, 0) for examples in (found, expected)]
    assert all(torch.equal(value, batches[1][name]) for name, value in batches[0].items())
    settings = TrainSettings(steps=3, batch=8, workers=1)
    result = train(replace(stored, train=settings), tmp_path / "runs", quiet=True).result
    assert 0 <= result["test"]["HR@5"] <= 1


@pytest.mark.slow
def test_journeys_are_learned_beyond_the_visit_counter(tmp_path):
    """In 120 steps. With three seeds IntBMoE had an HR@5 of 0.694, 0.718 and 0.697; the counter has 0.604."""
    one = load_recipe("journeys")
    data, settings = replace(one.data, valid_windows=64), replace(one.train, steps=120, eval_every=100.0)
    short = replace(one, data=data, train=settings)
    run = train(short, tmp_path, quiet=True)
    floors = make_task(short).floors()
    reached = run.result["test"]["HR@5"]
    assert floors["popularity"]["HR@5"] < floors["visit counter"]["HR@5"]
    assert reached > floors["visit counter"]["HR@5"] + 0.06
