"""sharded_linear_log_probs: ``linear_log_probs`` of a head whose vocabulary is split over the ranks of a group.

Each rank computes its own part; a maximum and one sum over the ranks give the whole. With ``lse_r`` and ``H_r`` the
logsumexp and the entropy of part r, ``w_r = exp(lse_r - lse)`` is the probability of the part, and the entropy is
``sum_r w_r * (H_r - log(w_r))``.

It is written by hand and not declared: it has no kernel of its own, only collectives around another op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilekern.ops.labels import checked
from tilekern.ops.linear_log_probs import check_options, rows_of_head


def sharded_linear_log_probs(
    hidden: Tensor, weight: Tensor, ids: Tensor, first: int, group: Any = None, *, bias: Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, ignore_index: int = -100, wide_sums: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the results of :func:`tilekern.ops.linear_log_probs` on every rank of a group; arguments mean the same.

    All ranks must pass the same ``hidden`` and ``ids``, and compute the same loss from the results. Then each rank gets
    the whole gradient of ``hidden``, summed over the ranks, and the gradients of its own part of the weight and bias.

    Args:
        hidden: [..., hidden], the same on all ranks.
        weight: [part, hidden], this rank's rows of the head; parts may have different sizes.
        ids: [...], ids of the whole vocabulary.
        first: the id of the first row of ``weight``.
        group: a process group of ``torch.distributed``; None for all ranks.
        bias: [part] or None.

    Raises:
        ValueError: as in ``linear_log_probs``, or ``first`` is negative.
    """
    check_options("sharded_linear_log_probs", temperature, softcap)
    if first < 0:
        raise ValueError(f"sharded_linear_log_probs: first must not be negative, got {first}")
    counted = ids != ignore_index
    local = ids.long() - first
    own = counted & (local >= 0) & (local < weight.shape[0])
    places = local.where(own, 0).where(counted, ignore_index)
    log_probs, entropy, lse = rows_of_head(
        _Copied.apply(hidden, group), weight, places, bias, temperature, softcap, ignore_index, wide_sums
    )
    top = _largest(lse, group)
    mass = (lse - top).exp()
    # A part with probability 0, whose logarithm is -inf, adds nothing.
    surprise = mass * (entropy - (lse - top)).masked_fill(mass == 0, 0)
    logits = (log_probs + lse - top).where(own, 0)
    mass, surprise, logits, owners = _Added.apply(torch.stack((mass, surprise, logits, own.to(lse.dtype))), group)
    # An id that no rank has is checked against a vocabulary of one; one rank has the id 0, so it is never 0.
    checked("sharded_linear_log_probs", ids.where(counted & (owners != 1), 0), 1, 0)
    log_mass = mass.log()
    log_probs = (logits - log_mass).where(owners == 1, torch.nan)
    return log_probs.where(counted, 0), (log_mass + surprise / mass).where(counted, 0)


def _largest(x: Tensor, group: Any) -> Tensor:
    found = x.detach().clone()
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group)
    return found


class _Added(torch.autograd.Function):
    """The sum over ranks, which all compute the same loss; the gradient of each part equals the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # noqa: ARG004
        total = x.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return slope, None


class _Copied(torch.autograd.Function):
    """A tensor that all ranks have; its gradient is the sum of the gradients of the ranks' parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        total = slope.contiguous().clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None
