"""jsd: the generalised Jensen-Shannon divergence, with the arguments of Liger's ``LigerJSDFunction``.

Its launches are written by hand, shared with tvd (:mod:`tilekern.ops.row_losses`): the forward also computes the
gradient, and the backward only scales it in place.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilekern.kernels import scale
from tilekern.kernels.jsd import LOSS
from tilekern.ops import row_losses
from tilekern.ops.operation import operation
from tilekern.ops.registration import check_share


def jsd(
    _input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """Return ``beta * KL(P || M) + (1 - beta) * KL(Q || M)`` with ``M = beta * P + (1 - beta) * Q``; Q is the input's.

    For ``beta`` 0 it is ``KL(P || Q)`` and for 1 ``KL(Q || P)``, which are not the limits. The sum is divided by the
    number of rows that count. The gradient is computed with the loss and kept for one backward.

    Args:
        _input: [..., columns], log-probabilities; bfloat16, float16 or float32, any strides. A probability of 0, whose
            logarithm is -inf, adds nothing.
        target: of the shape of the input, log-probabilities. If the dtypes differ, or it needs a gradient, the formula
            runs.
        shift_labels: [...] or None; rows whose label is ``ignore_index`` do not count, and may hold any values.
        beta: from 0 to 1.
        ignore_index: the label of rows that do not count.

    Returns:
        The loss in the dtype of the input; 0 if no row counts.

    Raises:
        ValueError: ``beta`` is not from 0 to 1, or the shapes or the devices differ.
    """
    check_share("jsd", "beta", beta)
    slope = row_losses.slopes("jsd", "input", _input, shift_labels, ignore_index, 1)
    return _loss(_input, target, slope, float(beta), *row_losses.modes(_input)).to(_input.dtype)


def terms(x: Tensor, y: Tensor, beta: float) -> Tensor:
    """Return the term of each element, for log-probabilities x of the input and y of the target, by torch."""
    if beta == 0:
        return _weighed(y, y, x)
    if beta == 1:
        return _weighed(x, x, y)
    # If both are -inf, torch's gradient of their mixture is NaN; exp(-1000) is 0 in float64 too.
    x, y = x.clamp(min=-1000), y.clamp(min=-1000)
    mixed = torch.logaddexp(y + math.log(beta), x + math.log(1 - beta))
    return beta * _weighed(y, y, mixed) + (1 - beta) * _weighed(x, x, mixed)


def _weighed(log: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return ``exp(log) * (one - other)``, and 0 with no gradient if the first factor is 0."""
    counted = log.exp() != 0
    return log.where(counted, -torch.inf).exp() * (one.where(counted, 0) - other.where(counted, 0))


@operation(
    LOSS, scale.SPEC, name="jsd_loss", ungraded=("target", "slope"), arrays=row_losses.arrays("input", "target"),
    kept=("gradient",), reads=("gradient", "slope"), key=("beta in (0, 1)", "with_gradient"),
    **row_losses.parts(LOSS, "jsd_loss", ("input", "target"), terms, lambda beta: (beta in (0, 1),)),
)  # fmt: skip
def _loss(
    input: Tensor, target: Tensor, slope: Tensor, beta: float = 0.5, with_gradient: bool = True, in_place: bool = False
) -> Tensor:
    return row_losses.total(terms, input, target, slope, beta)
