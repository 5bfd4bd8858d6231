"""The generalised Jensen-Shannon divergence of log-probabilities, input X = log Q and target Y = log P.

With M = beta * P + (1 - beta) * Q each element adds ``beta * P * (Y - log M) + (1 - beta) * Q * (X - log M)``, whose
gradient by X is ``(1 - beta) * Q * (X - log M)``. At the ends (the flag ``pure``) the divergence differs, like in
Liger: for beta 0 it is the divergence of P from Q, ``P * (Y - X)`` with the gradient ``-P``; for beta 1 of Q from P,
``Q * (X - Y)`` with the gradient ``Q * (X - Y) + Q``. A probability of 0 adds nothing.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families import losses
from tilekern.kernels.families.logarithms import log2
from tilekern.kernels.tiles import ConstBool, ConstInt
from tilekern.spec import ScalarParameter

_LOG2_E = 1.4426950408889634
# log2(ln(2)): added to logarithms to base 2 of probabilities, it scales terms to natural logarithms.
LOG2_LN_2 = -0.5287663729448977
# The least logarithm to base 2: its exponential is 0 like those of smaller ones, and products with it are not NaN.
_LEAST = -1442.0
# Shorter rows may hold columns with a probability of 1, whose divergence is 0 to the last bit.
SHORT = 1024


def _raised(x):
    return ct.maximum(x, _LEAST, propagate_nan=True)


def _power(x):
    return ct.exp2(x, flush_to_zero=True)


def between(x, y, beta):
    """Return each element's term for a beta inside (0, 1), its derivative by the input, and a multiple of Q.

    x and y are logarithms to base 2 of Q and P. The results are divided by ln(2), like all results of this module.
    """
    x, y = _raised(x), _raised(y)
    of_x, of_y = (1.0 - beta) * _power(x), beta * _power(y)
    log_mixed = log2(of_x + of_y)
    slope = of_x * (x - log_mixed)
    return of_y * (y - log_mixed) + slope, slope, of_x


def between_close(x, y, beta):
    """Return the same for P and Q that may differ in the last bits of their logarithms; 16-bit ones cannot.

    Probabilities are shares of the larger one: their difference is rounded once, and equal ones have no divergence.
    """
    x, y = _raised(x), _raised(y)
    gap = x - y
    is_above = gap > 0.0
    largest = _power(ct.maximum(x, y))
    smaller = _power(-ct.abs(gap))
    share_x = (1.0 - beta) * ct.where(is_above, 1.0, smaller)
    share_y = beta * ct.where(is_above, smaller, 1.0)
    log_mixed = log2(share_x + share_y)
    of_x = largest * share_x
    slope = of_x * (ct.minimum(gap, 0.0) - log_mixed)
    return largest * share_y * (ct.minimum(-gap, 0.0) - log_mixed) + slope, slope, of_x


def at_end(x, y, beta):
    """Return the same for a beta of 0 or 1."""
    is_forward = beta == 0.0
    of_x, of_y = _power(x), _power(y)
    probability = ct.where(is_forward, of_y, of_x)
    term = ct.where(probability == 0.0, 0.0, probability * ct.where(is_forward, y - x, x - y))
    return term, ct.where(is_forward, of_y * -_LOG2_E, term + of_x * _LOG2_E), of_x


def terms(x, y, beta, pure, close):
    """Return the same by the formula for a beta; ``close`` is for dtypes of more than 16 bits and for short rows."""
    formula = at_end if ct.static_eval(pure) else between_close if ct.static_eval(close) else between
    return formula(x, y, beta)


def _of_logs(x, y, beta, pure, close):
    term, slope, _ = terms(x * _LOG2_E + LOG2_LN_2, y * _LOG2_E + LOG2_LN_2, beta, pure, close)
    return term, slope


@ct.kernel
def jsd_losses(
    input, target, slope, loss, beta, columns: ConstInt, tile_n: ConstInt, persistent: ConstBool, tma: ConstBool,
    pure: ConstBool,
):  # fmt: skip
    """input and target [rows, columns], slope and loss [rows]."""
    close = ct.static_eval(input.dtype == ct.float32 or columns < SHORT)
    losses.each_row(
        _of_logs, input, target, slope, loss, None, (beta, pure, close), columns, tile_n, persistent, tma
    )  # fmt: skip


@ct.kernel
def jsd_gradients(
    input, target, slope, loss, gradient, beta, columns: ConstInt, tile_n: ConstInt, persistent: ConstBool,
    tma: ConstBool, pure: ConstBool,
):  # fmt: skip
    """input, target and gradient [rows, columns], slope and loss [rows]."""
    close = ct.static_eval(input.dtype == ct.float32 or columns < SHORT)
    losses.each_row(
        _of_logs, input, target, slope, loss, gradient, (beta, pure, close), columns, tile_n, persistent, tma
    )  # fmt: skip


def reference_terms(x: Any, y: Any, beta: float, pure: bool) -> tuple[Any, Any]:
    """Return the term of each element of float64 tensors, and its derivative by the input."""
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
    """Return the losses of all rows in float64, and their gradient by the input."""
    return losses.expected(*reference_terms(input.double(), target.double(), beta, pure), slope, graded)


LOSS = losses.spec(
    "jsd",
    "loss = slope * JSD(target || input) of each row of log-probabilities, and its gradient by the input",
    jsd_losses,
    jsd_gradients,
    ("input", "target"),
    reference,
    scalars=(ScalarParameter("beta", "float32", 0.25),),
    flags=("pure",),
    flops=20,
    of_draws=losses.log_probabilities,
)
SPECS = (LOSS,)
