"""Lory: one merged expert for each segment of a sequence, with weights that depend on the previous segment.

Zhong, Xia, Chen and Lewis, "Lory: Fully Differentiable Mixture-of-Experts for Autoregressive Language Model
Pre-training", COLM 2024.

    A sequence is cut into segments of S tokens; h̄_n is the mean of segment n, e_n = softmax(W_r h̄_n).
    y_t = f(x_t; Σ_e a_{n,e} θ_e) for t in segment n,  a_n = e_{n−1} for n > 1, all three SwiGLU matrices merged

The first segment has no previous one. The paper gives it a_1 = stop_gradient(e_1): its tokens then see the mean of
their own segment, which includes later tokens (``first_segment="stop_gradient"``). The default here is strictly causal:
a_1 is uniform, 1/E each, so the first segment runs the mean expert. An input of a single segment is therefore not
routed at all, and the router learns nothing from it. If the input length is fixed (``tokens``), a segment that would
hold the whole input is cut to half of it; otherwise such an input causes a warning in training.

Decoding with a state also works by segment. ``generation="prompt"`` is the paper's way to generate: the tokens of the
first call with a state are the prompt, a = softmax(W_r mean of the prompt) is computed once for the prompt and
everything after it, and one expert is merged for the whole request, so that each new token costs as much as a dense FFN
(and the merged weights of every request are kept in memory). The paper finds little difference in quality. Training and
scoring always work by segment.

Choices: T need not be a multiple of S; the last segment is padded. Means are over valid tokens; a segment without any
passes on the weights it was given. Segments are counted by position, including padding, in evaluation too. The router
has no bias. Similarity batching of documents and dense warm-up are not part of the layer. There is no public code to
compare with. Of the merged weight sets, one per segment, only a few exist at a time (the backward pass merges them
again), or none if segments are short for the device (``ops/merged_mm``).
"""

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from intbmoe.layer import MoELayer, OnePer, Quantities, Result
from intbmoe.parts.experts import Composed, ExpertsConfig
from intbmoe.parts.linear import Linear
from intbmoe.parts.state import check_batch
from intbmoe.precision import linear, wide
from intbmoe.registry import register
from intbmoe.settings import PositiveInt


@dataclass(frozen=True, kw_only=True)
class LoryConfig(ExpertsConfig):
    """One merged expert per segment."""

    expert: Literal["gelu", "swiglu"] = "swiglu"
    segment: PositiveInt = 16
    """S, tokens per segment (the Lory paper: 256)."""
    tokens: PositiveInt | None = None
    """The length of every input if it is fixed; a segment at least this long is cut to half of it."""
    first_segment: Literal["uniform", "stop_gradient"] = "uniform"
    """Weights of the first segment: uniform, or computed from the segment itself without gradient (the paper)."""
    generation: Literal["segment", "prompt"] = "segment"
    """Decoding: merge an expert per segment, or one for the whole text from the mean of its prompt (the paper)."""

    @property
    def routing_segment(self) -> int:
        swallows = self.tokens is not None and self.tokens <= self.segment
        return max(1, self.tokens // 2) if swallows else self.segment

    def noncausal_reason(self) -> str | None:
        if self.first_segment == "uniform":
            return None
        return (
            "with first_segment='stop_gradient' Lory merges the first segment's expert by the segment's own mean, "
            "which includes later tokens (first_segment='uniform' is causal)"
        )


@dataclass
class LoryState:
    """A layer's position in a sequence: the open segment so far, and the weights it runs with."""

    position: int  # tokens of the open segment already seen, including masked ones: the same for all sequences
    total: Tensor  # (B, d), the sum of its valid tokens
    count: Tensor  # (B,), the number of its valid tokens
    weights: Tensor  # (B, E), the expert weights in use


@dataclass
class PromptState:
    """The experts merged for a batch of prompts; None before the prompts are read."""

    batch: int
    experts: Composed | None = None


@register("lory", title="Lory", paper="Zhong et al., 2024", participation="dense")
class Lory(MoELayer):
    """One merged expert per segment."""

    Config = LoryConfig
    REPLAYS = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.router = Linear(self.config.dim, self.config.experts, bias=False)
        self.experts = self.config.make_experts()
        self.segment = self.config.routing_segment
        if self.segment != self.config.segment:  # stored, because runs of earlier versions did not cut it
            self.register_buffer("cut_segment", torch.tensor(self.segment))

    @property
    def replay_settings(self) -> tuple | None:
        return (self.segment,)

    def fit_state(self, state: dict[str, Tensor], prefix: str) -> None:
        if self.segment != self.config.segment and f"{prefix}router.weight" in state:
            held = state.setdefault(f"{prefix}cut_segment", torch.tensor(self.config.segment))
            self.segment = int(held)

    def compute(
        self, x: Tensor, mask: Tensor | None, state: LoryState | PromptState | None, dtype: torch.dtype
    ) -> Result:
        if isinstance(state, PromptState):
            return Result(self._by_prompt(x, mask, state, dtype))
        batch, tokens, dim = x.shape
        size = self.segment
        if self.training and state is None and 1 < tokens <= size and not torch.compiler.is_compiling():
            warnings.warn(  # the same text for every length, so that it is shown once
                f"segment={size} holds a whole input of Lory, so nothing in it is routed and the router learns nothing "
                f"from it: choose a segment shorter than the inputs",
                stacklevel=2,
            )
        start = 0 if state is None else state.position
        end = start + tokens
        segments = -(-end // size)
        missing = segments * size - end
        padded = F.pad(x, (0, 0, start, missing)).view(batch, segments, size, dim)
        valid = x.new_ones(batch, tokens, dtype=torch.bool) if mask is None else mask
        count = F.pad(valid, (start, missing)).view(batch, segments, size).sum(2)
        total = wide(padded).sum(2)  # padding is zero
        if state is not None:
            check_batch(len(state.count), batch)
            total = torch.cat([total[:, :1] + state.total.unsqueeze(1), total[:, 1:]], 1)
            count = torch.cat([count[:, :1] + state.count.unsqueeze(1), count[:, 1:]], 1)
        in_force = self._weights(total / count.unsqueeze(-1).clamp(min=1), None if state is None else state.weights)
        if mask is not None or state is not None:
            in_force = _skip_empty(in_force, count > 0)
        y = self.experts.merged(padded.to(dtype).flatten(0, 1), in_force[:, :segments].flatten(0, 1))
        if state is not None:
            done, state.position = end // size, end % size
            state.total, state.count = F.pad(total, (0, 0, 0, 1))[:, done], F.pad(count, (0, 1))[:, done]
            state.weights = in_force[:, done]
        return Result(y.view(batch, segments * size, dim)[:, start:end].contiguous())

    def _weights(self, means: Tensor, given: Tensor | None) -> Tensor:
        """(B, n, d) segment means → (B, n+1, E): row i holds the weights of segment i, the last row of the next one.

        ``given`` (B, E) are the weights of the first segment; None at the start of a sequence. Concatenating before
        slicing keeps the router in the graph if there is only one segment, so that its gradient is zero, not None.
        """
        weights = linear(means, self.router.weight).softmax(-1)
        if given is not None:
            first = given.unsqueeze(1)
        elif self.config.first_segment == "uniform":
            first = weights.new_full((means.shape[0], 1, self.config.experts), 1 / self.config.experts)
        else:
            first = linear(F.pad(means, (0, 0, 0, 1))[:, :1], self.router.weight).softmax(-1).detach()
        return torch.cat([first, weights], 1)

    def _by_prompt(self, x: Tensor, mask: Tensor | None, state: PromptState, dtype: torch.dtype) -> Tensor:
        """The first tokens passed with ``state`` determine the merged expert for themselves and all later tokens."""
        check_batch(state.batch, x.shape[0])
        if state.experts is None:
            count = x.shape[1] if mask is None else mask.sum(1, keepdim=True).clamp(min=1)
            a = linear(wide(x).sum(1) / count, self.router.weight).softmax(-1)  # padding is zero
            state.experts = self.experts.compose(a, dtype)
        return self.experts.composed(x.to(dtype), state.experts)

    def new_state(self, batch: int) -> LoryState | PromptState:
        """The state of ``batch`` new sequences. ``forward`` updates it; gradients flow through it."""
        super().new_state(batch)  # refuses the noncausal form
        c = self.config
        if c.generation == "prompt":
            return PromptState(batch)
        total = wide(self.router.weight.detach().new_zeros(batch, c.dim))
        count = torch.zeros(batch, dtype=torch.int64, device=total.device)
        return LoryState(0, total, count, total.new_full((batch, c.experts), 1 / c.experts))

    def quantities(self) -> Quantities:
        segments = OnePer("segment", tokens=self.segment)
        return Quantities(participation=self.config.experts, execution=1, materialization=segments)


def _skip_empty(in_force: Tensor, filled: Tensor) -> Tensor:
    """Weights (B, n+1, E) in which a segment that is not ``filled`` (B, n) passes on the weights it was given.

    Row i comes from the last filled segment before i, or from row 0. Rows are selected by a sum with 0/1 weights,
    because the backward pass of an index would be a scatter of floats.
    """
    rows = in_force.shape[1]
    own = torch.arange(1, rows, device=filled.device) * filled
    source = F.pad(own, (1, 0)).cummax(1).values
    chosen = source.unsqueeze(-1) == torch.arange(rows, device=filled.device)
    return (chosen.unsqueeze(-1) * in_force.unsqueeze(1)).sum(2)
