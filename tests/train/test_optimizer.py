"""Decay groups of all methods, and the learning rate of each step."""

from typing import get_args

import pytest
import torch
from tiny_task import DIM, TinyTask, tiny_recipe
from torch import nn

import intbmoe
from intbmoe.budget import NAMED
from intbmoe.models.recommender import Recommender, RecommenderConfig
from intbmoe.models.vit import ViT, ViTConfig
from intbmoe.tasks.recipe import DecayGroup, TrainSettings
from intbmoe.tasks.vision.timm_data import timm_data
from intbmoe.train.build import decay_group, learning_rate, make_optimizer
from intbmoe.train.data import plan_batches

SPARED = {
    "deepseek": {"router.weight": "routers"},
    **{name: {"router.weight": "routers"} for name in NAMED},
    "dense": {},
    "dynmoe": {"embeddings": "routers", "thresholds": "scales"},
    "expert_choice": {"router.weight": "routers"},
    "intbmoe": {
        **{f"router.{name}.weight": "routers" for name in ("hidden", "scores")},
        **{f"gate_norms.{layer}": "norms" for layer in (0, 1)},
        "scale": "scales",
    },
    "lory": {"router.weight": "routers"},
    "mass": {"router.weight": "routers"},
    "mumoe_cp": {"gate": "routers"},
    "mumoe_tr": {"gate": "routers"},
    "ple": dict.fromkeys(("router.0.weight", "router.1.weight", "shared_router.0.weight"), "routers"),
    "remoe": {"router.weight": "routers"},
    "smear": {"router.weight": "routers"},
    "smear_token": {"router.weight": "routers"},
    "soft": {"phi": "routers", "scale": "scales"},
    "soft_causal": {"phi": "routers", "scale": "scales"},
    "swiglu": {},
    "switch": {"router.weight": "routers"},
    "vmoe": {"router.weight": "routers"},
}
"""What each method exempts from decay besides biases and norm modules."""
EVERYTHING = get_args(DecayGroup)


def test_the_table_knows_all_methods():
    assert sorted(SPARED) == intbmoe.list_methods()


@pytest.mark.parametrize("method", sorted(SPARED))
def test_a_method_says_what_its_parameters_are(method):
    layer = intbmoe.create(method, DIM, **intbmoe.match_budget(method, DIM, 8, experts=4))
    model = nn.Sequential(nn.LayerNorm(DIM), layer)
    modules = dict(model.named_modules())
    expected = {f"1.{name}": group for name, group in SPARED[method].items()}
    for name, _ in model.named_parameters():
        owner, _, last = name.rpartition(".")
        if last == "bias":
            expected[name] = "biases"
        elif isinstance(modules[owner], nn.LayerNorm):
            expected[name] = "norms"
    groups = {name: decay_group(model, name) for name, _ in model.named_parameters()}
    assert {name: group for name, group in groups.items() if group != "weights"} == expected
    weights = {name for name, group in groups.items() if group == "weights"}
    assert any("expert" in name or "pools" in name or "inputs" in name for name in weights)


def test_positions_and_the_class_token_are_told_apart_from_weights():
    model = ViT(ViTConfig(image_size=8, patch_size=4, dim=6, depth=1, moe_layers=()))
    assert {name for name, _ in model.named_parameters() if decay_group(model, name) == "positions"} == {
        "cls_token",
        "pos_embed",
    }
    model = Recommender(RecommenderConfig(dim=4, depth=1, hidden=4))
    assert decay_group(model, "blocks.0.attn.relative_bias") == "positions"


def test_what_nobody_speaks_for_goes_by_its_shape():
    model = nn.Module()
    model.temperature, model.table = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(2, 2))
    assert [decay_group(model, name) for name in ("temperature", "table")] == ["scales", "weights"]


def test_groups_of_the_optimizer():
    model = TinyTask(tiny_recipe("intbmoe")).make_model()
    layer = model.blocks[0].moe
    everything = make_optimizer(model, TrainSettings(weight_decay=0.3))
    assert [group["weight_decay"] for group in everything.param_groups] == [0.3]
    groups = make_optimizer(model, TrainSettings(weight_decay=0.3, undecayed=EVERYTHING)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert any(p is layer.scale for p in groups[1]["params"])
    assert any(p is layer.codebook for p in groups[0]["params"])
    trainer = make_optimizer(model, TrainSettings(undecayed=("biases", "norms"))).param_groups
    assert any(p is layer.scale for p in trainer[0]["params"])
    assert any(p is layer.router.hidden.bias for p in trainer[1]["params"])


def test_decay_reaches_exactly_the_decayed():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = make_optimizer(model, TrainSettings(lr=0.5, weight_decay=0.5, undecayed=EVERYTHING))
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


def test_one_rate_an_epoch_and_a_cool_down_as_timm_has_them():
    timm_data()  # imports torchvision, even if it was built for another device
    from timm.scheduler.cosine_lr import CosineLRScheduler

    peak, low, start, cosine, warmup = 1.0, 0.1, 0.2, 10, 2
    settings = TrainSettings(
        batch=4,
        epochs=cosine + 3,
        warmup=warmup,
        cooldown=3,
        lr=peak,
        warmup_lr=start,
        final_lr=low,
        schedule="epoch-cosine",
    )
    plan = plan_batches(20, settings, 1)  # 5 steps an epoch
    rates = [learning_rate(step, settings, plan) for step in range(plan.steps)]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=peak)
    timm = CosineLRScheduler(optimizer, t_initial=cosine, lr_min=low, warmup_t=warmup, warmup_lr_init=start)
    for epoch in range(cosine + 3):
        timm.step(epoch)
        assert rates[5 * epoch : 5 * epoch + 5] == pytest.approx([optimizer.param_groups[0]["lr"]] * 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 3, "warmup": 1, "cooldown": 2.5}, "cooldown must be at most epochs without the warm-up"),
        ({"epochs": 3, "schedule": "constant", "cooldown": 1}, "cooldown must be 0 with schedule 'constant'"),
        ({"undecayed": ["router"]}, "undecayed"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainSettings(**settings)
