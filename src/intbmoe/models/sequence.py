"""Plain item sequences with the recommender's backbone: which of all items comes next.

Letters: ``B`` sequences, ``T`` items each, ``d`` width, ``V`` items in all.

    input    x_t = dropout(√d · W[i_t])                                    W (V, d): one vector per item
    output   y = dropout(Recommender(x))                                   mixtures in every FFN and the head
    scores   P(i | i_1 … i_t) = softmax_i(W[i]·y_t + b_i)                  the same vectors W

People return: at least half of all check-ins are at a place the person has been to. With ``copy`` the model can also
point at an item of the history, as pointer and copy networks do (Vinyals et al., 2015; Gu et al., 2016):

    a_ts     = softmax_{s ≤ t}([W[i_s] ‖ y_{s−1}]·Q y_t / √d + β_{t−s})    y_0 = 0
    P(i | …) = (1 − g_t) · softmax_i(W[i]·y_t + b_i) + g_t · Σ_{s: i_s = i} a_ts,      g_t = σ(w·y_t + c)

The pointer considers the item, how similar the state before it was to the current state, and how long ago it was. Q and
β start at 0, where the second term is the share of each item in the history, like a visit counter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.models.causal import visible_tokens
from intbmoe.models.recommender import Recommender, RecommenderConfig
from intbmoe.precision import autocast_off, wide
from intbmoe.settings import Checked, Positive, PositiveInt, Share

PADDING = -1
INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class SequenceConfig(Checked):
    """Sizes of the model."""

    items: PositiveInt | None
    """V, the number of items, which are numbered from 0; None for as many as the data has."""
    length: PositiveInt = 50
    """The largest number of items of a history that the model reads."""
    dim: PositiveInt = 96
    """d, the width of a token."""
    depth: PositiveInt = 2
    """The number of Transformer blocks."""
    heads: PositiveInt = 1
    """Attention heads per block."""
    hidden: PositiveInt = 384
    """Inner width of the dense FFNs, including the head."""
    ffn_std: Positive | None = None
    """Standard deviation of the dense FFNs' initial weights; None to initialise like nn.Linear, as mixtures do."""
    dropout: Share = 0.0
    """Dropout rate of the backbone's inputs and outputs."""
    copy: bool = False
    """Whether the model can point at an item of the history."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.backbone()  # checks that the sizes fit together

    def backbone(self) -> RecommenderConfig:
        sizes = {name: getattr(self, name) for name in ("dim", "depth", "heads", "hidden", "ffn_std")}
        return RecommenderConfig(**sizes, max_length=self.length)


class SequenceModel(nn.Module):
    """From items to the next item. ``make_ffn`` makes each FFN and the head; without it all are dense."""

    DECAY_GROUPS: ClassVar = {"item_bias": "biases"}

    def __init__(self, config: SequenceConfig, make_ffn: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.config = config
        self.items = nn.Embedding(config.items, config.dim)
        nn.init.normal_(self.items.weight, std=INIT_STD)
        self.item_bias = nn.Parameter(torch.zeros(config.items))
        self.dropout = nn.Dropout(config.dropout)
        self.backbone = Recommender(config.backbone(), make_ffn)
        self.pointer = Pointer(config) if config.copy else None

    def forward(self, items: Tensor, targets: Tensor | None = None) -> Tensor:
        """(B, T) items from old to new, at least one, then ``PADDING`` → (B, V): log P(next item) of each sequence.

        With ``targets`` (B, T), ``PADDING`` for none, return (B, T), log P(target | items up to its place), and 0 where
        there is none. In training only this is computed.
        """
        mask = items != PADDING
        ids = items.clamp(min=0)
        x = self.dropout(self.items(ids) * self.config.dim**0.5)
        y = self.dropout(self.backbone(x, mask))
        with autocast_off(y):  # a coarser type would turn different scores into ties
            if targets is None:
                return self._next(wide(y), ids, mask)
            return self._targets(wide(y), ids, mask, targets)

    def _targets(self, y: Tensor, ids: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        wanted = targets != PADDING
        every_place = computes_every_place(y)

        def places(x: Tensor) -> Tensor:
            return x.flatten(0, 1) if every_place else x[wanted]

        found = self._generated(places(y)).gather(1, places(targets).clamp(min=0).unsqueeze(1)).squeeze(1)
        if self.pointer is not None:
            attention, gate = self.pointer(y, self._keys(y, ids), visible_tokens(mask).squeeze(1))
            copied = torch.where(ids.unsqueeze(1) == targets.unsqueeze(2), attention, 0).sum(2)
            found = _mix(found, places(copied), places(gate))
        if every_place:
            return torch.where(wanted, found.view_as(wanted), 0)
        return found.new_zeros(wanted.shape).masked_scatter(wanted, found)

    def _next(self, y: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        last = mask.sum(1, keepdim=True) - 1
        now = y.gather(1, last.unsqueeze(2).expand(-1, -1, y.shape[2]))
        generated = self._generated(now.squeeze(1))
        if self.pointer is None:
            return generated
        attention, gate = self.pointer(now, self._keys(y, ids), mask.unsqueeze(1), last)
        copied = torch.zeros_like(generated).scatter_add(1, ids, attention.squeeze(1))
        return _mix(generated, copied, gate)

    def _keys(self, y: Tensor, ids: Tensor) -> Tensor:
        """(B, T, 2d): each item's vector, and the output at the place before it, which had to predict it."""
        return torch.cat([wide(self.items(ids)), F.pad(y, (0, 0, 1, 0))[:, :-1]], -1)

    def _generated(self, y: Tensor) -> Tensor:
        """(N, d) → (N, V), log-probabilities without the pointer."""
        return F.log_softmax(F.linear(y, wide(self.items.weight), wide(self.item_bias)), -1)


class Pointer(nn.Module):
    """Decides whether to copy from the history, and from where."""

    DECAY_GROUPS: ClassVar = {"distance": "positions"}

    def __init__(self, config: SequenceConfig) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(config.dim, 2 * config.dim))
        self.distance = nn.Parameter(torch.zeros(config.length))
        self.gate = nn.Linear(config.dim, 1)

    def forward(self, y: Tensor, keys: Tensor, visible: Tensor, places: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, Q, d) outputs, (B, T, 2d) keys, (B, Q, T) visibility → (B, Q, T) attention, (B, Q) gate logits.

        ``places`` (B, Q) are the places of the outputs; None if the outputs are those of all T places.
        """
        steps = torch.arange(keys.shape[1], device=keys.device)
        ago = (steps.unsqueeze(1) if places is None else places.unsqueeze(2)) - steps
        match = torch.einsum("bqd,de,bte->bqt", y, wide(self.query), keys) / y.shape[2] ** 0.5
        scores = match + wide(self.distance)[ago.clamp(min=0)]
        attention = torch.where(visible, scores, -torch.inf).softmax(-1)
        return attention, F.linear(y, wide(self.gate.weight), wide(self.gate.bias)).squeeze(-1)


def computes_every_place(y: Tensor) -> bool:
    """Whether scores are also computed at places without a target, and not used.

    A GPU would have to wait to learn how many places there are, and no CUDA graph could be captured; a CPU is faster
    without them.
    """
    return y.is_cuda


def _mix(generated: Tensor, copied: Tensor, gate: Tensor) -> Tensor:
    """log((1 − g)·exp(generated) + g·copied) with g = σ(gate), without overflow, and without NaN at copied = 0."""
    gate = gate.view(gate.shape[0], *[1] * (generated.dim() - 1))
    some = copied > 0
    log_copied = torch.where(some, copied, 1).log()
    mixed = torch.logaddexp(F.logsigmoid(-gate) + generated, F.logsigmoid(gate) + log_copied)
    return torch.where(some, mixed, F.logsigmoid(-gate) + generated)
