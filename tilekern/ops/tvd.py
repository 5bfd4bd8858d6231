"""tvd: the total variation distance of two distributions, with the arguments of Liger's ``LigerTVDLossFunction``.

The launches of a reduced loss are written by hand, shared with jsd (:mod:`tilekern.ops.row_losses`): the forward also
computes the gradient, and the backward only scales it in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilekern.kernels import scale
from tilekern.kernels.tvd import ELEMENTS_BACKWARD, ELEMENTS_FORWARD, LOSS
from tilekern.ops import row_losses
from tilekern.ops.operation import operation


def tvd(
    p: Tensor, q: Tensor, shift_labels: Tensor | None = None, reduction: str = "batchmean", ignore_index: int = -100
) -> Tensor:
    """Return ``0.5 * |p - q|``, reduced over the rows that count.

    Unless the reduction is ``none``, the gradient is computed with the loss and kept for one backward.

    Args:
        p: [..., columns]; bfloat16, float16 or float32, any strides.
        q: of the shape of ``p``. If the dtypes differ, or it needs a gradient, the formula runs.
        shift_labels: [...] or None; rows whose label is ``ignore_index`` do not count, and may hold any values.
        reduction: ``batchmean`` divides the sum by the number of rows that count, ``mean`` by the number of their
            elements; ``sum``; ``none`` gives each element, 0 in rows that do not count.
        ignore_index: the label of rows that do not count.

    Returns:
        The loss in float32 (float64 for float64 inputs), for ``none`` in the shape of ``p``; 0 if no row counts.

    Raises:
        ValueError: ``reduction`` is unknown, or the shapes or the devices differ.
    """
    if reduction not in ("none", "sum", "mean", "batchmean"):
        raise ValueError(f"tvd: reduction must be none, sum, mean or batchmean, got {reduction!r}")
    columns = {"mean": p.shape[-1] if p.dim() else 0, "batchmean": 1}.get(reduction)
    slope = row_losses.slopes("tvd", "p", p, shift_labels, ignore_index, columns)
    if reduction == "none":
        return _elements(p, q, slope)
    return _loss(p, q, slope, *row_losses.modes(p))


def _terms(p: Tensor, q: Tensor) -> Tensor:
    return 0.5 * (p - q).abs()


@operation(
    LOSS, scale.SPEC, name="tvd_loss", ungraded=("q", "slope"), arrays=row_losses.arrays("p", "q"), kept=("gradient",),
    reads=("gradient", "slope"), key=("with_gradient",), **row_losses.parts(LOSS, "tvd_loss", ("p", "q"), _terms),
)  # fmt: skip
def _loss(p: Tensor, q: Tensor, slope: Tensor, with_gradient: bool = True, in_place: bool = False) -> Tensor:
    return row_losses.total(_terms, p, q, slope)


@operation(ELEMENTS_FORWARD, ELEMENTS_BACKWARD, name="tvd_elements", ungraded=("q", "counted"))
def _elements(p: Tensor, q: Tensor, counted: Tensor) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(p.dtype, q.dtype), torch.float32)
    return _terms(p.to(dtype), q.to(dtype)).where(counted[..., None] != 0, 0)
