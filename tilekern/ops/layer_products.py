"""The matrix products of a decoder layer, as :mod:`tilekern.ops.decoder_layer` calls them: torch's, with adapters.

Layers of 8-bit floats have others (:mod:`tilekern.ops.fp8_layer_products`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilekern.ops.gated_mlp import kept as kept_by_mlp
from tilekern.ops.gated_mlp import launched, launched_backward, plans_of
from tilekern.ops.lora_linear import (
    Adapter,
    are_served,
    factor_gradients,
    low_gradients,
    products,
    rows_gradient,
    with_masks,
)
from tilekern.ops.projections import gradient
from tilekern.ops.registration import PLAIN

Adapters = Sequence[Adapter | None]
Some = Sequence[Tensor | None]


class Wanted(NamedTuple):
    """Which gradients are wanted of linear layers: of their rows, and of each one's weight and bias.

    ``biases`` are empty for an MLP. ``factors``: of ``a`` and ``b`` of each one's adapter; empty if none has one.
    ``factors_dtype``: that of the factors' gradients; None for that of the factors of products.
    """

    rows: bool
    weights: Sequence[bool]
    biases: Sequence[bool]
    factors: Sequence[bool]
    factors_dtype: torch.dtype | None = None


class Products:
    """The products of a layer without autograd. Rows are [rows, in_features], results [rows, out_features].

    Attributes:
        tensors: the classes of weights.
        is_lean: whether the layer keeps q and k only as they were before their norms and rotation.
    """

    tensors: tuple[type[Tensor], ...] = PLAIN
    is_lean = False

    def serve(self, x: Tensor, dtype: torch.dtype, factors: Some) -> bool:  # noqa: ARG002
        """Return whether a layer with the input x runs these products, of a dtype.

        ``factors``: of the adapters of q, k, v, out, gate, up and down; or empty.
        """
        return are_served(x, factors)

    def key_of(self, x: Tensor, weights: Any) -> Any:  # noqa: ARG002
        """Return what :meth:`plans_of` depends on beside shapes and dtypes."""
        return None

    def plans_of(self, x: Tensor, weights: Any, activation: str, dtype: torch.dtype) -> Any:
        """Return the plans of the MLP of a layer with the input x; None if a kernel of its products is missing.

        ``weights``: a :class:`tilekern.ops.decoder_layer.Weights`.
        """
        gate, up, down = weights[-3:]
        return plans_of(x.view(-1, x.shape[-1]), gate, up, down, activation, dtype)

    def kept(self, weights: Some) -> Some:
        """Return what the backward is given in place of a layer's weights."""
        return weights

    def linears(
        self, wanted: Wanted, rows: Tensor, weights: Sequence[Tensor], biases: Some, adapters: Adapters,
        *, is_kept: bool = False,
    ) -> tuple[Sequence[Tensor], Some]:  # fmt: skip
        """Return the results of layers that share their rows, and what the backward reads beside weights and adapters.

        ``is_kept``: the caller keeps the rows.
        """
        made, low, masks = products(rows, weights, biases, adapters)
        of_a = any(wanted.factors[::2])
        is_read = not is_kept and (any(wanted.weights) or of_a)
        masks = masks if wanted.rows or of_a else [None] * len(masks)
        return made, (rows if is_read else None, low if any(wanted.factors[1::2]) else None, *masks)

    def linears_backward(
        self, wanted: Wanted, slopes: Sequence[Tensor], kept: Some, weights: Sequence[Tensor], adapters: Adapters,
        dtype: torch.dtype, rows_dtype: torch.dtype, rows: Any = None,
    ) -> tuple[Tensor | None, Some, Some, Some]:  # fmt: skip
        """Return the gradients of the rows, of weights, of biases and of factors.

        Args:
            slopes: the gradients of the results.
            kept: the second result of :meth:`linears`.
            dtype: that of the gradients of weights and biases.
            rows_dtype: that of the gradient of the rows.
            rows: those that the caller kept.
        """
        read, low, *masks = kept
        adapters = with_masks(adapters, masks)
        rows = read if rows is None else rows
        pairs = zip(slopes, wanted.weights, strict=True)
        dweights = [gradient(s.t(), rows, dtype) if want else None for s, want in pairs]
        dbiases = [s.sum(0, dtype=dtype) if want else None for s, want in zip(slopes, wanted.biases, strict=True)]
        dtype = wanted.factors_dtype
        dlow, of_b = low_gradients(wanted.rows, wanted.factors, slopes, low, adapters, dtype)
        drows = rows_gradient(slopes, weights, dlow, adapters, rows_dtype) if wanted.rows else None
        dfactors = factor_gradients(wanted.factors, rows, dlow, of_b, adapters, dtype)
        return drows, dweights, dbiases, dfactors

    def mlp(
        self, plans: Any, wanted: Wanted, rows: Tensor, weights: Sequence[Tensor], adapters: Adapters, activation: str
    ) -> tuple[Tensor, Some]:
        """Return the result of the MLP of gate, up and down, and what its backward reads."""
        y, gate, up, active, lows, masks = launched(plans[0], rows, weights, adapters)
        is_read = activation != "silu" and (wanted.weights[2] or any(wanted.factors[4:5]))
        read = kept_by_mlp(wanted.weights[:2], wanted.factors, rows, lows)
        return y, (*read, gate, up, active if is_read else None, *masks)

    def mlp_backward(
        self, plans: Any, wanted: Wanted, slope: Tensor, kept: Some, weights: Sequence[Tensor], adapters: Adapters,
        dtype: torch.dtype, activation: str,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return the gradients of the rows, the three weights and the factors, in a dtype."""
        rows, low, last, gate, up, active, *masks = kept
        adapters = with_masks(adapters, masks)
        wants = True, *wanted.weights, *wanted.factors
        return launched_backward(
            plans[1], wants, slope, rows, gate, up, weights, adapters, (low, last), dtype, active, activation,
            wanted.factors_dtype,
        )  # fmt: skip


TORCH = Products()
