"""The only place that sorts tokens: from "token n goes to expert e" to rows grouped by expert, and back.

Letters: ``N`` tokens, ``k`` choices a token, ``M = N·k`` rows, ``G`` groups (experts or blocks).

Shapes depend on N and k alone, never on where the tokens go, so nothing waits for the device. A choice of −1
(a masked token, a dropped assignment) becomes a row after the last group, which no expert computes.
Every backward pass here is a gather or a matrix product, never an atomic scatter: runs repeat bit for bit.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True)
class Dispatch:
    """Where each of the M rows, sorted by group, comes from."""

    token: Tensor
    """(M,) the token of each row."""
    choice: Tensor
    """(M,) the row's assignment: its index in the flattened (N, k) choices."""
    inverse: Tensor
    """(N, k) the row of each assignment."""
    group: Tensor
    """(M,) the group of each row; G for rows of no group."""
    counts: Tensor
    """(G,) rows of each group."""
    offsets: Tensor
    """(G,) int32, where each group's rows end."""
    complete: bool
    """True when every assignment is known to have a group, so that no row follows the last one."""


def dispatch(ids: Tensor, groups: int, complete: bool = False) -> Dispatch:
    """Sort the assignments ``ids`` (N, k), −1 for none, by group. Pass ``complete`` if none is −1."""
    tokens, k = ids.shape
    keys = ids.reshape(-1)
    if not complete:
        keys = torch.where(keys < 0, groups, keys)
    choice = torch.argsort(keys, stable=True)
    rows = torch.arange(tokens * k, device=ids.device)
    inverse = torch.empty_like(choice).scatter(0, choice, rows).view(tokens, k)
    counts = torch.zeros(groups + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add(0, keys, torch.ones_like(keys))[:groups]
    offsets = counts.cumsum(0).to(torch.int32)
    token = torch.div(choice, k, rounding_mode="floor")
    return Dispatch(token, choice, inverse, keys[choice], counts, offsets, complete)


def to_rows(x: Tensor, plan: Dispatch) -> Tensor:
    """(N, c) values of tokens → (M, c) values of their rows."""
    return _ToRows.apply(x, plan.token, plan.inverse)


def spread(table: Tensor, plan: Dispatch) -> Tensor:
    """(G, c) values of groups → (M, c) values of their rows; zero for rows of no group."""
    return _Spread.apply(table, plan.group)


def combine(rows: Tensor, weights: Tensor, plan: Dispatch) -> Tensor:
    """(M, c) rows and (N, k) weights → (N, c) weighted sums, in the type of ``weights``."""
    return _Combine.apply(rows, weights, plan.token, plan.choice, plan.inverse)


class _ToRows(Function):
    """Autograd would scatter the gradient of a gather; each token knows its k rows, so gather them instead."""

    @staticmethod
    def forward(ctx, x, token, inverse):
        ctx.save_for_backward(inverse)
        return x[token]

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad[inverse].sum(1), None, None


class _Spread(Function):
    """Many rows share a group: their gradients are summed by a product with the 0/1 matrix of memberships."""

    @staticmethod
    def forward(ctx, table, group):
        ctx.save_for_backward(group)
        ctx.groups = table.shape[0]
        return torch.cat([table, table.new_zeros(1, table.shape[1])])[group]

    @staticmethod
    def backward(ctx, grad):
        (group,) = ctx.saved_tensors
        member = F.one_hot(group, ctx.groups + 1)[:, : ctx.groups].to(grad.dtype)
        return member.t() @ grad, None


class _Combine(Function):
    """The transpose of ``_ToRows``, weighted; the weights' gradient needs only the rows already saved."""

    @staticmethod
    def forward(ctx, rows, weights, token, choice, inverse):
        ctx.save_for_backward(rows, weights, token, choice, inverse)
        return (rows[inverse].to(weights.dtype) * weights.unsqueeze(-1)).sum(1)

    @staticmethod
    def backward(ctx, grad):
        rows, weights, token, choice, inverse = ctx.saved_tensors
        row_grad = grad[token] * weights.reshape(-1)[choice].unsqueeze(-1)
        weight_grad = (rows[inverse].to(grad.dtype) * grad.unsqueeze(1)).sum(-1)
        return row_grad.to(rows.dtype), weight_grad, None, None, None


def limit_capacity(ids: Tensor, experts: int, capacity: int, priority: Tensor | None = None) -> Tensor:
    """Choices (B, T, k) with −1 for those that find their expert full: ``capacity`` a sequence and expert.

    First choices of all tokens come before second choices; within a rank, tokens come in their order, or in
    descending ``priority`` (B, T), equal ones in their order.
    """
    batch, tokens, k = ids.shape
    if priority is not None:
        order = priority.argsort(dim=1, descending=True, stable=True)
        kept = limit_capacity(ids.take_along_dim(order.unsqueeze(-1), 1), experts, capacity)
        return kept.take_along_dim(order.argsort(dim=1).unsqueeze(-1), 1)
    ranked = ids.transpose(1, 2).reshape(batch, k * tokens)
    member = F.one_hot(torch.where(ranked < 0, experts, ranked), experts + 1)[..., :experts]
    position = (member.cumsum(1) * member).sum(-1)  # 1 for the first at its expert
    kept = torch.where(position <= capacity, ranked, -1)
    return kept.view(batch, k, tokens).transpose(1, 2)
