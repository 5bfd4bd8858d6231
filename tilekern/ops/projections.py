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
from tilekern.ops.registration import (
    applied,
    cast_together,
    differentiable_once,
    needs_gradient,
    product_dtype,
    shaped,
)

# The weights of q, k and v, which a kernel takes.
_JOINED = 3
# Whether products of half types can be added to float32; torch 2.9 refuses (pytorch#167931).
_ADDS_WIDE = torch.__version__ >= (2, 10)


def projections(x: Tensor, *weights: Tensor, biases: Sequence[Tensor | None] = ()) -> tuple[Tensor, ...]:
    """Return ``x @ weight.T + bias`` for each weight.

    Args:
        x: [..., in_features].
        weights: [out_features, in_features] each, of x's dtype.
        biases: [out_features] or None for each weight, of x's dtype; empty if no layer has one.

    Returns:
        [..., out_features] for each weight.
    """
    given = biases or (None,) * len(weights)
    dtype = product_dtype(x, *weights, *given) if needs_gradient(x, *weights, *given) else None
    if dtype is not None:
        return _apply(x, *weights, *given, dtype)
    is_bare = len(weights) == _JOINED and not any(bias is not None for bias in given)
    joined = few_rows.projections(x, *weights) if is_bare else None
    return joined or tuple(map(product, (x,) * len(weights), weights, given))


def input_gradient(slopes: Sequence[Tensor], weights: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum of ``slope @ weight``: [rows, out_features] and [out_features, in_features] for each.

    It has their dtype, or ``dtype``, as of :func:`gradient`.
    """
    dx = gradient(slopes[0], weights[0], dtype)
    for slope, weight in zip(slopes[1:], weights[1:], strict=True):
        if dx.dtype == slope.dtype:
            dx.addmm_(slope, weight)
        elif dx.is_cuda and _ADDS_WIDE:
            # Without ``out`` torch copies dx first.
            torch.addmm(dx, slope, weight, out_dtype=dx.dtype, out=dx)
        else:
            dx.add_(gradient(slope, weight, dx.dtype))
    return dx


def gradient(a: Tensor, b: Tensor, dtype: torch.dtype | None = None, scaling: float = 1.0) -> Tensor:
    """Return ``scaling * a @ b``, of the dtype of both, or of float32 that no product rounds."""
    if dtype not in (None, a.dtype) and not a.is_cuda:
        a, b, dtype = a.to(dtype), b.to(dtype), None
    wide = {} if dtype in (None, a.dtype) else {"out_dtype": dtype}
    if scaling == 1.0:
        return torch.mm(a, b, **wide)
    # A product is scaled inside, with an addend that is not read.
    return torch.addmm(a.new_empty(()).expand(a.shape[0], b.shape[1]), a, b, beta=0, alpha=scaling, **wide)


class _Projections(torch.autograd.Function):
    """Of x, then the weights, then as many biases, then the dtype of the products, to which autocast casts all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> tuple[Tensor, ...]:
        # As by torch's layers, which keep no input for a frozen weight and no weight for an input without a gradient.
        of_x, *wanted = ctx.needs_input_grad
        *parameters, dtype = given
        ctx.shape, ctx.dtype, count = x.shape, x.dtype, len(parameters) // 2
        x, *parameters = cast_together(dtype, (x, *parameters))
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x if any(wanted[:count]) else None, *(weight if of_x else None for weight in weights))
        linear = torch.nn.functional.linear
        return tuple(linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        slopes = [slope.reshape(-1, slope.shape[-1]) for slope in given]
        of_x, *wanted, _ = ctx.needs_input_grad
        dx = shaped(input_gradient(slopes, weights, ctx.dtype), *ctx.shape) if of_x else None
        rows = None if x is None else x.reshape(-1, x.shape[-1])
        of_weights, of_biases = wanted[: len(slopes)], wanted[len(slopes) :]
        pairs = zip(slopes, of_weights, strict=True)
        dweights = (gradient(s.t(), rows, ctx.dtype) if want else None for s, want in pairs)
        dbiases = (s.sum(0, dtype=ctx.dtype) if want else None for s, want in zip(slopes, of_biases, strict=True))
        return dx, *dweights, *dbiases, None


_apply = applied(_Projections)
