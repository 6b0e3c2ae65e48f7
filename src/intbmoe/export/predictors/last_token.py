"""The backbone's output at one token of each sequence, for no more work than that takes.

After the last attention tokens no longer meet: the last FFN and the head, themselves mixtures, are computed for that
one token instead of all. In a model of two layers this leaves one mixture of three to run over the sequence.
"""

import torch
from torch import Tensor

from intbmoe.layer import moe_layers
from intbmoe.models.causal import apply_ffn, visible_tokens
from intbmoe.models.recommender import Recommender


def ends_token_by_token(backbone: Recommender) -> bool:
    """Whether the last FFN and the head look at single tokens; a mixture with a memory looks at earlier ones too."""
    last = (backbone.blocks[-1].ffn, backbone.head)
    return all(layer.new_state(1) is None for ffn in last for _, layer in moe_layers(ffn))


def output_at(backbone: Recommender, x: Tensor, mask: Tensor, places: Tensor, filled: Tensor | None = None) -> Tensor:
    """(B, T, d) tokens, (B, T) validity, (B,) a valid place in each → (B, d), ``backbone(x, mask)`` at these places.

    ``filled`` (B,) is False for sequences that are padding as a whole, which no mixture counts; None: there are none.
    """
    visible = visible_tokens(mask)
    x = torch.where(mask.unsqueeze(-1), x, 0)
    *before, last = backbone.blocks
    for block in before:
        x = block(x, mask, visible)
    x = x + last.attn(last.norm1(x), visible)
    x = x[torch.arange(len(x), device=x.device), places].unsqueeze(1)
    valid = None if filled is None else filled.unsqueeze(1)
    x = x + apply_ffn(last.ffn, last.norm2(x), valid)
    return apply_ffn(backbone.head, backbone.norm(x), valid).squeeze(1)
