"""Models by name in timm: the paper's ViT, with any method, behind timm's interface."""

import copy

import pytest
import torch

import intbmoe
import intbmoe.timm as door
from foreign_models import timm
from intbmoe.layer import moe_layers
from intbmoe.models.vit import ViT, ViTConfig

METHODS = intbmoe.list_methods()
TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 4, "num_heads": 2, "num_classes": 5, "experts": 4}


def small(name="intbmoe", **arguments):
    torch.manual_seed(0)
    return timm.create_model(f"{name}_vit_tiny_patch16_224", **{**TINY, **arguments})


def images(batch=2, dtype=torch.float32):
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_every_method_has_its_names():
    names = timm.list_models(module="timm")
    assert set(names) == {f"{name}_vit_{size}_patch16_224" for name in METHODS for size in ("tiny", "small")}
    assert timm.models.get_pretrained_cfg("intbmoe_vit_tiny_patch16_224").input_size == (3, 224, 224)


def test_the_tiny_one_has_the_papers_parameters():
    from intbmoe.budget import match_budget

    with torch.device("meta"):
        model = timm.create_model("intbmoe_vit_tiny_patch16_224")
        options = match_budget("intbmoe", 192, 768, experts=16, tokens=196)
        ours = ViT(ViTConfig(), lambda: intbmoe.create("intbmoe", 192, **options))
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in ours.parameters())
    assert [name for name, _ in moe_layers(model)] == [f"blocks.{block}.mlp.moe" for block in (0, 2, 4, 6)]


def test_the_shared_expert_is_matched_whatever_its_kind():
    layers = [small("intbmoe", moe_options={"shared_kind": kind}).blocks[0].mlp.moe for kind in ("swiglu", "mlp")]
    matrices = [[p.numel() for p in layer.shared.parameters() if p.dim() == 2] for layer in layers]
    assert sum(matrices[1]) == 2 * 16 * 64
    assert sum(matrices[0]) == pytest.approx(2 * 16 * 64, rel=0.02)  # a width of 42⅔ is rounded


@pytest.mark.parametrize("name", METHODS)
def test_forward_backward_and_features(name):
    model = small(name).train()
    loss = model(images()).square().mean() + intbmoe.aux_loss(model)
    loss.backward()
    unreached = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert unreached == []
    model.eval()
    final, features = model.forward_intermediates(images(), indices=2)
    assert torch.equal(final, model.forward_features(images()))
    assert [tuple(feature.shape) for feature in features] == [(2, 16, 4, 4)] * 2


@pytest.mark.parametrize("name", ["intbmoe", "switch", "soft", "dense"])
def test_logits_are_those_of_our_own_model(name):
    model = small(name).double().eval()
    config = ViTConfig(image_size=32, patch_size=8, classes=5, dim=16, depth=4, heads=2, hidden=64, moe_layers=(0, 2))
    layer = model.blocks[0].mlp.moe
    ours = ViT(config, lambda: type(layer)(layer.config)).double().eval()
    state = model.state_dict()
    ours.load_state_dict({key.replace("mlp.moe.", "moe.").replace("mlp.mlp.", "mlp."): state[key] for key in state})
    x = images(dtype=torch.float64)
    torch.testing.assert_close(model(x), ours(x), rtol=1e-12, atol=1e-12)
    back = door.checkpoint_filter_fn(ours.state_dict(), model)
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["intbmoe", "smear", "deepseek"])
@pytest.mark.parametrize("mode", ["", "jax", "moco"])
def test_mixtures_keep_their_start(name, mode):
    torch.manual_seed(5)
    model = small(name, weight_init=mode)
    layer = model.blocks[0].mlp.moe
    written = copy.deepcopy(layer.state_dict())
    model.init_weights()  # as another training script may
    for state in (written, layer.state_dict()):
        torch.manual_seed(6)
        fresh = type(layer)(layer.config).state_dict()
        for key, value in state.items():
            if value.is_floating_point() and value.numel() > 60:
                assert value.std() == pytest.approx(fresh[key].std().item(), rel=0.35), key


def test_a_model_on_the_meta_device_gets_its_start():
    model = small(device="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    model.init_weights()
    assert model.eval()(images()).isfinite().all()
    assert small(dtype=torch.float64)(images(dtype=torch.float64)).dtype == torch.float64


def test_pretrained_from_a_folder_and_from_a_run(tmp_path):
    model = small().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02
    timm.models.save_for_hf(model, str(tmp_path), model_args=TINY, safe_serialization=True)
    for loaded in (
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True),
        small(pretrained=True, pretrained_cfg_overlay={"file": str(tmp_path / "model.safetensors"), "num_classes": 5}),
    ):
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())
        assert torch.equal(loaded.eval()(images()), model(images()))


def test_routers_are_not_decayed():
    from timm.optim import param_groups_weight_decay

    model = small()
    groups = param_groups_weight_decay(model, weight_decay=0.1, no_weight_decay_list=model.no_weight_decay())
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in decayed}
    assert "blocks.0.mlp.moe.pools.0.weight" in names
    assert "blocks.0.mlp.moe.codebook" in names
    assert not any("router" in name or name.endswith(("bias", "scale")) or "norm" in name for name in names)


def test_all_tokens_may_go_through_the_mixture():
    model = small(class_token_apart=False, moe_blocks=[1]).eval()
    assert model.blocks[1].mlp.mlp is None
    with intbmoe.record_routing(model) as log:
        model(images())
    assert log["blocks.1.mlp.moe"].ids.shape[0] == 2 * 17


def test_mistakes_say_what_is_allowed():
    with pytest.raises(
        ValueError, match=r"moe_blocks=\[4\] is not allowed: moe_blocks must be block numbers from 0 to 3"
    ):
        small(moe_blocks=[4])
    with pytest.raises(ValueError, match="fix_init=True is not allowed"):
        small(fix_init=True)
    with pytest.raises(TypeError, match="has no option 'blokcs'"):
        small(moe_options={"blokcs": 3})
