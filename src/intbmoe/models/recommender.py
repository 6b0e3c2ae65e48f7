"""The causal Transformer of the paper's travel experiments, from embedded tokens to predicted embeddings.

Letters: ``B`` sequences, ``T`` tokens, ``d`` width, ``L`` the longest sequence.

    layer    x ← x + Attention(LN(x)),   x ← x + FFN(LN(x))
    attention of token t over s ≤ t:  softmax_s(q_t·k_s / √w + β_{t−s}) v_s       β: one per head and distance
    output   head(LN(x))

``make_ffn`` makes the FFNs *and* the head; without it they are GELU FFNs:

    model = Recommender(RecommenderConfig(), lambda: intbmoe.create("switch", 96, 384, experts=33))

``make_head`` makes a different head. A head that takes a task's vector (``layer(x, conditioning=vector)``) predicts for
one task at a time, from ``states``, which all tasks share.

The paper says that the head is a mixture too, but not what the dense model has there. Here it is an FFN like the
others, so that models differ only in their FFNs. A linear map would have 64,896 fewer parameters.

As in the released code: linear maps with biases, LayerNorm, and 2L − 1 entries of β per head, initialised as
N(0, 0.02²), of which a causal model reads the L with t ≥ s. There are two differences. The released code has one output
LayerNorm per layer but uses only the last; only that one is kept here. Sequences run from old to new here, and from new
to old there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.checks import require
from intbmoe.models.causal import apply_ffn, check_mask, remembers, require_causal, visible_tokens
from intbmoe.registry import create
from intbmoe.settings import Checked, Positive, PositiveInt

BIAS_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class RecommenderSizes(Checked):
    """Sizes that a model around the backbone shares with it; the defaults are the paper's on IntTravel."""

    dim: PositiveInt = 96
    """d, the width of a token."""
    depth: PositiveInt = 8
    """The number of Transformer blocks."""
    heads: PositiveInt = 1
    """Attention heads per block."""
    hidden: PositiveInt = 384
    """Inner width of the dense FFNs, including the head."""
    ffn_std: Positive | None = None
    """Standard deviation of the dense FFNs' initial weights; None to initialise like nn.Linear, as mixtures do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.dim % self.heads == 0, "heads", self.heads, f"a divisor of dim ({self.dim})")


@dataclass(frozen=True, kw_only=True)
class RecommenderConfig(RecommenderSizes):
    """Sizes of the backbone."""

    max_length: PositiveInt = 126
    """L, the longest sequence: by default 40 sessions of three tokens and six profile tokens."""


class Attention(nn.Module):
    """Causal multi-head self-attention with a learned bias for each distance."""

    DECAY_GROUPS: ClassVar = {"relative_bias": "positions"}

    def __init__(self, config: RecommenderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.dim, config.dim)
        self.key = nn.Linear(config.dim, config.dim)
        self.value = nn.Linear(config.dim, config.dim)
        self.output = nn.Linear(config.dim, config.dim)
        self.relative_bias = nn.Parameter(torch.empty(config.heads, 2 * config.max_length - 1))
        nn.init.normal_(self.relative_bias, std=BIAS_STD)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """(B, T, d) tokens, (B or 1, 1, T, T) visibility → (B, T, d)."""
        maps = (self.query, self.key, self.value)
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in maps)
        bias = torch.where(visible, self.bias(x.shape[1]), -torch.inf).to(q.dtype)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.output(seen.transpose(1, 2).flatten(2))

    def bias(self, tokens: int) -> Tensor:
        """(heads, T, T), β_{t−s} at row t and column s: entry L − 1 + s − t of the table."""
        places = torch.arange(tokens, device=self.relative_bias.device)
        middle = self.relative_bias.shape[1] // 2
        return self.relative_bias[:, middle + places.unsqueeze(0) - places.unsqueeze(1)]


class Block(nn.Module):
    """A pre-norm Transformer block."""

    def __init__(self, config: RecommenderConfig, ffn: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim)
        self.ffn = ffn

    def forward(self, x: Tensor, mask: Tensor | None, visible: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), visible)
        return x + apply_ffn(self.ffn, self.norm2(x), mask)


def _dense(config: RecommenderConfig) -> nn.Module:
    layer = create("dense", config.dim, config.hidden)
    if config.ffn_std is not None:
        for part in (layer.experts.up, layer.experts.down):
            nn.init.normal_(part.weight, std=config.ffn_std)  # biases are already zero
    return layer


class Recommender(nn.Module):
    """From embedded tokens to a prediction per token. ``make_ffn`` makes FFNs and head; without it all are dense.

    A layer that looks at later tokens is refused, with the reason.
    """

    def __init__(
        self,
        config: RecommenderConfig,
        make_ffn: Callable[[], nn.Module] | None = None,
        make_head: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        make = make_ffn or (lambda: _dense(config))
        self.blocks = nn.ModuleList(Block(config, require_causal(make())) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.dim)
        self.head = require_causal((make_head or make)())

    def forward(self, x: Tensor, mask: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """(B, T, d) tokens, (B, T) bool validity (True: valid; None: all) → (B, T, d), zero at padding.

        Padding may be anywhere and hold anything: no valid token sees it, and no mixture counts it. ``inputs`` are
        extra arguments of the head, such as a task's ``conditioning``.
        """
        return self.predict(self.states(x, mask), mask, **inputs)

    def predict(self, states: Tensor, mask: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """Apply the head to ``states``."""
        y = apply_ffn(self.head, states, mask, **inputs)
        return y if mask is None else torch.where(mask.unsqueeze(-1), y, 0)

    def states(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run everything before the head."""
        c = self.config
        if x.dim() != 3 or x.shape[2] != c.dim or x.shape[1] > c.max_length:
            allowed = f"(batch, tokens, {c.dim}) with at most {c.max_length} tokens"
            raise ValueError(f"x has shape {tuple(x.shape)}: expected {allowed}")
        check_mask(mask, x.shape[:2])
        if mask is None:
            visible = visible_tokens(x.new_ones(1, x.shape[1], dtype=torch.bool))
        else:
            visible = visible_tokens(mask)
            x = torch.where(mask.unsqueeze(-1), x, 0)
        for block in self.blocks:
            x = block(x, mask, visible)
        return self.norm(x)

    def ends_token_by_token(self) -> bool:
        """Whether the last FFN and the head work token by token, with no decoding state that covers earlier tokens."""
        return not (remembers(self.blocks[-1].ffn) or remembers(self.head))

    def output_at(
        self, x: Tensor, mask: Tensor, places: Tensor, filled: Tensor | None = None, **inputs: Tensor
    ) -> Tensor:
        """(B, T, d) tokens, (B, T) validity, (B,) a valid place in each → (B, d), ``forward`` at these places.

        After the last attention, tokens no longer interact, so the last FFN and the head, which may be mixtures, are
        computed for that one token only. This requires ``ends_token_by_token()``. ``filled`` (B,) is False for
        sequences of only padding, which no mixture counts; None if there are none.
        """
        visible = visible_tokens(mask)
        x = torch.where(mask.unsqueeze(-1), x, 0)
        *before, last = self.blocks
        for block in before:
            x = block(x, mask, visible)
        x = x + last.attn(last.norm1(x), visible)
        x = x[torch.arange(len(x), device=x.device), places].unsqueeze(1)
        valid = None if filled is None else filled.unsqueeze(1)
        x = x + apply_ffn(last.ffn, last.norm2(x), valid)
        return apply_ffn(self.head, self.norm(x), valid, **inputs).squeeze(1)
