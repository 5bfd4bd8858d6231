"""tvd: the total variation distance of two distributions, with the arguments of Liger's ``LigerTVDLossFunction``.

The launches of a reduced loss are written by hand, shared with jsd (:mod:`tilekern.ops.row_losses`): the forward makes
the gradient too, and the backward only multiplies it, in place.
"""

from __future__ import annotations

import torch

from tilekern.kernels import scale
from tilekern.kernels.tvd import ELEMENTS_BACKWARD, ELEMENTS_FORWARD, LOSS
from tilekern.ops import row_losses
from tilekern.ops.operation import operation


def tvd(
    p: torch.Tensor, q: torch.Tensor, shift_labels: torch.Tensor | None = None, reduction: str = "batchmean",
    ignore_index: int = -100,
) -> torch.Tensor:  # fmt: skip
    """``0.5 * |p - q|``, reduced over the rows that count.

    The gradient is made with the loss and kept for one backward; another one through the same loss (``retain_graph``)
    is refused, unless the reduction is ``none``.

    Args:
        p: [..., columns]; bfloat16, float16 or float32, any strides.
        q: of the shape of ``p``. Where the dtypes differ, or where it needs a gradient, the formula runs.
        shift_labels: [...] or None; rows whose label is ``ignore_index`` do not count, whatever they hold.
        reduction: ``batchmean`` divides the sum by the number of rows that count, ``mean`` by that of their elements;
            ``sum``; ``none`` gives each element, 0 in rows that do not count.
        ignore_index: the label of rows that do not count.

    Returns:
        The loss in float32 (float64 for float64 inputs), for ``none`` in the shape of ``p``; 0 where no row counts.

    Raises:
        ValueError: ``reduction`` is unknown, or the shapes or the devices differ.
    """
    if reduction not in ("none", "sum", "mean", "batchmean"):
        raise ValueError(f"tvd: reduction must be none, sum, mean or batchmean, got {reduction!r}")
    columns = {"mean": p.shape[-1] if p.dim() else 0, "batchmean": 1}.get(reduction)
    slope = row_losses.slopes("tvd", p, shift_labels, ignore_index, columns)
    if reduction == "none":
        return _elements(p, q, slope)
    return _loss(p, q, slope, *row_losses.modes(p))


def _terms(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return 0.5 * (p - q).abs()


@operation(
    LOSS, scale.SPEC, name="tvd_loss", ungraded=("q", "slope"), arrays=row_losses.arrays("p", "q"), kept=("gradient",),
    reads=("gradient", "slope"), key=("with_gradient",), **row_losses.parts(LOSS, "tvd_loss", ("p", "q"), _terms),
)  # fmt: skip
def _loss(
    p: torch.Tensor, q: torch.Tensor, slope: torch.Tensor, with_gradient: bool = True, in_place: bool = False
) -> torch.Tensor:
    return row_losses.total(_terms, p, q, slope)


@operation(ELEMENTS_FORWARD, ELEMENTS_BACKWARD, name="tvd_elements", ungraded=("q", "counted"))
def _elements(p: torch.Tensor, q: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(torch.promote_types(p.dtype, q.dtype), torch.float32)
    return _terms(p.to(dtype), q.to(dtype)).where(counted[..., None] != 0, 0)
