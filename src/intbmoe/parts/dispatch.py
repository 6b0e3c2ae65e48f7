"""The only place where tokens are sorted: from "token n goes to expert e" to rows grouped by expert, and back.

Letters: ``N`` tokens, ``k`` choices per token, ``M = N·k`` rows, ``G`` groups (experts or blocks).

Shapes depend only on N and k, never on where the tokens go, so the host never waits for the device. A choice of −1
(a masked token, a dropped assignment) becomes a row after the last group, which no expert computes and which kernels
neither read nor write (``ops/expert_rows``). If their number can be read at no cost, that is on the CPU outside a
compiled graph, such rows are left out altogether.
Every backward pass here is a gather or a matrix product, never an atomic scatter, so runs repeat bit for bit.
"""

from fractions import Fraction
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from intbmoe.ops.backend import Backend
from intbmoe.ops.combine import rows_of_tokens, sum_rows
from intbmoe.ops.eager import readable, transformed
from intbmoe.ops.permute import Permutation, permute
from intbmoe.precision import cast


def dispatch(ids: Tensor, groups: int, backend: Backend, complete: bool = False) -> Permutation:
    """Sort the assignments ``ids`` (N, k), −1 for none, by group. Pass ``complete`` if none is −1."""
    plan = permute(ids, groups, backend, complete)
    if complete or not readable(ids) or transformed():
        return plan
    last = int(plan.ends[-1])
    rows = {"token": plan.token[:last], "choice": plan.choice[:last], "group": plan.group[:last]}
    return plan._replace(**rows, inverse=plan.inverse.clamp(max=last), complete=True, trimmed=True)


def to_rows(x: Tensor, plan: Permutation) -> Tensor:
    """(N, c) values of tokens → (M, c) values of their rows."""
    if not _differentiates(x):
        return x.index_select(0, plan.token)
    return _ToRows.apply(x, plan.token, plan.inverse, plan.backend)


def from_rows(rows: Tensor, plan: Permutation) -> Tensor:
    """(N, c) rows, one per token → (N, c) in token order: undoes ``to_rows``."""
    return to_rows(rows, plan._replace(token=plan.inverse.flatten(), inverse=plan.token.unsqueeze(1)))


def spread(table: Tensor, plan: Permutation) -> Tensor:
    """(G, c) values of groups → (M, c) values of their rows; zero for rows without a group."""
    if not plan.complete:
        table = torch.cat([table, table.new_zeros(1, table.shape[1])])
    if not _differentiates(table):
        return table.index_select(0, plan.group)
    return _Spread.apply(table, plan.group)


def combine(rows: Tensor, weights: Tensor, plan: Permutation) -> Tensor:
    """(M, c) rows and (N, k) weights → (N, c) weighted sums, in the type of ``weights``."""
    if plan.backend == "fused":
        from intbmoe.ops.combine import fused

        return fused.combine(rows, weights, plan.token, plan.choice, plan.inverse, None)
    if not _differentiates(rows, weights):
        return _weighted_sum(rows, weights, plan.inverse, plan.trimmed)
    return _Combine.apply(rows, weights, plan.token, plan.choice, plan.inverse, plan.trimmed)


def _differentiates(*tensors: Tensor) -> bool:
    """Whether our own derivatives are needed; torch.func differentiates plain operations instead."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors) and not transformed()


def _weighted_sum(rows: Tensor, weights: Tensor, inverse: Tensor, trimmed: bool) -> Tensor:
    return (cast(rows_of_tokens(rows, inverse, trimmed), weights.dtype) * weights.unsqueeze(-1)).sum(1)


class _ToRows(Function):
    """A gather with a gather as its backward: autograd would scatter, but each token knows its k rows."""

    @staticmethod
    def forward(ctx, x, token, inverse, backend):
        ctx.save_for_backward(token, inverse)
        ctx.backend = backend
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx, grad):
        token, inverse = ctx.saved_tensors
        return sum_rows(grad, token, inverse, ctx.backend), None, None, None


class _Spread(Function):
    """Values of groups to rows. Backward sums the gradients of a group's rows by a product with a 0/1 matrix."""

    @staticmethod
    def forward(ctx, table, group):
        ctx.save_for_backward(group)
        ctx.groups = table.shape[0]
        return table.index_select(0, group)

    @staticmethod
    def backward(ctx, grad):
        (group,) = ctx.saved_tensors
        member = group[:, None] == torch.arange(ctx.groups, device=group.device)  # an eighth of the bytes of one_hot
        return member.to(grad.dtype).t() @ grad, None


class _Combine(Function):
    """The weighted transpose of ``_ToRows``; the weights' gradient needs only the saved rows."""

    @staticmethod
    def forward(ctx, rows, weights, token, choice, inverse, trimmed):
        ctx.save_for_backward(rows, weights, token, choice, inverse)
        ctx.trimmed = trimmed
        return _weighted_sum(rows, weights, inverse, trimmed)

    @staticmethod
    def backward(ctx, grad):
        rows, weights, token, choice, inverse = ctx.saved_tensors
        row_grad = grad.index_select(0, token) * weights.reshape(-1).index_select(0, choice).unsqueeze(-1)
        weight_grad = (rows_of_tokens(rows, inverse, ctx.trimmed).to(grad.dtype) * grad.unsqueeze(1)).sum(-1)
        return row_grad.to(rows.dtype), weight_grad, None, None, None, None


class Seats(NamedTuple):
    """M seats that experts gave to the tokens they chose: a token may have none or several."""

    token: Tensor  # (M,) the token in each seat
    order: Tensor  # (M,) the seats sorted by token
    starts: Tensor  # (N,) where each token's seats start in ``order``


def seat(token: Tensor, tokens: int) -> Seats:
    """Make the plan for M seats holding ``token`` (M,), each one of N = ``tokens``."""
    counts = torch.zeros(tokens, dtype=torch.int64, device=token.device)
    counts = counts.scatter_add(0, token, torch.ones_like(token))
    return Seats(token, torch.argsort(token, stable=True), counts.cumsum(0) - counts)


def to_seats(x: Tensor, plan: Seats) -> Tensor:
    """(N, c) values of tokens → (M, c) values of their seats."""
    if not _differentiates(x):
        return x.index_select(0, plan.token)
    return _ToSeats.apply(x, *plan)


def sum_seats(values: Tensor, plan: Seats) -> Tensor:
    """(M, c) values of seats → (N, c), the sum over each token's seats."""
    if transformed():
        return values.new_zeros(plan.starts.shape[0], values.shape[1]).index_add(0, plan.token, values)
    return _SumSeats.apply(values, *plan)


class _ToSeats(Function):
    """The transpose of ``_SumSeats``; autograd would scatter."""

    @staticmethod
    def forward(ctx, x, token, order, starts):
        ctx.save_for_backward(token, order, starts)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx, grad):
        return _SumSeats.apply(grad, *ctx.saved_tensors), None, None, None


class _SumSeats(Function):
    """Each token sums its seats one after another: no atomics, and no (N, E, c) table of possible seats."""

    @staticmethod
    def forward(ctx, values, token, order, starts):
        ctx.save_for_backward(token, order, starts)
        return F.embedding_bag(order, values, starts, mode="sum")

    @staticmethod
    def backward(ctx, grad):
        return _ToSeats.apply(grad, *ctx.saved_tensors), None, None, None


def exact_ratio(factor: float) -> tuple[int, int]:
    """Numerator and denominator of a factor as it is written: 1.1 is 11/10. Does not work in compiled code."""
    return Fraction(str(factor)).as_integer_ratio()


def capacity_of(factor: tuple[int, int], tokens: int | Tensor, experts: int, multiple: int = 1) -> int | Tensor:
    """⌈factor · tokens / experts⌉, rounded up to a ``multiple``; ``tokens`` is a number or an integer tensor.

    Computed in integers, because 1.1 · 10 / 11 in floating point is a little more than 1 and would round up to 2.
    """
    numerator, denominator = factor
    whole = -(-(tokens * numerator) // (experts * denominator))
    return -(-whole // multiple) * multiple


def limit_capacity(ids: Tensor, experts: int, capacity: int | Tensor, priority: Tensor | None = None) -> Tensor:
    """Set the choices (B, T, k) that find their expert full to −1: an expert takes ``capacity`` tokens per sequence.

    ``capacity`` is a number, or (B, 1) if it differs between sequences. First choices of all tokens come before second
    choices; within a rank, tokens come in token order, or by descending ``priority`` (B, T) with ties in token order.
    """
    batch, tokens, k = ids.shape
    if priority is not None:
        order = priority.argsort(dim=1, descending=True, stable=True)
        # ``take_along_dim`` would fix sizes that a compiler or exporter keeps dynamic.
        kept = limit_capacity(ids.gather(1, order.unsqueeze(-1).expand_as(ids)), experts, capacity)
        return kept.gather(1, order.argsort(dim=1).unsqueeze(-1).expand_as(ids))
    ranked = ids.transpose(1, 2).reshape(batch, k * tokens)
    member = ranked.unsqueeze(-1) == torch.arange(experts, device=ids.device)
    position = (member.cumsum(1) * member).sum(-1)  # 1 for the first at its expert
    kept = torch.where(position <= capacity, ranked, -1)
    return kept.view(batch, k, tokens).transpose(1, 2)
