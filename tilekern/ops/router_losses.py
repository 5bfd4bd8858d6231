"""router_losses: how unevenly a router spreads tokens over experts, and how large its logits are, with gradients.

It is written by hand and not declared, as the backward reads numbers of all rows that only the forward's sums give.
Where it is traced by ``torch.compile``, torch's own operations run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilekern.kernels.experts import router_losses as kernels
from tilekern.kernels.experts.router import MOST_EXPERTS
from tilekern.kernels.families.placeholders import placeholder
from tilekern.ops.dtensors import is_dtensor
from tilekern.ops.registration import check_devices, differentiable_once, is_traced, needs_gradient
from tilekern.runtime.dispatch import Plan, count_fallback, keep, memo, plan_for


class Losses(NamedTuple):
    """Scalars in float32 (float64 where the logits are); NaN where no row counts.

    Attributes:
        balance: ``experts * sum_e (share of rows that chose e) * (mean p of e)``; where both are even, the choices.
        z: the mean of the squared logsumexps.
    """

    balance: torch.Tensor
    z: torch.Tensor


class _Plans(NamedTuple):
    forward: Plan
    backward: Plan | None


_known: dict[Any, _Plans | None] = memo()


def router_losses(logits: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor | None = None) -> Losses:
    """The load balancing loss of Switch (arXiv:2101.03961) and the z loss of ST-MoE (arXiv:2202.08906), in float32.

    All sums have a fixed order. The ids have no gradient, so the balance has that of the probabilities alone.

    Args:
        logits: [rows, experts]; bfloat16, float16 or float32. Those of several layers, one below the other, give the
            losses over all of them, as transformers has them.
        ids: [rows, choices], int64, as :func:`tilekern.ops.router` gives them.
        shares: [rows], how often each row counts, not negative, without a gradient: 0 for padding, whose logits may be
            anything. None where all count once.

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
    return _of(*_run(logits, ids, shares, plans.forward), _rows(logits, shares))


def _check(logits: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor | None) -> None:
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
    if shares is not None and shares.shape != (rows,):
        raise ValueError(f"router_losses: shares must have the shape [{rows}], got {list(shares.shape)}")
    check_devices("router_losses", logits=logits, ids=ids, shares=shares)


def _found(logits: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor | None) -> _Plans | None:
    """The plans of a kind of call; None where torch must do the work."""
    graded = needs_gradient(logits)
    key = (logits.get_device(), logits.shape, logits.dtype, ids.shape[1], shares is not None, graded)
    try:
        return _known[key]
    except KeyError:
        found = _find(logits, ids, shares is not None, graded)
        return keep(_known, key, found) if logits.is_cuda else found


def _find(logits: torch.Tensor, ids: torch.Tensor, masked: bool, graded: bool) -> _Plans | None:
    if not ids.numel() or logits.shape[1] > MOST_EXPERTS or logits.dtype == torch.float64:
        return None
    forward = plan_for(kernels.FORWARD, logits.device, *logits.shape, ids.shape[1], logits.dtype, masked)
    backward = plan_for(kernels.BACKWARD, logits.device, *logits.shape, logits.dtype, masked) if graded else None
    return None if forward is None or (graded and backward is None) else _Plans(forward, backward)


def _shares(shares: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    """The shares, or a placeholder for the kernels."""
    return placeholder(1, torch.float32, logits.device) if shares is None else shares.contiguous()


def _rows(logits: torch.Tensor, shares: torch.Tensor | None) -> float | torch.Tensor:
    """How many rows count."""
    return float(len(logits)) if shares is None else shares.sum()


def _run(
    logits: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor | None, plan: Plan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sums over rows: of probabilities, of choices, of squares."""
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


def _of(probabilities: torch.Tensor, counts: torch.Tensor, squares: torch.Tensor, rows: float | torch.Tensor) -> Losses:
    """The losses of the sums over so many rows."""
    return Losses(len(counts) * ((counts / rows) * (probabilities / rows)).sum(), squares.sum() / rows)


class _RouterLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor | None, plans: _Plans
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities, counts, squares = _run(logits, ids, shares, plans.forward)
        ctx.save_for_backward(logits, shares, counts)
        ctx.plan = plans.backward
        return _of(probabilities, counts, squares, _rows(logits, shares))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dbalance: torch.Tensor, dz: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, shares, counts = ctx.saved_tensors
        logits, rows = logits.contiguous(), _rows(logits, shares)
        slopes = dbalance * (len(counts) * (counts / rows) / rows)
        dlogits = torch.empty_like(logits)
        ctx.plan.launch(
            logits.get_device(), logits, _shares(shares, logits), slopes.view(1, -1), (dz * (2 / rows)).view(1, 1),
            dlogits,
        )  # fmt: skip
        return dlogits, None, None, None
