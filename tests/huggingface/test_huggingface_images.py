"""``IntBMoEForImageClassification`` is ``models/vit.py``."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageClassification

import intbmoe
from intbmoe.huggingface.conversion import from_backbone, to_backbone
from intbmoe.layer import moe_layers
from intbmoe.methods.intbmoe import ComposedMoE
from intbmoe.models.vit import INIT_STD, ViT, ViTConfig
from small_huggingface import IMAGES, hf, vision_model


def images(dtype=torch.float32):
    return torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


LABELS = torch.tensor([0, 4, 2])


@torch.no_grad()
@pytest.mark.parametrize("method", [*intbmoe.list_methods(), None])
def test_scores_and_files_are_those_of_our_transformer_bit_for_bit(method, tmp_path):
    backbone = vision_model(method)
    model = hf.from_backbone(backbone, id2label=dict(enumerate("abcde")))
    expected = backbone(images())
    assert torch.equal(model(images()).logits, expected)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert type(loaded) is hf.IntBMoEForImageClassification
    assert loaded.config.id2label[2] == "c"
    assert torch.equal(loaded(images()).logits, expected)
    again = hf.to_backbone(loaded)
    assert again.config == IMAGES
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in backbone.state_dict().items())


def test_it_starts_as_ours_does():
    config = hf.from_backbone(vision_model()).config
    torch.manual_seed(0)
    model = hf.IntBMoEForImageClassification(config)
    assert 0.8 * INIT_STD < model.vit.pos_embed.std() < 1.2 * INIT_STD
    assert model.vit.blocks[0].attn.qkv.weight.abs().max() < 4 * INIT_STD
    assert model.vit.patch_embed.proj.weight.std() > 5 * INIT_STD  # nn.Conv2d's own
    assert model.vit.blocks[1].moe.shared.gate.weight.std() > 5 * INIT_STD
    assert hf.IntBMoEImageConfig().num_labels == 1000


def test_bfloat16_keeps_what_decides_routing_in_float32(tmp_path):
    hf.from_backbone(vision_model()).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    for model in (
        AutoModelForImageClassification.from_pretrained(tmp_path, dtype=torch.bfloat16),
        AutoModelForImageClassification.from_config(config, dtype=torch.bfloat16),
    ):
        ((_, layer),) = moe_layers(model)
        assert all(tensor.dtype == torch.float32 for tensor in layer.kept_wide())
        assert layer.weight_dtype == torch.bfloat16
        assert model.eval()(images(torch.bfloat16)).logits.dtype == torch.bfloat16


def test_a_precomposed_model_is_loaded_without_pools(tmp_path):
    model = hf.from_backbone(vision_model())
    model.precompose().save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    ((_, layer),) = moe_layers(loaded)
    assert isinstance(layer, ComposedMoE)
    torch.testing.assert_close(loaded(images()).logits, model(images()).logits, rtol=0, atol=1e-5)


def test_the_loss_has_the_auxiliary_losses_and_checkpointing_changes_no_gradient():
    gradients = []
    for checkpointing in (False, True):
        model = hf.from_backbone(vision_model("switch", torch.float64, jitter=0.0))
        plain = model(images(torch.float64), labels=LABELS).loss
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        loss = model(images(torch.float64), labels=LABELS).loss
        assert loss > plain
        loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


def test_hidden_states_are_returned_when_asked_for():
    model = hf.from_backbone(vision_model())
    assert model(images()).hidden_states is None
    states = model(images(), output_hidden_states=True).hidden_states
    assert [state.shape for state in states] == [(3, 5, 16)] * 3
    assert model(images(), return_dict=False)[0].shape == (3, 5)


def test_a_class_token_that_goes_through_the_mixture():
    config = ViTConfig(
        image_size=16, patch_size=8, dim=24, depth=2, heads=3, hidden=32, moe_layers=(0,), classes=5,
        class_token_ffn=False,
    )  # fmt: skip
    model, x = ViT(config, lambda: intbmoe.create("intbmoe", 24, 32, experts=4)).eval(), torch.randn(2, 3, 16, 16)
    assert torch.equal(from_backbone(model)(x).logits, model(x))
    assert torch.equal(to_backbone(from_backbone(model))(x), model(x))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_hidden_layers": 2}, r"mixture_layers=\(0, 2, 4, 6\) is not allowed: mixture_layers must be"),
        ({"num_attention_heads": 5}, r"num_attention_heads=5 is not .* a divisor of hidden_size \(192\)"),
        ({"intermediate_size": 0}, "intermediate_size=0 is not allowed: intermediate_size must be"),
        ({"method_options": {"hidden": 0}}, "^hidden=0 is not allowed: hidden must be"),
        ({"num_labels": 0}, "num_labels=0 is not allowed: num_labels must be"),
    ],
)
def test_errors_name_the_fields_as_they_are_called_here(fields, told):
    with pytest.raises(ValueError, match=told):
        hf.IntBMoEImageConfig(**fields)
