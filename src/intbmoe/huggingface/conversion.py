"""Convert between this package's backbones and their transformers form: the same tensors under the same names.

hf = from_backbone(intbmoe.load("runs/text/intbmoe/0"))          # a Llama or a ViT
hf.save_pretrained("my-model")
backbone = to_backbone(AutoModelForCausalLM.from_pretrained("my-model"))
"""

from typing import Any

import torch
from torch import Tensor, nn

from intbmoe.checks import require
from intbmoe.huggingface.causal_lm import IntBMoEForCausalLM
from intbmoe.huggingface.configuration import IntBMoEImageConfig, IntBMoETextConfig, MixtureConfig
from intbmoe.huggingface.image_classification import IntBMoEForImageClassification
from intbmoe.huggingface.mixture import MixtureModel, state_shapes
from intbmoe.layer import moe_layers
from intbmoe.methods.intbmoe import ComposedMoE
from intbmoe.models.llama import Llama
from intbmoe.models.vit import ViT
from intbmoe.registry import method_of
from intbmoe.settings import to_plain


def from_backbone(model: nn.Module, **options: Any) -> MixtureModel:
    """Make the transformers model with a copy of the weights of a ``Llama`` or ``ViT``; types are kept.

    ``options`` are further fields of the configuration, such as ``eos_token_id`` or ``id2label``.
    """
    if isinstance(model, Llama):
        rope = {"rope_type": "default", "rope_theta": model.config.rope_theta}
        kind, config = IntBMoEForCausalLM, _config(IntBMoETextConfig, model, rope_parameters=rope, **options)
    elif isinstance(model, ViT):
        labels = {} if "id2label" in options else {"num_labels": model.config.classes}
        layers = list(model.config.moe_layers)
        config = _config(IntBMoEImageConfig, model, mixture_layers=layers, **labels, **options)
        kind = IntBMoEForImageClassification
    else:
        raise TypeError(f"model is a {type(model).__name__}: only intbmoe's Llama and ViT have a transformers form")
    with torch.device("meta"):
        made = kind(config)
    made.base_model.load_state_dict(_copied(model), assign=True)
    made.tie_weights()
    made.config.dtype = made.dtype
    return made.train(model.training)


def to_backbone(model: MixtureModel) -> Llama | ViT:
    """Make the ``Llama`` or ``ViT`` with a copy of the weights of ``model``; types are kept."""
    config = model.config
    if isinstance(model, IntBMoEForImageClassification):
        kind = ViT
    elif isinstance(model, IntBMoEForCausalLM):
        kind = Llama
        rope = config.rope_parameters["rope_type"]
        require(rope == "default", "rope_type", rope, "'default': intbmoe's Llama does not scale positions")
        tied = torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
        require(tied, "tie_word_embeddings", config.tie_word_embeddings, "True: intbmoe's Llama ties the two")
    else:
        raise TypeError(f"model is a {type(model).__name__}: expected a model of intbmoe.huggingface with a head")
    with torch.device("meta"):
        made = kind(config.backbone(), None if config.method is None else config.make_ffn)
    made.load_state_dict(_copied(model.base_model), assign=True)
    return made.train(model.training)


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _config(kind: type[MixtureConfig], model: Llama | ViT, **options: Any) -> MixtureConfig:
    sizes = {theirs: getattr(model.config, ours) for ours, theirs in kind.sizes.items()}
    return kind(**sizes, **_mixture(model), **options)


def _mixture(model: nn.Module) -> dict[str, Any]:
    """The fields that describe the model's mixtures, which must all be alike."""
    layers = [layer for _, layer in moe_layers(model)]
    if not layers:
        return {"method": None}
    first = layers[0]
    alike = all(type(layer) is type(first) and layer.config == first.config for layer in layers)
    require(alike, "model", type(model).__name__, "one with equal mixtures: a configuration describes only one")
    composed = isinstance(first, ComposedMoE)
    method = None if composed else method_of(first)
    require(composed or method is not None, "layer", type(first).__name__, "of a registered method")
    options = {name: value for name, value in to_plain(first.config).items() if name != "dim"}
    return {
        "method": "intbmoe" if composed else method.name,
        "method_options": options,
        "precomposed": composed,
        "state_shapes": state_shapes(model),
    }
