"""Continuing prompts token by token: which tokens are read together, and how the next one is chosen."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from intbmoe.checks import require, require_positive_int
from intbmoe.layer import moe_layers
from intbmoe.models.causal import check_mask
from intbmoe.precision import wide
from intbmoe.settings import Checked, MustBe, PositiveInt


@dataclass(frozen=True, kw_only=True)
class Sampling(Checked):
    """How the next token is chosen. Greedy by default: the likeliest, of equals the one with the lowest id."""

    temperature: Annotated[float, MustBe("0 (greedy) or a positive finite number", lambda value: value >= 0)] = 0.0
    """Draw from softmax(logits / temperature); 0 takes the likeliest."""
    top_k: PositiveInt | None = None
    """Draw among the k likeliest; of equals, the lower ids."""
    top_p: Annotated[float, MustBe("above 0 and at most 1", lambda value: 0 < value <= 1)] | None = None
    """Draw among the likeliest that together have this probability, the one that reaches it included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        idle = self.temperature == 0 and not (self.top_k is None and self.top_p is None)
        require(not idle, "temperature", self.temperature, "positive with top_k or top_p, which greedy choice ignores")

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """(B, V) → (B,), the chosen ids."""
        if self.temperature == 0:
            return logits.argmax(-1)
        ordered, ids = wide(logits).sort(dim=-1, descending=True, stable=True)
        ordered = ordered[:, : self.top_k]
        likely = ((ordered - ordered[:, :1]) / self.temperature).softmax(-1)
        if self.top_p is not None:
            before = likely.cumsum(-1) - likely
            likely = torch.where(before < self.top_p, likely, 0)
        return ids.gather(-1, torch.multinomial(likely, 1, generator=generator)).squeeze(-1)


class Prompts(NamedTuple):
    """Prompts that are read and continued together."""

    rows: Tensor  # (b,), where they stand in the whole batch
    ids: Tensor  # (b, T)
    mask: Tensor | None  # (b, T) bool, False at padding; None without padding


def stream(
    model: nn.Module,
    ids: Tensor,
    mask: Tensor | None,
    max_new_tokens: int,
    stop: int | None,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    """``Llama.stream``. Arguments are checked here, at the call; the model runs when the first id is asked for."""
    require_positive_int("max_new_tokens", max_new_tokens)
    if stop is not None:
        known = isinstance(stop, int) and 0 <= stop < model.config.vocabulary
        require(known, "stop", stop, f"an id of the vocabulary, 0 to {model.config.vocabulary - 1}")
    _check_prompts(ids, mask)
    # A mixture with a memory may count positions from the first it is given, so that padding before a prompt would
    # change what it does: there, only prompts of one length are read together, and none is padded.
    remembers = any(layer.new_state(1) is not None for _, layer in moe_layers(model))
    if remembers and mask is not None:
        together = _by_length(ids, mask)
    else:  # attention needs no mask where nothing is padded
        padding = None if mask is None or mask.all() else mask
        together = [Prompts(torch.arange(len(ids), device=ids.device), ids, padding)]
    return _steps(model, together, max_new_tokens, stop, sampling, generator)


def _check_prompts(ids: Tensor, mask: Tensor | None) -> None:
    if ids.dim() != 2 or 0 in ids.shape:
        raise ValueError(f"ids have shape {tuple(ids.shape)}: expected (batch, tokens), a token or more in each prompt")
    check_mask(mask, ids.shape)
    if mask is None:
        return
    wrong = ~(mask[:, -1] & (mask[:, 1:] >= mask[:, :-1]).all(1))
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"the mask of prompt {row} has padding after a token, or no token: "
            f"a prompt is continued from its end, so pad on the left (mask False, …, False, True, …, True)"
        )


def _by_length(ids: Tensor, mask: Tensor) -> list[Prompts]:
    """The prompts of each length, without their padding."""
    lengths = mask.sum(1)
    rows = {length: (lengths == length).nonzero().flatten() for length in lengths.unique().tolist()}
    return [Prompts(rows[length], ids[rows[length], ids.shape[1] - length :], None) for length in rows]


def _steps(
    model: nn.Module,
    together: list[Prompts],
    max_new_tokens: int,
    stop: int | None,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    # The last id is never read.
    caches = [model.new_cache(len(prompts.ids), prompts.ids.shape[1] + max_new_tokens - 1) for prompts in together]
    order = torch.cat([prompts.rows for prompts in together]).argsort()
    finished = torch.zeros_like(order, dtype=torch.bool)
    unread = [(prompts.ids, prompts.mask) for prompts in together]
    for _ in range(max_new_tokens):
        logits = [model.next_logits(*new, cache) for new, cache in zip(unread, caches, strict=True)]
        chosen = sampling.choose(torch.cat(logits)[order], generator)
        if stop is not None:
            chosen = torch.where(finished, stop, chosen)
            finished = chosen == stop
        unread = [(chosen[prompts.rows].unsqueeze(1), None) for prompts in together]
        yield chosen
        if stop is not None and finished.all():
            return
