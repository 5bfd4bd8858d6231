"""router_losses: the load balancing loss and the z loss of a router, with gradients.

It is written by hand and not declared, as the backward reads sums over all rows that the forward computes. Under
``torch.compile`` torch's own operations run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilekern.kernels.experts import router_losses as kernels
from tilekern.kernels.experts.router import MOST_EXPERTS
from tilekern.kernels.families.placeholders import placeholder
from tilekern.ops.dtensors import is_dtensor
from tilekern.ops.registration import (
    check_devices,
    check_vectors,
    differentiable_once,
    is_traced,
    needs_gradient,
    plans_of_both,
)
from tilekern.runtime.dispatch import Plan, count_fallback, keep, memo


class Losses(NamedTuple):
    """Scalars in float32 (float64 for float64 logits); NaN if no row counts.

    Attributes:
        balance: ``experts * sum_e (share of rows that chose e) * (mean p of e)``; if both are even, it is the number of
            choices.
        z: the mean of the squared logsumexps.
    """

    balance: Tensor
    z: Tensor


Plans = tuple[Plan, Plan | None]
_known: dict[Any, Plans | None] = memo()


def router_losses(logits: Tensor, ids: Tensor, shares: Tensor | None = None) -> Losses:
    """Compute the load balancing loss of Switch (arXiv:2101.03961) and the z loss of ST-MoE (arXiv:2202.08906).

    The losses are computed in float32, and all sums have a fixed order. The ids have no gradient, so the balance only
    has the gradient of the probabilities.

    Args:
        logits: [rows, experts]; bfloat16, float16 or float32. Concatenated logits of several layers give the losses
            over all of them, as in transformers.
        ids: [rows, choices], int64, as returned by :func:`tilekern.ops.router`.
        shares: [rows], the weight of each row, not negative, without a gradient: 0 for padding, whose logits may be
            anything. None if all rows count once.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    _check(logits, ids, shares)
    if shares is not None:
        shares = shares.detach().to(torch.promote_types(logits.dtype, torch.float32))
    plans = None if is_traced(logits) or is_dtensor(logits) else _found(logits, ids, shares)
    if plans is None and not torch.compiler.is_compiling():
        count_fallback(kernels.FORWARD)
    if plans is None:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return _of(*kernels.sums(wide, ids, shares), _rows(logits, shares))
    if needs_gradient(logits):
        return Losses(*_RouterLosses.apply(logits, ids, shares, plans))
    return _of(*_run(logits, ids, shares, plans[0]), _rows(logits, shares))


def _check(logits: Tensor, ids: Tensor, shares: Tensor | None) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            f"router_losses: logits must be [rows, experts] of floats, got {logits.dtype} {list(logits.shape)}"
        )
    rows, experts = logits.shape
    if ids.dim() != 2 or ids.shape[0] != rows or ids.shape[1] > experts or ids.dtype != torch.int64:
        raise ValueError(
            f"router_losses: ids must be int64 [{rows}, choices] of at most {experts} choices, got {ids.dtype} "
            f"{list(ids.shape)}"
        )
    check_vectors("router_losses", rows, shares=shares)
    check_devices("router_losses", logits=logits, ids=ids, shares=shares)


def _found(logits: Tensor, ids: Tensor, shares: Tensor | None) -> Plans | None:
    """Return the plans of a kind of call; None if torch must do the work."""
    graded = needs_gradient(logits)
    key = (logits.get_device(), logits.shape, logits.dtype, ids.shape[1], shares is not None, graded)
    try:
        return _known[key]
    except KeyError:
        found = _find(logits, ids, shares is not None, graded)
        return keep(_known, key, found) if logits.is_cuda else found


def _find(logits: Tensor, ids: Tensor, masked: bool, graded: bool) -> Plans | None:
    if not ids.numel() or logits.shape[1] > MOST_EXPERTS or logits.dtype == torch.float64:
        return None
    forward = kernels.FORWARD, *logits.shape, ids.shape[1], logits.dtype, masked
    return plans_of_both(graded, logits.device, forward, (kernels.BACKWARD, *logits.shape, logits.dtype, masked))


def _shares(shares: Tensor | None, logits: Tensor) -> Tensor:
    """Return the shares, or a placeholder for the kernels."""
    return placeholder(1, torch.float32, logits.device) if shares is None else shares.contiguous()


def _rows(logits: Tensor, shares: Tensor | None) -> float | Tensor:
    """Return the number of rows that count."""
    return float(len(logits)) if shares is None else shares.sum()


def _run(logits: Tensor, ids: Tensor, shares: Tensor | None, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums over rows of probabilities, choices and squares."""
    experts = logits.shape[1]
    partial = [
        torch.empty(plan.blocks, columns, dtype=torch.float32, device=logits.device)
        for columns in (experts, experts, 1)
    ]
    plan.launch(
        logits.get_device(), logits.contiguous(), ids.contiguous(), _shares(shares, logits), ids.shape[1], *partial
    )
    probabilities, counts, squares = (x.sum(0) for x in partial)
    return probabilities, counts, squares


def _of(probabilities: Tensor, counts: Tensor, squares: Tensor, rows: float | Tensor) -> Losses:
    """Return the losses from sums over ``rows`` rows."""
    return Losses(len(counts) * ((counts / rows) * (probabilities / rows)).sum(), squares.sum() / rows)


class _RouterLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, shares: Tensor | None, plans: Plans) -> tuple[Tensor, Tensor]:
        probabilities, counts, squares = _run(logits, ids, shares, plans[0])
        ctx.save_for_backward(logits, shares, counts)
        ctx.plan = plans[1]
        return _of(probabilities, counts, squares, _rows(logits, shares))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dbalance: Tensor, dz: Tensor) -> tuple[Tensor | None, ...]:
        logits, shares, counts = ctx.saved_tensors
        logits, rows = logits.contiguous(), _rows(logits, shares)
        slopes = dbalance * (len(counts) * (counts / rows) / rows)
        dlogits = torch.empty_like(logits)
        ctx.plan.launch(
            logits.get_device(), logits, _shares(shares, logits), slopes.view(1, -1), (dz * (2 / rows)).view(1, 1),
            dlogits,
        )  # fmt: skip
        return dlogits, None, None, None
