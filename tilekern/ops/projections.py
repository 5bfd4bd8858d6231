"""Linear layers that share their input: the gradient of the input is accumulated inside the matrix products.

Autograd sums the gradients of a tensor that several layers read in separate passes. Each pass reads two matrices and
writes one. Here each further product is added to the first one's result.

It is written by hand and not declared, as no kernel of ours runs in a training step. Without a gradient q, k and v of
few rows may be one launch; else each product is that of ``linear``'s file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilekern.ops import few_rows
from tilekern.ops.linear import product
from tilekern.ops.registration import applied, differentiable_once, is_eager, needs_gradient, shaped

# The weights of q, k and v, which a kernel takes.
_JOINED = 3


def projections(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Return ``x @ weight.T`` for each weight.

    Args:
        x: [..., in_features].
        weights: [out_features, in_features] each, of x's dtype.

    Returns:
        [..., out_features] for each weight.
    """
    if not is_eager(x, *weights) or not needs_gradient(x, *weights):
        joined = few_rows.projections(x, *weights) if len(weights) == _JOINED else None
        return joined or tuple(product(x, weight) for weight in weights)
    return _apply(x, *weights)


def input_gradient(slopes: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the sum of ``slope @ weight``: [rows, out_features] and [out_features, in_features] for each."""
    dx = torch.mm(slopes[0], weights[0])
    for slope, weight in zip(slopes[1:], weights[1:], strict=True):
        dx.addmm_(slope, weight)
    return dx


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        # As by torch's layers, which keep no input for a frozen weight and no weight for an input without a gradient.
        of_x, *wanted = ctx.needs_input_grad
        ctx.save_for_backward(x if any(wanted) else None, *(weight if of_x else None for weight in weights))
        ctx.shape = x.shape
        return tuple(torch.nn.functional.linear(x, weight) for weight in weights)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        slopes = [slope.reshape(-1, slope.shape[-1]) for slope in given]
        of_x, *wanted = ctx.needs_input_grad
        dx = shaped(input_gradient(slopes, weights), *ctx.shape) if of_x else None
        rows = x.reshape(-1, x.shape[-1]) if any(wanted) else None
        return dx, *(torch.mm(s.t(), rows) if want else None for s, want in zip(slopes, wanted, strict=True))


_apply = applied(_Projections)
