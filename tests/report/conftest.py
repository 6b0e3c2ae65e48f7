"""Runs of two methods and two seeds that train in a second each."""

import shutil
from dataclasses import replace

import pytest
from made_up_comparison import plan_of

from intbmoe.analysis.analyse import AnalyseOptions, analyse
from intbmoe.recipes import load_recipe
from intbmoe.train import train

HOSTILE = "<script>alert(1)</script>\"'&"


@pytest.fixture(scope="session")
def small_recipe():
    recipe = load_recipe("digits")
    return replace(
        recipe,
        model=replace(recipe.model, dim=16, depth=2, heads=2, hidden=16, patch_size=4, moe_layers=(0,)),
        moe=replace(recipe.moe, experts=2, options={"blocks": 4, "top_k": 2}),
        train=replace(recipe.train, steps=4, batch=8, warmup=0.0, log_every=2, eval_every=100.0),
    )


@pytest.fixture(scope="session")
def trained(small_recipe, tmp_path_factory):
    """The root of runs of Switch and IntBMoE, seeds 0 and 1."""
    root = tmp_path_factory.mktemp("runs")
    for job in plan_of(small_recipe, root).jobs:
        train(job.recipe, root=root, quiet=True)
    return root


@pytest.fixture(scope="session")
def analysed(trained, tmp_path_factory):
    """The folder of an analysed run of IntBMoE."""
    run = shutil.copytree(trained / "digits/intbmoe/0", tmp_path_factory.mktemp("analysed") / "run")
    return analyse(run, AnalyseOptions(examples=16))
