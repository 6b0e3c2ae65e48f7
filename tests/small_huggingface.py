"""Small transformers models with our mixtures, for several tests; skips if transformers is absent."""

import pytest
import torch

from intbmoe import create, list_methods
from intbmoe.models.llama import Llama, LlamaConfig
from intbmoe.models.vit import ViT, ViTConfig
from intbmoe.registry import find_method
from small_methods import TINY

pytest.importorskip("transformers", reason="transformers is not installed")

import intbmoe.huggingface as hf

SIZES = LlamaConfig(vocabulary=29, dim=24, depth=2, heads=3, hidden=20)
IMAGES = ViTConfig(
    image_size=8,
    patch_size=4,
    channels=1,
    classes=5,
    dim=16,
    depth=2,
    heads=2,
    hidden=24,
    moe_layers=(1,),
    drop_path=0.0,
)
CAUSAL = [name for name in list_methods() if find_method(name).noncausal_reason() is None]


def decoder(method="intbmoe", dtype=torch.float32, **options):
    """A Llama of ours, with weights large enough that every part of it matters."""
    torch.manual_seed(3)
    make = (
        None
        if method is None
        else lambda: create(method, SIZES.dim, SIZES.hidden, **{**TINY.get(method, {}), **options})
    )
    model = Llama(SIZES, make).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mlp." not in name:
                parameter.copy_(torch.randn_like(parameter) * (1 if parameter.dim() == 1 else 0.3))
    return model


def language_model(method="intbmoe", dtype=torch.float32, **options):
    return hf.from_backbone(decoder(method, dtype, **options), pad_token_id=0)


def vision_model(method="intbmoe", dtype=torch.float32, **options):
    torch.manual_seed(3)
    make = None if method is None else lambda: create(method, 16, 24, **{**TINY.get(method, {}), **options})
    return ViT(IMAGES, make).to(dtype).eval()


def text_config(method="intbmoe", **options):
    """A configuration as a user would write it, not as a conversion makes it."""
    return hf.IntBMoETextConfig(
        vocab_size=29,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=3,
        pad_token_id=0,
        method=method,
        method_options={**TINY.get(method, {}), **options},
    )


def prompts(batch=3, tokens=9, seed=4):
    return torch.randint(1, 29, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def left_padded(ids, lengths):
    mask = torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(lengths).unsqueeze(1)
    return ids.where(mask, 0), mask
