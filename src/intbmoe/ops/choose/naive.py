"""The specification, in plain torch."""

from torch import Tensor


def choose(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(N, K) scores → ids (N, k), best first, equal scores by index, and their softmax over all K (N, k).

    ``torch.topk`` does not define the order of equal scores, hence the stable sort (of a handful of columns).
    """
    ids = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return ids, scores.softmax(-1).gather(-1, ids)
