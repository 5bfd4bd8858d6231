"""The generalised Jensen-Shannon divergence of log-probabilities, input X = log Q and target Y = log P.

With M = beta * P + (1 - beta) * Q each element adds ``beta * P * (Y - log M) + (1 - beta) * Q * (X - log M)``, of which
the gradient by X is ``(1 - beta) * Q * (X - log M)``. At the ends (the flag ``pure``) the divergence is another, as
Liger has it: for beta 0 that of P from Q, ``P * (Y - X)`` with the gradient ``-P``; for beta 1 that of Q from P,
``Q * (X - Y)`` with the gradient ``Q * (X - Y) + Q``. A probability of 0 adds nothing.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.common import losses
from tilekern.kernels.tiles import ConstBool, ConstInt

_LOG2_E = 1.4426950408889634
# In the place of logarithms below it: the exponential is 0 in float32 all the same, and products with it are not NaN.
_LEAST = -1000.0


def _raised(x):
    return ct.where(x < _LEAST, _LEAST, x)


def between(x, y, beta):
    """What each element adds for a beta inside (0, 1), and the derivative of that by x."""
    x, y = _raised(x), _raised(y)
    # Probabilities are shares of the larger one, so that log M is right where both are too small for float32.
    gap = x - y
    largest = ct.exp2(ct.maximum(x, y) * _LOG2_E)
    smaller = ct.exp2(ct.abs(gap) * -_LOG2_E)
    share_y = beta * ct.where(gap > 0.0, smaller, 1.0)
    share_x = (1.0 - beta) * ct.where(gap > 0.0, 1.0, smaller)
    log_mixed = ct.log(share_x + share_y)
    slope = largest * share_x * (ct.minimum(gap, 0.0) - log_mixed)
    return slope + largest * share_y * (ct.minimum(-gap, 0.0) - log_mixed), slope


def at_end(x, y, beta):
    """The same for a beta of 0 or 1."""
    forward = beta == 0.0
    probability = ct.exp2(ct.where(forward, y, x) * _LOG2_E)
    ratio = ct.where(forward, y - x, x - y)
    term = ct.where(probability == 0.0, 0.0, probability * ratio)
    return term, ct.where(forward, -probability, term + probability)


@ct.kernel
def jsd_losses(
    input, target, slope, loss, beta, columns: ConstInt, tile_n: ConstInt, persistent: ConstBool, tma: ConstBool,
    pure: ConstBool,
):  # fmt: skip
    """input and target [rows, columns], slope and loss [rows]."""
    formula = at_end if ct.static_eval(pure) else between
    losses.each_row(formula, input, target, slope, loss, None, (beta,), columns, tile_n, persistent, tma)


@ct.kernel
def jsd_gradients(
    input, target, slope, loss, gradient, beta, columns: ConstInt, tile_n: ConstInt, persistent: ConstBool,
    tma: ConstBool, pure: ConstBool,
):  # fmt: skip
    """The same, and the gradient [rows, columns]."""
    formula = at_end if ct.static_eval(pure) else between
    losses.each_row(formula, input, target, slope, loss, gradient, (beta,), columns, tile_n, persistent, tma)


def reference_terms(x: Any, y: Any, beta: float, pure: bool) -> tuple[Any, Any]:
    """What each element of float64 tensors adds, and the derivative of that by the input."""
    import torch

    def weighed(probability: Any, ratio: Any) -> Any:
        return (probability * ratio).where(probability != 0, 0)

    p, q = y.exp(), x.exp()
    if pure and beta == 0:
        return weighed(p, y - x), -p
    if pure:
        return weighed(q, x - y), weighed(q, x - y) + q
    # Shares of the larger one, so that equal probabilities have no divergence to the last bit.
    top = torch.maximum(x, y)
    log_mixed = (beta * (y - top).exp() + (1 - beta) * (x - top).exp()).log()
    slope = (1 - beta) * weighed(q, x - top - log_mixed)
    return slope + beta * weighed(p, y - top - log_mixed), slope


def reference(input: Any, target: Any, slope: Any, beta: float, graded: bool, pure: bool) -> dict[str, Any]:
    """The losses of all rows in float64, and their gradient by the input."""
    return losses.expected(*reference_terms(input.double(), target.double(), beta, pure), slope, graded)


LOSS = losses.spec(
    name="jsd",
    summary="loss = slope * JSD(target || input) of each row of log-probabilities, and its gradient by the input",
    module=__name__,
    op="jsd",
    losses=jsd_losses,
    gradients=jsd_gradients,
    inputs=("input", "target"),
    scalars={"beta": 0.25},
    flags=("pure",),
    reference=reference,
    flops=20,
    of_draws=losses.log_probabilities,
)
SPECS = (LOSS,)
