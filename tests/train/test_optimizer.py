"""Decay groups of all methods, and the learning rate of each step."""

import pytest
import torch
from tiny_task import DIM, TinyTask, tiny_recipe
from torch import nn

import intbmoe
from intbmoe.tasks.recipe import TrainSettings
from intbmoe.train.build import learning_rate, make_optimizer, spared_from_decay
from intbmoe.train.data import plan_batches

ROUTING = {
    "deepseek": {"router.weight"},
    "dense": set(),
    "dynmoe": {"embeddings", "thresholds"},
    "expert_choice": {"router.weight"},
    "intbmoe": {"codebook", "router.hidden.weight", "router.scores.weight", "scale"},
    "lory": {"router.weight"},
    "mass": {"router.weight"},
    "mumoe_cp": {"gate"},
    "mumoe_tr": {"gate"},
    "remoe": {"router.weight"},
    "smear": {"router.weight"},
    "smear_token": {"router.weight"},
    "soft": {"phi", "scale"},
    "soft_causal": {"phi", "scale"},
    "swiglu": set(),
    "switch": {"router.weight"},
    "vmoe": {"router.weight"},
}
"""What is spared of each method besides norms and biases."""


def test_the_table_knows_all_methods():
    assert sorted(ROUTING) == intbmoe.list_methods()


@pytest.mark.parametrize("method", sorted(ROUTING))
def test_norms_biases_routers_and_codebooks_are_spared(method):
    layer = intbmoe.create(method, DIM, **intbmoe.match_budget(method, DIM, 8, experts=4))
    model = nn.Sequential(nn.LayerNorm(DIM), layer)
    common = {n for n, _ in model.named_parameters() if "norm" in n or n.endswith("bias") or n.startswith("0.")}
    spared = spared_from_decay(model)
    assert spared == common | {f"1.{name}" for name in ROUTING[method]}
    weights = {n for n, _ in model.named_parameters()} - spared
    assert any("expert" in n or "pools" in n or "inputs" in n for n in weights)


def test_groups_of_the_optimizer():
    model = TinyTask(tiny_recipe("intbmoe")).make_model()
    everything = make_optimizer(model, TrainSettings(weight_decay=0.3))
    assert [group["weight_decay"] for group in everything.param_groups] == [0.3]
    groups = make_optimizer(model, TrainSettings(weight_decay=0.3, decay_all=False)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert any(p is model.blocks[0].moe.codebook for p in groups[1]["params"])


def test_decay_reaches_exactly_the_decayed():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = make_optimizer(model, TrainSettings(lr=0.5, weight_decay=0.5, decay_all=False))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, before[name] * (0.75 if name == "0.weight" else 1), msg=name)


def test_warmup_then_cosine():
    settings = TrainSettings(batch=4, epochs=10, warmup=2, lr=1.0, warmup_lr=0.2, final_lr=0.1)
    plan = plan_batches(20, settings, 1)  # 5 steps an epoch
    rates = [learning_rate(step, settings, plan) for step in range(plan.steps)]
    assert rates[0] == 0.2
    assert rates[5] == pytest.approx(0.6)
    assert rates[10] == 1.0
    assert rates[30] == pytest.approx((1 + 0.1) / 2)
    assert rates == [*sorted(rates[:11]), *sorted(rates[11:], reverse=True)]
    assert 0.1 < rates[-1] < 0.102


def test_constant():
    settings = TrainSettings(batch=4, epochs=2, lr=0.3, schedule="constant")
    plan = plan_batches(20, settings, 1)
    assert {learning_rate(step, settings, plan) for step in range(plan.steps)} == {0.3}
