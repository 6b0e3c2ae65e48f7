"""``IntBMoEForImageClassification``: the Vision Transformer of ``models/vit.py`` as a transformers model."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils.generic import can_return_tuple

from intbmoe.huggingface.configuration import IntBMoEImageConfig
from intbmoe.huggingface.mixture import IGNORED, MixtureModel
from intbmoe.layer import MoELayer
from intbmoe.models.vit import Block, ViT


class IntBMoEBlock(GradientCheckpointingLayer, Block):
    """A block whose activations transformers can recompute in backward."""


class IntBMoEViT(ViT):
    block_type = IntBMoEBlock


class IntBMoEForImageClassification(MixtureModel):
    """From images to class scores, with any registered method in some of the blocks.

    In training, a forward with ``labels`` returns the loss including the method's auxiliary losses.
    """

    config: IntBMoEImageConfig
    config_class = IntBMoEImageConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _no_split_modules: ClassVar = ["IntBMoEBlock"]
    starts_itself: ClassVar = (MoELayer, ViT)  # initialised as in the paper, not by transformers' rule for nn.Linear

    def __init__(self, config: IntBMoEImageConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vit = self._make_vit()
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.vit.patch_embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.vit.patch_embed = value

    def _make_vit(self) -> ViT:
        return IntBMoEViT(self.config.backbone(), None if self.config.method is None else self.config.make_ffn)

    def _reset(self, module: nn.Module) -> None:
        if not isinstance(module, ViT):
            return super()._reset(module)
        with torch.device(next(module.parameters()).device):
            fresh = self._make_vit().state_dict()
        for name, tensor in module.state_dict().items():
            if tensor.shape == fresh[name].shape:  # others have a checkpoint's shape and are loaded from it
                tensor.copy_(fresh[name])
        return None

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> ImageClassifierOutput:
        """(B, channels, H, W) → (B, classes); hidden states are (B, 1 + T, d), the class token first."""
        x = self.vit.embed(pixel_values)
        states = [x]
        for block in self.vit.blocks:
            x = block(x)
            states.append(x)
        logits = self.vit.classify(x)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels, logits, self.config, **kwargs)
            loss, _ = self.collect_losses(loss, labels.ne(IGNORED).sum(), kwargs.get("num_items_in_batch"))
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=tuple(states) if wanted else None)
