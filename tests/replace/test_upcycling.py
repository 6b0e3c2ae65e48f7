"""Experts that start as copies of a trained FFN."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import intbmoe
from foreign_models import output, timm_model, transformers_model

EXACT = [
    *("deepseek", "dense", "dsfnet", "dynmoe", "gshard", "lory", "mass", "mixtral", "mixture", "mmoe", "shazeer"),
    *("smear", "smear_token", "swiglu"),
]
SCALED = ["switch", "vmoe", "remoe", "expert_choice", "hypermoe", "lapsum"]
SCALED_SWIGLU = ["deepseek_v1"]
CHANGED = ["soft", "soft_causal"]
NO_COPIES = ["intbmoe", "mobe", "mumoe_cp", "mumoe_tr", "ple"]


def with_large_weights(model):
    """Enlarge the weights, as training does, so that differences can be measured against the outputs."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return model


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("host", ["gelu", "swiglu"])
@pytest.mark.filterwarnings("ignore:lory remembers")
def test_copies_whose_weights_sum_to_one_change_nothing(name, host):
    model, inputs = timm_model("vit") if host == "gelu" else transformers_model("llama")
    with_large_weights(model)
    if host == "gelu" and name in ("deepseek", "lory"):
        pytest.skip("its experts are SwiGLU")
    if host == "swiglu" and name == "smear":
        pytest.skip("it looks ahead")
    options = {} if name in ("dense", "swiglu") else {"experts": 4}
    rounding = 1e-8 if name == "gshard" else 1e-13  # GShard adds 1e-9 to the sum of two weights
    before = output(model, inputs)
    report = intbmoe.replace_ffn(model, name, start="copy", example=inputs, **options)
    assert [row.scale for row in report.layers] == [1.0] * len(report.layers)
    assert report.largest_change <= rounding * max(row.size for row in report.layers)
    assert (output(model, inputs) - before).abs().max() <= 10 * rounding * before.abs().max()


@pytest.mark.parametrize("name", SCALED)
def test_other_copies_are_scaled_to_the_same_mean(name):
    model, inputs = timm_model("vit")
    with_large_weights(model)
    ffn = model.blocks[0].mlp
    report = intbmoe.replace_ffn(model, name, start="copy", example=inputs, experts=4, layers=[0])
    layer, row = model.blocks[0].mlp, report.layers[0]
    assert row.scale != 1.0
    tokens = torch.randn(2, 17, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(layer.experts.down.weight[0], ffn.fc2.weight.T * row.scale)
    with intbmoe.record_routing(model) as log:
        output(model, inputs)
    total = log["blocks.0.mlp"].weights.sum(-1).mean() * row.scale
    assert total == pytest.approx(1, abs=1e-9)
    assert layer(tokens).shape == tokens.shape


@pytest.mark.parametrize("name", SCALED_SWIGLU)
def test_copies_of_a_swiglu_are_scaled_too(name):
    model, inputs = transformers_model("llama")
    kept = intbmoe.replace_ffn(copy.deepcopy(model), name, start="shared", example=inputs)
    copied = intbmoe.replace_ffn(model, name, start="copy", example=inputs)
    assert kept.largest_change == 0.0
    assert all(row.scale != 1.0 and row.change < 0.5 * row.size for row in copied.layers)


@pytest.mark.parametrize("kind", ["gated", "fused"])
def test_the_gate_is_told_from_the_values(kind):
    model, inputs = transformers_model("llama" if kind == "gated" else "phi3")
    with_large_weights(model)
    before = output(model, inputs)
    intbmoe.replace_ffn(model, "deepseek", start="copy", experts=4)
    assert (output(model, inputs) - before).abs().max() <= 1e-12 * before.abs().max()


def test_redrawn_experts_differ_in_that_share_of_their_units():
    model, _ = transformers_model("llama")
    with_large_weights(model)
    mlp = model.model.layers[0].mlp
    torch.manual_seed(3)
    intbmoe.replace_ffn(model, "deepseek", start="copy", experts=4, redraw=0.25, layers=[0])
    experts = model.model.layers[0].mlp.experts
    kept = []
    for expert in range(4):
        same = (mlp.gate_proj.weight == experts.gate.weight[expert].T).all(1)
        assert torch.equal(same, (mlp.up_proj.weight == experts.up.weight[expert].T).all(1))
        assert torch.equal(same, (experts.down.weight[expert] == mlp.down_proj.weight.T).all(1))
        assert int(same.sum()) == 18
        kept.append(same)
    assert not all(torch.equal(kept[0], other) for other in kept[1:])
    drawn = experts.up.weight[0].detach().T[~kept[0]]
    assert drawn.std() == pytest.approx(mlp.up_proj.weight.std().item(), rel=0.3)


@pytest.mark.parametrize("name", ["gpt2", "opt", "t5-gated"])
def test_other_networks_are_refused(name):
    model, _ = transformers_model(name)
    with pytest.raises(ValueError, match="cannot be copied: experts can only be GELU networks"):
        intbmoe.replace_ffn(model, "switch", start="copy", experts=4)


def test_every_method_is_in_a_table_of_the_documentation():
    assert sorted(EXACT + SCALED + SCALED_SWIGLU + CHANGED + NO_COPIES) == intbmoe.list_methods()
    text = (Path(__file__).parents[2] / "docs" / "replace.md").read_text(encoding="utf-8")
    named = [set(re.findall(r"`(\w+)`", row)) for row in re.findall(r"^\| .*", text, flags=re.MULTILINE)]
    rows = [row & set(intbmoe.list_methods()) for row in named]
    for methods in (EXACT, SCALED + SCALED_SWIGLU, CHANGED, NO_COPIES):
        assert set(methods) in rows


@pytest.mark.parametrize("name", NO_COPIES)
def test_methods_without_independent_experts_take_no_copies(name):
    model, _ = transformers_model("llama")
    with pytest.raises(ValueError, match=rf"{name} cannot start as a copy .* use start='fresh', or start='shared'"):
        intbmoe.replace_ffn(model, name, start="copy", experts=4)


def test_a_copy_keeps_its_width_and_kind():
    model, _ = timm_model("vit")
    with pytest.raises(ValueError, match="hidden=7 is not allowed with start='copy'"):
        intbmoe.replace_ffn(model, "switch", start="copy", hidden=7)
    with pytest.raises(ValueError, match="expert='swiglu' is not allowed"):
        intbmoe.replace_ffn(model, "switch", start="copy", expert="swiglu")
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp cannot be copied into deepseek"):
        intbmoe.replace_ffn(model, "deepseek", start="copy")


def test_a_fresh_start_is_the_method_s_own():
    model, inputs = timm_model("vit")
    before = output(model, inputs)
    report = intbmoe.replace_ffn(model, "switch", start="fresh", experts=4, hidden=12)
    assert report.largest_change > 0
    assert not torch.equal(output(model, inputs), before)
    assert not any(isinstance(part, nn.Linear) for part in model.blocks[0].mlp.modules())
