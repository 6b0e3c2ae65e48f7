"""The eight-layer DeiT-Tiny-style Vision Transformer of the paper's image experiments.

Touvron et al., "Training data-efficient image transformers & distillation through attention", ICML 2021, cut from
twelve layers to eight. Letters: ``B`` images, ``T`` patches, ``d`` width; token 0 is the class token.

    tokens   x = [class ‖ patches W + b] + positions
    block    x ← x + path(Attention(LN(x))),   x ← x + path(FFN(LN(x)))          path: stochastic depth
    output   head(LN(x)_0)

A plain block sends all tokens through one GELU FFN. In an MoE block the patch tokens go through the mixture and the
class token through a separate GELU FFN:

    model = ViT(ViTConfig(), lambda: intbmoe.create("switch", 192, 768, experts=17))

Parameters have timm's names, so that weights of its DeiT models load without renaming; the mixture of block i is
``blocks.i.moe`` and its class-token FFN ``blocks.i.mlp``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.checks import require
from intbmoe.settings import Checked, Positive, PositiveInt, Share

NORM_EPS = 1e-6
INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class ViTConfig(Checked):
    """Sizes of the backbone; the defaults are the paper's on ImageNet."""

    image_size: PositiveInt = 224
    """Pixels along each side of an image."""
    patch_size: PositiveInt = 16
    """Pixels along each side of a patch; a patch becomes one token."""
    channels: PositiveInt = 3
    """1 for grey, 3 for colour."""
    classes: PositiveInt | None = 1000
    """The number of classes; None for as many as the data has."""
    dim: PositiveInt = 192
    """d, the width of a token."""
    depth: PositiveInt = 8
    """The number of Transformer blocks."""
    heads: PositiveInt = 3
    """Attention heads per block."""
    hidden: PositiveInt = 768
    """Inner width of the dense FFNs."""
    moe_layers: tuple[int, ...] = (0, 2, 4, 6)
    """The blocks that hold a mixture, if the model is given one."""
    drop_path: Share = 0.1
    """Rate of stochastic depth in the last block; it grows linearly from 0 in the first."""
    ffn_std: Positive | None = INIT_STD
    """Standard deviation of the dense FFNs' initial weights; None to initialise like nn.Linear, as mixtures do."""
    class_token_ffn: bool = True
    """Whether the class token has its own dense FFN in an MoE block; False sends it through the mixture too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        divides = self.image_size % self.patch_size == 0
        require(divides, "patch_size", self.patch_size, f"a divisor of image_size ({self.image_size})")
        require(self.dim % self.heads == 0, "heads", self.heads, f"a divisor of dim ({self.dim})")
        layers = self.moe_layers
        known = len(set(layers)) == len(layers) and all(layer in range(self.depth) for layer in layers)
        require(known, "moe_layers", layers, f"distinct block numbers from 0 to {self.depth - 1}")

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def mixture_tokens(self) -> int:
        """The number of an image's tokens that go through a mixture."""
        return self.patches + (not self.class_token_ffn)


def _linear(inputs: int, outputs: int, std: float | None = INIT_STD) -> nn.Linear:
    """A linear map with zero bias and DeiT's truncated normal weights, or ``nn.Linear``'s if ``std`` is None."""
    layer = nn.Linear(inputs, outputs)
    if std is not None:
        nn.init.trunc_normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)
    return layer


class PatchEmbed(nn.Module):
    """Non-overlapping patches of an image, each mapped to a token."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(config.channels, config.dim, config.patch_size, stride=config.patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) → (B, T, d), patches row by row."""
        return self.proj(images).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention over all tokens."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = _linear(config.dim, 3 * config.dim)
        self.proj = _linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The dense FFN, ``fc2(GELU(fc1 x))``."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = _linear(config.dim, config.hidden, config.ffn_std)
        self.fc2 = _linear(config.hidden, config.dim, config.ffn_std)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class DropPath(nn.Module):
    """Stochastic depth: in training a branch is dropped at random for a whole image, and scaled up if it is kept."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        kept = torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device) >= self.rate
        return x * kept.to(x.dtype) / (1 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate:.3g}"


class Block(nn.Module):
    """A pre-norm Transformer block; with ``moe``, patch tokens go through ``moe`` and the class token through ``mlp``.

    Without ``class_token_ffn`` a block has only one of the two, for all tokens.
    """

    def __init__(self, config: ViTConfig, drop_path: float, moe: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim, eps=NORM_EPS)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim, eps=NORM_EPS)
        self.mlp = Mlp(config) if moe is None or config.class_token_ffn else None
        self.moe = moe
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1 + T, d) → (B, 1 + T, d)."""
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.feed_forward(self.norm2(x)))

    def feed_forward(self, x: Tensor) -> Tensor:
        if self.moe is None:
            return self.mlp(x)
        if self.mlp is None:
            return self.moe(x)
        return torch.cat([self.mlp(x[:, :1]), self.moe(x[:, 1:])], dim=1)


class ViT(nn.Module):
    """From images to class scores. ``make_ffn`` makes the mixture of each MoE layer; without it the model is dense."""

    DECAY_GROUPS: ClassVar = {"cls_token": "positions", "pos_embed": "positions"}
    block_type: ClassVar[type[Block]] = Block

    def __init__(self, config: ViTConfig, make_ffn: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + config.patches, config.dim))
        for parameter in (self.cls_token, self.pos_embed):
            nn.init.trunc_normal_(parameter, std=INIT_STD)
        if make_ffn is not None:
            require(bool(config.moe_layers), "moe_layers", config.moe_layers, "at least one block number")
        moe_layers = config.moe_layers if make_ffn is not None else ()
        rates = torch.linspace(0, config.drop_path, config.depth, device="cpu").tolist()
        self.blocks = nn.ModuleList(
            self.block_type(config, rate, make_ffn() if layer in moe_layers else None)
            for layer, rate in enumerate(rates)
        )
        self.norm = nn.LayerNorm(config.dim, eps=NORM_EPS)
        self.head = _linear(config.dim, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) → (B, classes)."""
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.classify(x)

    def embed(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) → (B, 1 + T, d), the input of the first block."""
        side, channels = self.config.image_size, self.config.channels
        if images.dim() != 4 or images.shape[1:] != (channels, side, side):
            expected = f"(batch, {channels}, {side}, {side})"
            raise ValueError(f"images have shape {tuple(images.shape)}: expected {expected}")
        patches = self.patch_embed(images)
        return torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], dim=1) + self.pos_embed

    def classify(self, x: Tensor) -> Tensor:
        """(B, 1 + T, d), the output of the last block → (B, classes)."""
        return self.head(self.norm(x)[:, 0])


def class_token_ffns(model: ViT) -> int:
    """Parameters that only the class token uses."""
    own = [block.mlp for block in model.blocks if block.moe is not None and block.mlp is not None]
    return sum(parameter.numel() for mlp in own for parameter in mlp.parameters())
