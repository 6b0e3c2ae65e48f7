"""Vision Transformers with mixtures as timm models: ``import intbmoe.timm``, then ``timm.create_model``.

    intbmoe_vit_tiny_patch16_224     the paper's: DeiT-Tiny cut to eight blocks, with a mixture in every other one
    intbmoe_vit_small_patch16_224    ViT-Small with twelve blocks, a mixture in every other one
    switch_vit_tiny_patch16_224, …   the same with any other registered method, within the paper's budget

As in the paper, patches go through the mixture, and the class token (and registers) through a separate FFN, so that
with equal weights the logits equal those of ``models/vit.py``; ``class_token_apart=False`` sends all tokens through the
mixture. Training needs ``intbmoe.aux_loss`` and the step hooks, as always (``docs/in-your-framework.md``).
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from intbmoe.budget import within_budget
from intbmoe.checks import require
from intbmoe.foreign import import_torchvision
from intbmoe.layer import MoELayer, moe_layers
from intbmoe.registry import create, list_methods

import_torchvision(required=False)

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD  # noqa: E402
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, register_notrace_module  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402
from timm.models.vision_transformer import checkpoint_filter_fn as vit_filter_fn  # noqa: E402

__all__ = ["MoEVisionTransformer", "PatchMixture"]

DEFAULT_CFG = {
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "pool_size": None,
    "crop_pct": 0.9,
    "interpolation": "bicubic",
    "fixed_input_size": True,
    "mean": IMAGENET_DEFAULT_MEAN,
    "std": IMAGENET_DEFAULT_STD,
    "first_conv": "patch_embed.proj",
    "classifier": "head",
    "license": "apache-2.0",
}
SIZES = {
    "tiny": {"patch_size": 16, "embed_dim": 192, "depth": 8, "num_heads": 3},
    "small": {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6},
}


@register_notrace_module  # torch.fx treats it as one operation: how many rows an expert gets depends on the data
class PatchMixture(nn.Module):
    """A block's feed-forward part: patches through ``moe``, the ``prefix`` tokens before them through ``mlp``."""

    def __init__(self, moe: MoELayer, mlp: nn.Module | None, prefix: int) -> None:
        super().__init__()
        self.moe, self.mlp, self.prefix = moe, mlp, prefix

    def forward(self, x: Tensor) -> Tensor:
        if self.mlp is None:
            return self.moe(x)
        return torch.cat([self.mlp(x[:, : self.prefix]), self.moe(x[:, self.prefix :])], dim=1)

    def init_weights(self) -> None:
        """Called by timm after its own initialisation, which this replaces by the mixture's."""
        self.moe.reset_parameters()


class MoEVisionTransformer(VisionTransformer):
    """timm's ViT with a mixture in some blocks; all other arguments are timm's."""

    def __init__(
        self,
        *,
        method: str = "intbmoe",
        experts: int = 16,
        moe_blocks: Collection[int] | None = None,
        class_token_apart: bool = True,
        moe_options: Mapping[str, Any] | None = None,
        weight_init: str = "",
        fix_init: bool = False,
        **arguments: Any,
    ) -> None:
        """``experts`` is the paper's E, from which ``match_budget`` derives the layers' options; ``moe_options`` add to
        them or override them. ``moe_blocks`` defaults to every other block, starting with the first."""
        require(not fix_init, "fix_init", fix_init, "False: it would rescale FFNs that mixtures have replaced")
        super().__init__(**arguments, weight_init="skip")
        depth = len(self.blocks)
        chosen = range(0, depth, 2) if moe_blocks is None else moe_blocks
        known = all(block in range(depth) for block in chosen)
        require(known, "moe_blocks", moe_blocks, f"block numbers from 0 to {depth - 1}")
        prefix = self.num_prefix_tokens if class_token_apart else 0
        tokens = self.patch_embed.num_patches + self.num_prefix_tokens - prefix
        own, budget = moe_options or {}, {"experts": experts, "tokens": tokens}
        for block in chosen:
            mlp = self.blocks[block].mlp
            options = within_budget(method, self.embed_dim, mlp.fc1.out_features, own, **budget)
            with torch.device(mlp.fc1.weight.device):
                moe = create(method, self.embed_dim, **options)
            self.blocks[block].mlp = PatchMixture(moe.to(mlp.fc1.weight.dtype), mlp if prefix else None, prefix)
        self.weight_init_mode = "reset" if weight_init == "skip" else weight_init
        if weight_init != "skip":
            self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """timm's parameters without weight decay, plus routers, which the paper's recipe does not decay either."""
        spared = {
            f"{name}.{parameter}"
            for name, layer in moe_layers(self)
            for parameter, _ in layer.named_parameters()
            if parameter.partition(".")[0] in layer.DECAY_GROUPS
        }
        return super().no_weight_decay() | spared


def checkpoint_filter_fn(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename the weights of a run (``models/vit.py``) to the names used here; other checkpoints go to timm's filter.

    In a run the mixture is ``blocks.0.moe`` and the class token's FFN ``blocks.0.mlp``; here both are in
    ``blocks.0.mlp``.
    """
    mixed = {match[1] for key in state if (match := re.match(r"blocks\.(\d+)\.moe\.", key))}
    if not mixed:
        return vit_filter_fn(state, model)
    renamed = {}
    for key, tensor in state.items():
        match = re.match(r"blocks\.(\d+)\.(moe|mlp)\.(.*)", key)
        inside = match is not None and match[1] in mixed
        renamed[f"blocks.{match[1]}.mlp.{match[2]}.{match[3]}" if inside else key] = tensor
    return renamed


def _entry_point(name: str, method: str, size: str) -> Callable[..., nn.Module]:
    def build(pretrained: bool = False, **arguments: Any) -> nn.Module:
        return build_model_with_cfg(
            MoEVisionTransformer,
            name,
            pretrained,
            pretrained_filter_fn=checkpoint_filter_fn,
            feature_cfg={"out_indices": arguments.pop("out_indices", 3), "feature_cls": "getter"},
            **{**SIZES[size], "method": method, **arguments},
        )

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"ViT-{size.title()} with 16 × 16 patches and {method} in every other block."
    return build


_NAMES = {f"{method}_vit_{size}_patch16_224": (method, size) for method in list_methods() for size in SIZES}
default_cfgs = generate_default_cfgs({name: dict(DEFAULT_CFG) for name in _NAMES})
for _name, (_method, _size) in _NAMES.items():
    globals()[_name] = register_model(_entry_point(_name, _method, _size))
