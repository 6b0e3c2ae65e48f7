"""The cost tables of the language and travel models: every figure by hand, counts without numbers against real ones."""

import json
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from intbmoe.analysis import cost_report, settings
from intbmoe.analysis.cost import PRECOMPOSED, Setting, measure, sweep_experts
from intbmoe.analysis.settings import INTTRAVEL, MINIPILE, SETTINGS
from intbmoe.budget import match_budget
from intbmoe.cli import main
from intbmoe.counting import count_flops
from intbmoe.models.llama import Llama, LlamaConfig
from intbmoe.registry import create

METHODS = ["switch", "deepseek", "remoe", "dynmoe", "mass", "soft_causal", "smear_token", "lory"]
METHODS += ["mumoe_cp", "mumoe_tr", "intbmoe", PRECOMPOSED]


@cache
def measured(name, method, depth):
    """``depth`` is the number of MiniPile's layers, which are all alike; counting all 18 takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "LlamaConfig", partial(LlamaConfig, depth=depth))
        return measure(SETTINGS[name], method)


def by_hand(method, *, tokens, d, experts, expert, weights, swiglu, inner, cp, tr, mixed, active):
    """Parameters, activated parameters and multiply-adds of one module.

    ``expert``: parameters of an expert like the backbone's FFN; ``weights``: the same without biases; ``swiglu``:
    parameters of a SwiGLU; ``inner``: IntBMoE's inner width; ``mixed``: cost of a token in a merged expert; ``cp``,
    ``tr``: rank and width.
    """
    others = experts + 1
    router = d * others
    sparse = others * expert + router
    if method in ("dense", "swiglu"):
        return expert, expert, tokens * weights
    if method in ("switch", "remoe"):
        return sparse, expert + router, tokens * (weights + router)
    if method == "deepseek":
        run = 3 * swiglu + d * experts
        return others * swiglu + d * experts, run, tokens * run
    if method in ("dynmoe", "mass"):
        thresholds = others if method == "dynmoe" else 0
        used = active * expert + router + thresholds
        return sparse + thresholds, used, tokens * (active * weights + router)
    if method == "soft_causal":
        return sparse + 1, sparse + 1, tokens * (others * weights + router)
    if method == "smear_token":
        return sparse, sparse, tokens * (others * mixed + router)
    if method == "lory":
        segments = -(-tokens // 16)
        total = others * swiglu + router
        return total, total, segments * (16 * swiglu + total)
    if method == "mumoe_cp":
        rank, width = cp
        total = rank * (others + 2 * (d + 1 + width)) + router
        return total, total, tokens * total
    if method == "mumoe_tr":
        rank, width = tr
        total = 2 * 16 * others + 4 * rank * 2 * (d + 1 + width) + router
        return total, total, tokens * (total + 2 * 16 * rank)
    blocks, top_k, code, hyper, route = 8, 2, 32, 16, 64
    base = 2 * d * inner + inner + d
    rest = (d * route + route + route * blocks + blocks) + 2 * inner + (inner + d + 1) + swiglu
    run = tokens * (d * route + route * blocks + top_k * ((d + code) * d + 2 * 2 * d * inner) + swiglu)
    if method == PRECOMPOSED:
        block = 2 * base + d
        total = rest + d * d + blocks * block
        return total, total - (blocks - top_k) * block, run
    recipe = code * hyper + hyper + 2 * hyper + 2 * (hyper * experts + experts)
    total = rest + experts * base + blocks * code + recipe + (d + code) * d + d
    return total, total, run + 2 * blocks * experts * base + blocks * (code * hyper + 2 * hyper * experts)


SWIGLU, GELU = 3 * 768 * 2048, 2 * 96 * 384
SHAPES = {
    "minipile": {
        "tokens": 1024,
        "d": 768,
        "experts": 8,
        "expert": SWIGLU,
        "weights": SWIGLU,
        "swiglu": SWIGLU,
        "inner": 2844,
        "cp": (5522, 3072),
        "tr": (1382, 3072),
        "mixed": SWIGLU,
        "active": 2,
    },
    "inttravel": {
        "tokens": 126,
        "d": 96,
        "experts": 32,
        "expert": GELU + 384 + 96,
        "weights": GELU,
        "swiglu": GELU,
        "inner": 384,
        "cp": (2461, 384),
        "tr": (636, 384),
        "mixed": GELU + 384 + 96,  # biases are mixed by a product too
        "active": 8,
    },
}


def rest(name, depth):
    """The number of modules, and the parameters and multiply-adds outside them."""
    if name == "inttravel":
        return 9, 8 * (4 * (96**2 + 96) + 4 * 96 + 251) + 2 * 96, 126 * 8 * 4 * 96**2
    params = 32_000 * 768 + depth * (4 * 768**2 + 2 * 768) + 768
    return depth, params, 1024 * (32_000 * 768 + depth * 4 * 768**2)


CASES = [("minipile", method, 2) for method in METHODS] + [("minipile", method, 18) for method in ("swiglu", "intbmoe")]


@pytest.mark.parametrize(
    ("name", "method", "depth"), [*CASES, *(("inttravel", method, 18) for method in ("dense", *METHODS))]
)
def test_every_figure_is_exact(name, method, depth):
    row = measured(name, method, depth)
    modules, params, work = rest(name, depth)
    each = by_hand(method, **SHAPES[name])
    assert row.params == params + modules * each[0]
    assert row.activated == params + modules * each[1]
    assert row.flops == 2 * (work + modules * each[2])
    if method.startswith(("mumoe", "intbmoe")):
        assert row.flops_executed < row.flops
    else:
        assert row.flops_executed == row.flops


def test_totals_that_are_known_elsewhere():
    assert measured("minipile", "swiglu", 18).params == 152_006_400
    assert measured("minipile", "intbmoe", 18).params == 793_756_746 - 18 * 2 * 768
    assert (
        measured("inttravel", "intbmoe", 18).params == 22_547_449 - 5_280 - (9 + 7) * 2 * 96
    )  # see test_recommender.py


@pytest.mark.parametrize("setting", [MINIPILE, INTTRAVEL], ids=lambda setting: setting.name)
def test_the_rows_are_the_papers_and_nothing_is_invented(setting):
    assert setting.methods == ("swiglu" if setting is MINIPILE else "dense", *METHODS)
    assert not setting.paper
    assert not setting.paper_sweep
    assert set(setting.active) == {"remoe", "dynmoe", "mass", "lapsum"}
    for method in ("remoe", "dynmoe", "mass"):  # the paper's own rows
        assert f"assumed here: {setting.active[method]} on average. The paper gives no mean" in setting.notes[method][0]
    assert "no cost figures" in setting.remarks[0]


@pytest.mark.parametrize("method", ["remoe", "dynmoe", "mass"])
@pytest.mark.parametrize("name", ["minipile", "inttravel"])
def test_the_assumed_means_are_those_the_layers_report(name, method):
    setting, modules = SETTINGS[name], rest(name, depth=2)[0]
    with torch.device("meta"):
        model = setting.build(method, setting.experts)
    layer = model.layers[0].mlp if name == "minipile" else model.head
    assert setting.active[method] == layer.quantities().participation
    idle = sum(parameter.numel() for parameter in layer.parameters()) - layer.active_parameters()
    row = measured(name, method, 2)
    assert row.activated == row.params - modules * idle


def test_ranks_in_the_notes_are_those_built():
    for name, backbone in (("minipile", (768, 2048)), ("inttravel", (96, 384))):
        expert = "swiglu" if name == "minipile" else "gelu"
        for method, form in (("mumoe_cp", "Rank {},"), ("mumoe_tr", "Ranks 4, 4 and {},")):
            rank = match_budget(method, *backbone, experts=SETTINGS[name].experts, expert=expert)["rank"]
            assert form.format(rank) in SETTINGS[name].notes[method][0]


def test_attention_is_counted_on_request():
    for setting, products in ((MINIPILE, 18 * 4 * 1024**2 * 768), (INTTRAVEL, 8 * 4 * 126**2 * 96)):
        method = setting.methods[0]
        assert measure(setting, method, attention=True).flops == measured(setting.name, method, 18).flops + products


CONFIG = LlamaConfig(vocabulary=50, dim=16, depth=2, heads=2, hidden=32)


def _small_llama(method, experts):
    if method == "swiglu":
        return Llama(CONFIG)
    options = match_budget(method, 16, 32, experts=experts, expert="swiglu")
    return Llama(CONFIG, lambda: create(method, 16, **options))


REAL = Setting(
    name="small",
    title="Small decoder, two layers",
    build=_small_llama,
    inputs=lambda: (torch.zeros(1, 40, dtype=torch.int64),),
    experts=3,
    methods=MINIPILE.methods,
    active={"remoe": 1, "dynmoe": 1.5, "mass": 2},
    remarks=("a remark on all rows",),
)
FAKE = replace(REAL, without_storage=True)


@pytest.mark.parametrize("method", MINIPILE.methods)
def test_counts_without_numbers_are_those_of_a_real_run(method):
    assert measure(FAKE, method, attention=True) == measure(REAL, method, attention=True)


@pytest.mark.parametrize("experts", [1, 5])
def test_sweeps_without_numbers_are_those_of_a_real_run(experts):
    assert sweep_experts(FAKE, experts) == sweep_experts(REAL, experts)


def test_without_numbers_the_active_experts_must_be_known():
    with FakeTensorMode():
        layer = create("remoe", 16, 8, experts=3).eval()
        with pytest.raises(ValueError, match="pass `active`"):
            count_flops(layer, torch.zeros(1, 5, 16))


def test_the_sweep_grows_with_the_pool_but_not_when_precomposed():
    small, large = (sweep_experts(INTTRAVEL, experts) for experts in (2, 3))
    base = 2 * 96 * 384 + 384 + 96
    assert large.flops - small.flops == 9 * (2 * 2 * 8 * base + 2 * 8 * 32)
    grown = 4 * 9 * (base + 2 * 17)  # parameters; the coefficients in memory at the same time are tiny
    assert grown <= large.memory - small.memory <= grown + 4096
    assert small.flops_precomposed == large.flops_precomposed
    assert small.memory_precomposed == large.memory_precomposed


def test_the_json_has_nulls_for_the_paper(capsys, monkeypatch):
    few = replace(FAKE, methods=("swiglu", "mass", PRECOMPOSED))
    monkeypatch.setitem(cost_report.find_setting.__globals__["SETTINGS"], "small", few)
    main(["cost", "small", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in rows] == list(few.methods)
    nothing = {"params": None, "activated": None, "flops": None}
    assert all(row["paper"] == row["agrees"] == nothing for row in rows)
    assert all(type(row[column]) is int for row in rows for column in (*nothing, "flops_executed"))
    main(["cost", "small", "--markdown"])
    assert "a remark on all rows" in capsys.readouterr().out
