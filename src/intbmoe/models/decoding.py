"""Continue prompts token by token: in slots, with a graph for each step, or in a cache sized for the prompts."""

import logging
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from intbmoe.checks import require, require_positive_int
from intbmoe.graphs.recording import CaptureError, ladder
from intbmoe.models.causal import check_mask, remembers
from intbmoe.models.sampling import Sampling
from intbmoe.models.slots import Slots, Text, why_not_captured

KEPT_LENGTH = 256
"""The room in the slots of ``generate`` is a multiple of this, so that prompts of other lengths can reuse graphs."""
log = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """The options of a request besides the prompts; ``Llama.stream`` explains them."""

    max_new_tokens: int
    stop: int | None
    sampling: Sampling
    generator: torch.Generator | None


class Prompts(NamedTuple):
    """Prompts that are read and continued together."""

    rows: Tensor  # (b,), their rows in the whole batch
    ids: Tensor  # (b, T)
    mask: Tensor | None  # (b, T) bool, False at padding; None without padding


def stream(
    model: nn.Module, ids: Tensor, mask: Tensor | None, wanted: Wanted, capture: bool | None
) -> Iterator[Tensor]:
    """``Llama.stream``. Arguments are checked at the call; the model runs when the first id is requested."""
    require_positive_int("max_new_tokens", wanted.max_new_tokens)
    if wanted.stop is not None:
        known = isinstance(wanted.stop, int) and 0 <= wanted.stop < model.config.vocabulary
        require(known, "stop", wanted.stop, f"an id of the vocabulary, 0 to {model.config.vocabulary - 1}")
    _check_prompts(ids, mask)
    model.require_decoding()
    slots = _find_slots(model, ids, wanted, capture)
    if slots is not None:
        return _steps_in_slots(model, slots, ids, mask, wanted)
    # A mixture with a decoding state may count positions from the first token it gets, so padding before a prompt would
    # change its output: for such a model only prompts of equal length are read together, and none is padded.
    if remembers(model) and mask is not None:
        together = _by_length(ids, mask)
    else:  # attention needs no mask if nothing is padded
        padding = None if mask is None or mask.all() else mask
        together = [Prompts(torch.arange(len(ids), device=ids.device), ids, padding)]
    return _steps(model, together, wanted)


def _find_slots(model: nn.Module, ids: Tensor, wanted: Wanted, capture: bool | None) -> Slots | None:
    """The slots that the model kept, or new ones; None if its texts are decoded without slots."""
    if capture is False or (capture is None and ids.device.type != "cuda"):
        return None
    reason = why_not_captured(model)
    if reason is not None:
        if capture:
            raise ValueError(f"capture=True is not possible with this model: {reason}")
        return None
    count, length = len(ids), ids.shape[1] + wanted.max_new_tokens - 1  # the last id is never read
    slots, model.kept_slots = model.kept_slots, None  # no other call may use them in the meantime
    if slots is None or not slots.fits(count, length):
        del slots  # first, so that there is memory for the new ones
        room = length if ids.device.type == "cpu" else -(-length // KEPT_LENGTH) * KEPT_LENGTH
        slots = Slots(model, next(size for size in ladder(2 * count) if size >= count), room)
    try:
        slots.prepare(count, wanted.sampling.narrowed)
    except CaptureError as error:
        if capture:
            raise
        log.warning("generate runs without CUDA graphs, which is slow: the model's step cannot be captured: %s", error)
        return None
    return slots


def _steps_in_slots(
    model: nn.Module, slots: Slots, ids: Tensor, mask: Tensor | None, wanted: Wanted
) -> Iterator[Tensor]:
    max_new_tokens, stop, sampling, generator = wanted
    lengths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(1).tolist()
    prompts = [row[len(row) - length :] for row, length in zip(ids.tolist(), lengths, strict=True)]
    going = [Text(slot, prompt, 0, sampling) for slot, prompt in enumerate(prompts)]
    chosen = [stop] * len(prompts)
    try:
        for step in range(max_new_tokens):
            chances = sampling.draw(len(prompts), generator, ids.device)
            if chances is not None:
                chances = chances.tolist()
                going = [text._replace(chance=chances[text.slot]) for text in going]
            for text, one in zip(going, slots.step(going) if step else slots.read(going), strict=True):
                chosen[text.slot] = one.token
            yield torch.tensor(chosen, device=ids.device)
            going = [text.after(chosen[text.slot]) for text in going if chosen[text.slot] != stop]
            if not going:
                return
    finally:
        model.kept_slots = slots


def _check_prompts(ids: Tensor, mask: Tensor | None) -> None:
    if ids.dim() != 2 or 0 in ids.shape:
        raise ValueError(f"ids have shape {tuple(ids.shape)}: expected (batch, tokens), at least one token per prompt")
    check_mask(mask, ids.shape)
    if mask is None:
        return
    wrong = ~(mask[:, -1] & (mask[:, 1:] >= mask[:, :-1]).all(1))
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"the mask of prompt {row} has padding after a token, or no token at all: "
            f"a prompt is continued from its end, so pad on the left (mask False, …, False, True, …, True)"
        )


def _by_length(ids: Tensor, mask: Tensor) -> list[Prompts]:
    """Group the prompts by length, without their padding."""
    lengths = mask.sum(1)
    rows = {length: (lengths == length).nonzero().flatten() for length in lengths.unique().tolist()}
    return [Prompts(rows[length], ids[rows[length], ids.shape[1] - length :], None) for length in rows]


def _steps(model: nn.Module, together: list[Prompts], wanted: Wanted) -> Iterator[Tensor]:
    max_new_tokens, stop, sampling, generator = wanted
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
