"""The total variation distance: each element of p and of q adds ``0.5 * |p - q|``.

Its gradient by p is ``0.5 * sign(p - q)``, 0 for equal elements. One read of p and q gives the sums over rows and the
gradient (:mod:`tilekern.kernels.families.losses`). Without sums there is a kernel over elements for each direction;
``counted`` is 0 for ignored rows, whatever they hold, else 1.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families import elements, losses
from tilekern.kernels.families.arrays import ROWS
from tilekern.kernels.tiles import ConstBool, ConstInt
from tilekern.spec import Array


def _sign(left):
    """Return half of the sign; 0 and NaN stay."""
    return ct.where(left > 0.0, 0.5, ct.where(left < 0.0, -0.5, left))


def _terms(p, q):
    left = p - q
    return 0.5 * ct.abs(left), _sign(left)


@ct.kernel
def tvd_losses(
    p, q, slope, loss, columns: ConstInt, tile_n: ConstInt, persistent: ConstBool, tma: ConstBool
):  # fmt: skip
    """p and q [rows, columns], slope and loss [rows]."""
    losses.each_row(_terms, p, q, slope, loss, None, (), columns, tile_n, persistent, tma)


@ct.kernel
def tvd_gradients(
    p, q, slope, loss, gradient, columns: ConstInt, tile_n: ConstInt, persistent: ConstBool, tma: ConstBool
):  # fmt: skip
    """p, q and gradient [rows, columns], slope and loss [rows]."""
    losses.each_row(_terms, p, q, slope, loss, gradient, (), columns, tile_n, persistent, tma)


def _distance(p, q, counted):
    return (ct.where(counted != 0.0, 0.5 * ct.abs(p - q), 0.0),)


@ct.kernel
def tvd_elements_forward(
    p, q, counted, loss, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, persistent: ConstBool,
    bounded: ConstBool,
):  # fmt: skip
    """counted [rows], all others [rows, columns]."""
    elements.each_tile(_distance, (p, q, counted), (loss,), columns, tile_m, tile_n, persistent, bounded)


def _slope(dloss, p, q, counted):
    return (ct.where(counted != 0.0, dloss * _sign(p - q), 0.0),)


@ct.kernel
def tvd_elements_backward(
    dloss, p, q, counted, dp, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, persistent: ConstBool,
    bounded: ConstBool,
):  # fmt: skip
    """counted [rows], all others [rows, columns]."""
    elements.each_tile(_slope, (dloss, p, q, counted), (dp,), columns, tile_m, tile_n, persistent, bounded)


def reference_terms(p: Any, q: Any) -> tuple[Any, Any]:
    """Return the term of each element, and its derivative by p."""
    gap = p - q
    return 0.5 * gap.abs(), 0.5 * gap.sign().where(~gap.isnan(), gap)


def reference(p: Any, q: Any, slope: Any, graded: bool) -> dict[str, Any]:
    """Return the losses of all rows in float64, and their gradient by p."""
    return losses.expected(*reference_terms(p.double(), q.double()), slope, graded)


def reference_elements(p: Any, q: Any, counted: Any) -> dict[str, Any]:
    """Return the formula in float64."""
    return {"loss": reference_terms(p.double(), q.double())[0].where(counted[..., None] != 0, 0)}


def reference_backward(dloss: Any, p: Any, q: Any, counted: Any) -> dict[str, Any]:
    """Return the gradient of :func:`reference_elements` by p in float64."""
    derivative = reference_terms(p.double(), q.double())[1]
    return {"dp": (dloss.double() * derivative).where(counted[..., None] != 0, 0)}


_P, _Q, _COUNTED = Array("p", "dtype", ROWS), Array("q", "dtype", ROWS), Array("counted", "float32", ("rows",))

LOSS = losses.spec(
    "tvd",
    "loss = slope * sum(0.5 * |p - q|) of each row, and its gradient by p",
    tvd_losses,
    tvd_gradients,
    ("p", "q"),
    reference,
    flops=4,
)
ELEMENTS_FORWARD = elements.spec(
    tvd_elements_forward,
    "loss = 0.5 * |p - q|",
    (_P, _Q, _COUNTED, Array("loss", "float32", ROWS, "output")),
    reference_elements,
    flops=2,
)
ELEMENTS_BACKWARD = elements.spec(
    tvd_elements_backward,
    "gradient of tvd, element by element, with respect to p",
    (Array("dloss", "float32", ROWS), _P, _Q, _COUNTED, Array("dp", "dtype", ROWS, "output")),
    reference_backward,
    flops=3,
)
SPECS = (LOSS, ELEMENTS_FORWARD, ELEMENTS_BACKWARD)
