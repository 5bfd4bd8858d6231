"""sharded_linear_log_probs: ``linear_log_probs`` of a head whose vocabulary is spread over the ranks of a group.

Each rank has the results of its own part; a maximum and one sum over the ranks make those of the whole. With ``lse_r``
and ``H_r`` the logarithm of the sum of exponentials and the entropy of part r, ``w_r = exp(lse_r - lse)`` is the
probability of the part, and the entropy is ``sum_r w_r * (H_r - log(w_r))``.

It is written by hand and not declared: it has no kernel of its own, but collectives around another op.
"""

from __future__ import annotations

from typing import Any

import torch

from tilekern.ops.labels import checked
from tilekern.ops.linear_log_probs import check_options, rows_of_head


def sharded_linear_log_probs(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, first: int, group: Any = None, *,
    bias: torch.Tensor | None = None, temperature: float = 1.0, softcap: float | None = None, ignore_index: int = -100,
    wide_sums: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The results of :func:`tilekern.ops.linear_log_probs`, whose arguments mean the same, on every rank of a group.

    All ranks call it with the same ``hidden`` and ``ids``, and make the same loss of the results. Then each has the
    whole gradient of ``hidden``, which is added up over the ranks, and the gradients of its own part of the weight and
    the bias.

    Args:
        hidden: [..., hidden], the same on all ranks.
        weight: [part, hidden], the rows of the head that this rank has; parts may have different sizes.
        ids: [...], ids of the whole vocabulary.
        first: the id of the first row of ``weight``.
        group: a process group of ``torch.distributed``; None for all ranks.
        bias: [part] or None.

    Raises:
        ValueError: as ``linear_log_probs``, or ``first`` is negative.
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
    # A part without any probability, whose logarithm is -inf, adds nothing.
    surprise = mass * (entropy - (lse - top)).masked_fill(mass == 0, 0)
    logits = (log_probs + lse - top).where(own, 0)
    mass, surprise, logits, owners = _Added.apply(torch.stack((mass, surprise, logits, own.to(lse.dtype))), group)
    # An id that no rank has is not 0, since one rank has that: it is outside of a vocabulary of which 0 is all.
    checked("sharded_linear_log_probs", ids.where(counted & (owners != 1), 0), 1, 0)
    log_mass = mass.log()
    log_probs = (logits - log_mass).where(owners == 1, torch.nan)
    return log_probs.where(counted, 0), (log_mass + surprise / mass).where(counted, 0)


def _largest(x: torch.Tensor, group: Any) -> torch.Tensor:
    found = x.detach().clone()
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group)
    return found


class _Added(torch.autograd.Function):
    """The sum over ranks, all of which make the same of it: each part's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:  # noqa: ARG004
        total = x.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return slope, None


class _Copied(torch.autograd.Function):
    """A tensor that all ranks have; its gradient is the sum of those of the ranks' parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = slope.contiguous().clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None
