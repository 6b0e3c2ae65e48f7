"""PEFT's adapters on MoE layers inside a Hugging Face model: each one learns, and merging them changes nothing."""

import pytest
import torch

import intbmoe
from test_connect import batch, llama

peft = pytest.importorskip("peft", reason="needs peft: pip install peft")

METHODS = {"intbmoe": {"top_k": 2, "blocks": 4}, "switch": {"jitter": 0.0}, "deepseek": {}}
POOLS = {
    "intbmoe": ["mlp.pools.0.weight", "mlp.pools.1.weight"],
    "switch": ["mlp.experts.up.weight", "mlp.experts.down.weight"],
    "deepseek": ["mlp.experts.gate.weight", "mlp.experts.up.weight", "mlp.experts.down.weight"],
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SHARED = ["shared.gate", "shared.up", "shared.down"]


def adapted(name, **targets):
    """The model with nonzero adapters: they start at zero, where half of them get no gradient."""
    model = peft.get_peft_model(llama(name, **METHODS[name]), peft.LoraConfig(r=2, lora_dropout=0.0, **targets))
    adapters = {key: value for key, value in model.named_parameters() if "lora_" in key}
    torch.manual_seed(5)
    for parameter in adapters.values():
        torch.nn.init.normal_(parameter, std=0.2)
    return model, adapters


def targets_of(name, way):
    if way == "all-linear":
        return {"target_modules": "all-linear"}
    shared = [] if name == "switch" else SHARED
    return {"target_modules": ATTENTION + shared, "target_parameters": POOLS[name]}


@pytest.mark.parametrize("way", ["all-linear", "pools"])
@pytest.mark.parametrize("name", METHODS)
def test_every_adapter_learns_and_merges(name, way):
    plain = llama(name, **METHODS[name]).eval()
    model, adapters = adapted(name, **targets_of(name, way))
    intbmoe.connect(model.train())
    model(**batch()).loss.backward()
    dead = [key for key, value in adapters.items() if value.grad is None or not value.grad.any()]
    assert dead == []
    assert {key for key, value in model.named_parameters() if value.grad is not None} == set(adapters)
    on_pools = [key for key in adapters if ".pools." in key or ".experts." in key]
    assert len(on_pools) == (0 if way == "all-linear" else 2 * 2 * len(POOLS[name]))
    assert any(".shared." in key for key in adapters) == (name != "switch")
    with torch.no_grad():
        separate = model.eval()(**batch()).logits
        merged = model.merge_and_unload()
        intbmoe.connect(merged)
        together = merged(**batch()).logits
        assert not torch.allclose(separate, plain(**batch()).logits, atol=1e-3)
    torch.testing.assert_close(together, separate, rtol=0, atol=1e-6)
    assert not any("lora" in key for key in merged.state_dict())


@pytest.mark.parametrize("name", METHODS)
def test_an_adapter_that_could_have_no_effect_is_refused(name):
    """Kernels read routers and hypernetworks directly, so PEFT must refuse them instead of silently doing nothing."""
    with pytest.raises(ValueError, match=r"Target module Linear.* is not supported"):
        adapted(name, target_modules=["mlp.router.hidden" if name == "intbmoe" else "mlp.router"])


def test_a_merged_model_precomposes():
    model, _ = adapted("intbmoe", **targets_of("intbmoe", "pools"))
    merged = model.merge_and_unload().eval()
    served = intbmoe.precompose(merged)
    with torch.no_grad():
        torch.testing.assert_close(served(**batch()).logits, merged(**batch()).logits, rtol=0, atol=1e-6)


def test_adapters_precompose_before_they_are_merged():
    """Composition calls the pool, so it sees the adapted weights."""
    model, _ = adapted("intbmoe", **targets_of("intbmoe", "pools"))
    layer = model.eval().base_model.model.model.layers[0].mlp
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(layer.precompose()(x), layer(x), rtol=0, atol=1e-12)


def test_masks_reach_layers_behind_a_wrapper_that_passes_on_any_arguments():
    ids = torch.randint(1, 40, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    model = peft.get_peft_model(llama("intbmoe", **METHODS["intbmoe"]), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    intbmoe.connect(model.eval())
    with intbmoe.record_routing(model) as log, torch.no_grad():
        model(ids, mask)
    assert [record.tokens for record in log.values()] == [16, 16]
