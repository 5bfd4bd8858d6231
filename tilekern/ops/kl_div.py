"""kl_div: the Kullback-Leibler divergence as in torch; the backward reads only the target."""

from __future__ import annotations

import torch
from torch import Tensor

from tilekern.kernels.kl_div import BACKWARD, ELEMENTS_BACKWARD, ELEMENTS_FORWARD, FORWARD
from tilekern.ops.operation import operation


def kl_div(input: Tensor, target: Tensor, reduction: str = "batchmean", log_target: bool = False) -> Tensor:
    """Return ``target * (log(target) - input)``, reduced; ``torch.nn.functional.kl_div`` defines it.

    Args:
        input: [..., columns], log-probabilities; bfloat16, float16 or float32, any strides.
        target: of the shape of ``input``, probabilities. If dtypes differ, or it needs a gradient, the formula runs.
        reduction: ``batchmean`` divides the sum by the first size, ``mean`` by the number of elements; ``sum``;
            ``none`` gives each element.
        log_target: ``target`` holds log-probabilities.

    Returns:
        The loss in float32 (float64 for float64 inputs). For ``none``, a contiguous tensor with the shape of ``input``,
        in the dtype that torch promotes ``input`` and ``target`` to. An element is NaN if both logarithms are -inf, as
        in torch.

    Raises:
        ValueError: ``reduction`` is unknown, or the shapes or the devices differ.
    """
    if reduction not in ("batchmean", "mean", "sum", "none"):
        raise ValueError(f"kl_div: reduction must be batchmean, mean, sum or none, got {reduction!r}")
    if reduction == "none":
        return _elements(input, target, log_target)
    loss = _rows(input, target, log_target).sum()
    if reduction == "sum":
        return loss
    return loss / (input.numel() if reduction == "mean" else input.shape[0])


def _slope(dloss: Tensor, target: Tensor, log_target: bool) -> Tensor:
    probabilities = target.exp() if log_target else target
    return -probabilities * dloss


def _slope_of_rows(dloss: Tensor, target: Tensor, log_target: bool) -> Tensor:
    return _slope(dloss[..., None], target.to(dloss.dtype), log_target).to(target.dtype)


@operation(
    FORWARD, BACKWARD, name="kl_div_rows", flags={"log_target": "log_target"}, ungraded=("target",),
    fallback_backward=_slope_of_rows,
)  # fmt: skip
def _rows(input: Tensor, target: Tensor, log_target: bool = False) -> Tensor:
    """Return the sum of each row, in float32."""
    dtype = torch.promote_types(torch.promote_types(input.dtype, target.dtype), torch.float32)
    return _divergence(input.to(dtype), target.to(dtype), log_target).sum(-1)


@operation(
    ELEMENTS_FORWARD, ELEMENTS_BACKWARD, name="kl_div_elements", flags={"log_target": "log_target"},
    ungraded=("target",), fallback_backward=_slope,
)  # fmt: skip
def _elements(input: Tensor, target: Tensor, log_target: bool = False) -> Tensor:
    return _divergence(input, target, log_target)


def _divergence(input: Tensor, target: Tensor, log_target: bool) -> Tensor:
    return torch.nn.functional.kl_div(input, target, reduction="none", log_target=log_target)
