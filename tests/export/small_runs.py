"""Finished runs of every task without training: random weights whose routers send tokens to every block."""

from dataclasses import replace

import numpy as np
import torch

from intbmoe.files import digest, to_json
from intbmoe.methods.intbmoe import IntBMoE
from intbmoe.recipes import load_recipe
from intbmoe.tasks import make_task
from intbmoe.tasks.recipe import MoESettings
from intbmoe.train.files import pack_tensors
from intbmoe.train.run import RunDirectory

TASKS = ("vision", "language", "sequences", "travel")
ITEMS = 40


def small_recipe(task, folder, method="intbmoe", experts=2, depth=2):
    """A recipe of the task with a model so small that a layer takes milliseconds."""
    own = {"blocks": 4, "top_k": 2, "code_dim": 4, "router_dim": 8, "hyper_dim": 4} if method == "intbmoe" else {}
    moe = MoESettings(name=method, experts=experts, options=own)
    if task == "vision":
        recipe = load_recipe("digits")
        model = replace(recipe.model, dim=16, depth=depth, heads=2, hidden=24, moe_layers=tuple(range(depth)))
        return replace(recipe, moe=moe, model=model)
    if task == "language":
        recipe = load_recipe("stdlib")
        model = replace(recipe.model, dim=16, depth=depth, heads=2, hidden=24)
        return replace(recipe, moe=moe, model=model, data=replace(recipe.data, length=24, max_bytes=150_000))
    if task == "travel":
        recipe = load_recipe("journeys")
        model = replace(recipe.model, dim=16, depth=depth, hidden=24, sessions=10)
        return replace(recipe, moe=moe, model=model, data=replace(recipe.data, users=60))
    recipe = load_recipe("foursquare")
    model = replace(recipe.model, items=ITEMS, dim=16, depth=depth, hidden=24, length=12, copy=True)
    return replace(recipe, moe=moe, model=model, data=replace(recipe.data, path=_check_ins(folder)))


def _check_ins(folder):
    random = np.random.default_rng(0)
    lengths = random.integers(3, 25, 60)
    arrays = {
        "user": np.repeat(np.arange(60), lengths),
        "poi": np.concatenate([random.integers(0, ITEMS, lengths.sum() - 1), [ITEMS - 1]]),
        "time": np.concatenate([np.arange(length) for length in lengths]),
    }
    np.savez(folder / "check-ins.npz", **arrays)
    return str(folder / "check-ins.npz")


def small_run(task, folder, method="intbmoe", experts=2, depth=2):
    """The finished run."""
    recipe = small_recipe(task, folder, method, experts, depth)
    torch.manual_seed(3)
    model = make_task(recipe).make_model()
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, IntBMoE):
                layer.router.scores.weight.mul_(8)
                layer.router.hidden.weight.mul_(3)
    run = RunDirectory.of(recipe, folder / f"runs-{experts}")
    run.path.mkdir(parents=True)
    run.claim(recipe)
    tensors = pack_tensors(model.state_dict())
    run.write("model.safetensors", tensors)
    metrics = {make_task(recipe).metric: 0.5}
    done = {"valid": metrics, "test": metrics, "sha256": {"model.safetensors": digest(tensors)}}
    run.write("done.json", to_json(done))
    return run
