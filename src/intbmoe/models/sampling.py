"""Choose the next token. ``B`` texts, ``V`` vocabulary.

Random numbers are an input, one for each text and token; the number's place in the cumulative probabilities decides.
So the choice can be part of a CUDA graph, and a seed gives the same tokens with and without a graph.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from intbmoe.checks import require
from intbmoe.settings import Checked, MustBe, PositiveInt


@dataclass(frozen=True, kw_only=True)
class Sampling(Checked):
    """How the next token is chosen. Greedy by default: the most likely one, with ties to the lowest id."""

    temperature: Annotated[float, MustBe("0 (greedy) or a positive finite number", lambda value: value >= 0)] = 0.0
    """Draw from softmax(logits / temperature); 0 takes the most likely token."""
    top_k: PositiveInt | None = None
    """Draw among the k most likely tokens; ties go to the lower ids."""
    top_p: Annotated[float, MustBe("above 0 and at most 1", lambda value: 0 < value <= 1)] | None = None
    """Draw among the smallest set of most likely tokens whose probabilities sum to at least this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        idle = self.temperature == 0 and not (self.top_k is None and self.top_p is None)
        require(not idle, "temperature", self.temperature, "positive with top_k or top_p: greedy decoding ignores them")

    @property
    def narrowed(self) -> bool:
        return not (self.top_k is None and self.top_p is None)

    def limits(self, vocabulary: int) -> tuple[float, float]:
        """``top_k`` and ``top_p`` as numbers; None becomes a number that excludes nothing."""
        return float(self.top_k or vocabulary), 2.0 if self.top_p is None else self.top_p

    def draw(self, count: int, generator: torch.Generator | None, device: torch.device) -> Tensor | None:
        """(count,) random numbers, one for each text; None if the choice is greedy."""
        if self.temperature == 0:
            return None
        device = device if generator is None else generator.device
        return torch.rand(count, dtype=torch.float64, generator=generator, device=device)

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """(B, V) → (B,), the chosen ids."""
        chance = self.draw(len(logits), generator, logits.device)
        if chance is None:
            return logits.argmax(-1)
        chance = chance.to(logits.device)
        top_k, top_p = (torch.full_like(chance, limit) for limit in self.limits(logits.shape[1]))
        temperature = torch.full_like(chance, self.temperature)
        return choose(logits, temperature, chance, (top_k, top_p) if self.narrowed else None)


def choose(logits: Tensor, temperature: Tensor, chance: Tensor, limits: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """(B, V) → (B,): the most likely token if the temperature is 0, otherwise the one whose interval holds ``chance``.

    ``temperature``, ``chance`` in [0, 1) and the ``limits`` top_k and top_p are (B,) in float64.
    """
    greedy = logits.argmax(-1)
    scores, order = logits.double(), None
    if limits is not None:
        top_k, top_p = (limit.unsqueeze(1) for limit in limits)
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(logits.shape[1], device=logits.device)
        scores = torch.where(rank < top_k, scores, -torch.inf)
    warm = temperature.unsqueeze(1)
    likely = ((scores - scores.amax(-1, keepdim=True)) / torch.where(warm > 0, warm, 1)).softmax(-1)
    last = logits.shape[1] - 1
    if limits is not None:
        likely = torch.where(likely.cumsum(-1) - likely < top_p, likely, 0)
        last = ((likely > 0).sum(-1) - 1).clamp(min=0)  # a row without a text has top_k 0, so no likely token
    summed = likely.cumsum(-1)
    drawn = (summed <= chance.unsqueeze(1) * summed[:, -1:]).sum(-1).clamp(max=last)
    if order is not None:
        drawn = order.gather(1, drawn.unsqueeze(1)).squeeze(1)
    return torch.where(temperature > 0, drawn, greedy)
