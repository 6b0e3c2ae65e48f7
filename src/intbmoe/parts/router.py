"""Choose experts or blocks for a token: scores are in the wide type, and ties go to the lower index."""

import torch
from torch import Tensor, nn

from intbmoe.ops.backend import Backend, choose_backend
from intbmoe.ops.choose import MOST_IN_ONE_KERNEL, choose
from intbmoe.ops.scores import router_scores
from intbmoe.parts.linear import Linear


class MLPRouter(nn.Module):
    """Two linear maps with a ReLU between them: d → ``router_dim`` → ``choices`` scores."""

    def __init__(self, dim: int, router_dim: int, choices: int) -> None:
        super().__init__()
        self.hidden = Linear(dim, router_dim)
        self.scores = Linear(router_dim, choices)

    def forward(
        self, x: Tensor, dtype: torch.dtype | None = None, backend: Backend | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(N, d) tokens → (N, choices) scores in the wide type; with ``dtype`` also the tokens in that type.

        It returns both because a kernel that reads the tokens can write them too. With ``backend=None`` the input
        decides.
        """
        maps = [(layer.weight, layer.bias) for layer in (self.hidden, self.scores)]
        scores, tokens = router_scores(x, *maps, dtype or x.dtype, backend or choose_backend(x))
        return scores if dtype is None else (scores, tokens)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Indices of the k highest scores in each row, best first; equal scores go to the lower index."""
    if k <= MOST_IN_ONE_KERNEL and scores.dim() == 2:
        backend = choose_backend(scores, has_native=True)
        if backend in ("fused", "native"):
            return choose(scores.detach(), k, backend)[0]
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]  # torch.topk does not define ties


def mask_choices(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Set the choices (N, k) of masked tokens to −1; ``mask`` has N entries, or is None."""
    return ids if mask is None else torch.where(mask.reshape(-1, 1), ids, -1)


def count_choices(ids: Tensor, experts: int) -> Tensor:
    """(E,) how often each expert occurs in ``ids``, ignoring −1. Integer sums are exact in any order."""
    keys = ids.reshape(-1) + 1
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add(0, keys, torch.ones_like(keys))[1:]


def pack_choices(weights: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (N, E) and whether each expert is active (N, E) → ids (N, E) and their weights.

    A token's active experts come first, by descending weight and ties by index; then −1 with weight 0. This is for
    methods in which the number of experts varies from token to token.
    """
    keys = torch.where(active, weights.detach(), -torch.inf)
    order = top_k(keys, keys.shape[-1])
    active = active.gather(-1, order)
    return torch.where(active, order, -1), torch.where(active, weights.gather(-1, order), 0)
