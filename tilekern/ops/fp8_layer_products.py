"""The matrix products of a decoder layer whose linear layers are of 8-bit floats, all in one format.

Launches, their bits, and what is kept are those of :mod:`tilekern.ops.fp8_linear` and of the ops beside it.
"""
# ruff: noqa: ARG002, D102 (the methods stand in for those of Products)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilekern.ops import geglu, swiglu  # noqa: F401 (declared)
from tilekern.ops.fp8_block_linear import BLOCKWISE as BLOCKS
from tilekern.ops.fp8_gated_mlp import call, mlp_backward, mlp_forward
from tilekern.ops.fp8_linear import ROWWISE as ROWS
from tilekern.ops.fp8_linear import Format, Needs, kept_weight, why_never, why_no_plans, why_not
from tilekern.ops.kept import are_packed
from tilekern.ops.layer_products import Adapters, Products, Some, Wanted
from tilekern.ops.mxfp8_linear import MX
from tilekern.ops.operation import FUNCTIONS
from tilekern.ops.registration import PLAIN, needs_gradient
from tilekern.ops.rounded_weight import RoundedWeight

# By activation: the op of the gate, and its flags.
_GATES: dict[str, tuple[str, tuple[bool, ...]]] = {
    "silu": ("swiglu", ()), "gelu": ("geglu", (False,)), "gelu_tanh": ("geglu", (True,)),
}  # fmt: skip
# An op's name, what computes it, and the arguments.
_Call = tuple[Any, ...]


class Fp8Products(Products):
    """The products of a format. The MLP is two calls of linear layers, and the op of its gate between them."""

    is_lean = True

    def __init__(self, how: Format) -> None:
        self.how = how

    def serve(self, x: Tensor, dtype: torch.dtype, factors: Some) -> bool:
        """Return whether a layer with the input x runs these products, of a dtype."""
        return all(factor is None for factor in factors) and dtype == x.dtype and not why_never(x)

    def key_of(self, x: Tensor, weights: Any) -> Any:
        """Return what learns, and whether weights were rounded before."""
        learning = [weight is not None and weight.requires_grad for weight in weights]
        return x.requires_grad, *learning, *map(type, weights)

    def plans_of(self, x: Tensor, weights: Any, activation: str, dtype: torch.dtype) -> Any:
        """Return the plans of the MLP of a layer with the input x; None if a kernel of one of its parts is missing."""
        first, later = x.detach(), x.detach().requires_grad_()
        first.requires_grad_(x.requires_grad or weights.norm.requires_grad)
        graded = needs_gradient(first, *weights[1:7])
        out = x.new_empty((*x.shape[:-1], weights.out.shape[1])).requires_grad_()
        matrices = *weights[1:4], weights.out, *weights[-3:]
        if why_not(first, graded, matrices) or why_not(out, True, matrices):
            return None
        parameters = (part for pair in zip(weights[1:4], weights[4:7], strict=True) for part in pair)
        calls = [
            (self.how.op, self.how.run(graded), first, *parameters),
            self._linears(out, weights.out, None), *self._calls_of_mlp(later, weights[-3:], activation),
        ]  # fmt: skip
        if any(why_no_plans(*each) for each in calls):
            return None
        return self._plans_of_mlp(x, weights.gate, activation)

    def _linears(self, *given: Tensor | None) -> _Call:
        return self.how.op, self.how.graded, *given

    def _calls_of_mlp(self, rows: Tensor, weights: Sequence[Tensor], activation: str) -> list[_Call]:
        gate, up, down = weights
        active = rows.new_empty((*rows.shape[:-1], len(gate))).requires_grad_()
        return [self._linears(rows, gate, None, up, None), self._linears(active, down, None)]

    def _plans_of_mlp(self, x: Tensor, gate: Tensor, activation: str) -> Any:
        (name, flags), made = _GATES[activation], x.new_empty((x.shape[:-1].numel(), len(gate)))
        return FUNCTIONS[name]["plans_of"](True, made, made, *flags)

    def linears(
        self, wanted: Wanted, rows: Tensor, weights: Sequence[Tensor], biases: Some, adapters: Adapters,
        *, is_kept: bool = False,
    ) -> tuple[Sequence[Tensor], Some]:  # fmt: skip
        return self.how.forward(_needs(wanted), rows, weights, biases, reads_again=is_kept and not are_packed())

    def linears_backward(
        self, wanted: Wanted, slopes: Sequence[Tensor], kept: Any, weights: Sequence[Tensor], adapters: Adapters,
        dtype: torch.dtype, rows_dtype: torch.dtype, rows: Any = None,
    ) -> tuple[Tensor | None, Some, Some, Some]:  # fmt: skip
        return *self.how.backward(_needs(wanted), slopes, kept, weights, dtype), ()

    def mlp(
        self, plans: Any, wanted: Wanted, rows: Tensor, weights: Sequence[Tensor], adapters: Adapters, activation: str
    ) -> tuple[Tensor, Some]:
        first, last = _halves(wanted)
        (gate, up), kept = self.linears(first, rows, weights[:2], (None, None), adapters)
        name, flags = _GATES[activation]
        active = FUNCTIONS[name]["launch"](plans, gate, up, *flags)
        (y,), of_last = self.linears(last, active, weights[2:], (None,), adapters)
        return y, (gate, up, *kept, *of_last)

    def mlp_backward(
        self, plans: Any, wanted: Wanted, slope: Tensor, kept: Any, weights: Sequence[Tensor], adapters: Adapters,
        dtype: torch.dtype, activation: str,
    ) -> tuple[Any, ...]:  # fmt: skip
        (first, last), (gate, up, *rest), (name, flags) = _halves(wanted), kept, _GATES[activation]
        # Of each half the input's numbers and scales, if a weight of it learns.
        count = 2 * any(first.weights)
        dy, of_down, *_ = self.linears_backward(last, (slope,), rest[count:], weights[2:], adapters, dtype, dtype)
        slopes = FUNCTIONS[name]["launch_backward"](plans, (True, True), dy, gate, up, *flags)
        del dy
        drows, found, *_ = self.linears_backward(first, slopes, rest[:count], weights[:2], adapters, dtype, dtype)
        return drows, *found, *of_down


class RowwiseProducts(Fp8Products):
    """The products of the format ``rowwise``, whose MLP is :func:`tilekern.ops.fp8_gated_mlp.fp8_gated_mlp`."""

    tensors = (*PLAIN, RoundedWeight)

    def kept(self, weights: Some) -> Some:
        return [kept_weight(weight) for weight in weights]

    def _calls_of_mlp(self, rows: Tensor, weights: Sequence[Tensor], activation: str) -> list[_Call]:
        return [("fp8_gated_mlp", call, rows, *weights, activation)]

    def _plans_of_mlp(self, *_: Any) -> Any:
        return ()

    def mlp(
        self, plans: Any, wanted: Wanted, rows: Tensor, weights: Sequence[Tensor], adapters: Adapters, activation: str
    ) -> tuple[Tensor, Some]:
        return mlp_forward(rows, weights, activation)

    def mlp_backward(
        self, plans: Any, wanted: Wanted, slope: Tensor, kept: Any, weights: Sequence[Tensor], adapters: Adapters,
        dtype: torch.dtype, activation: str,
    ) -> tuple[Any, ...]:  # fmt: skip
        return tuple(mlp_backward((wanted.rows, *wanted.weights), slope, kept, weights, activation))


def _needs(wanted: Wanted) -> Needs:
    return Needs(wanted.rows, wanted.weights, wanted.biases)


def _halves(wanted: Wanted) -> tuple[Wanted, Wanted]:
    """Return what is wanted of gate and up, and of the last layer."""
    of_weights = wanted.weights
    return Wanted(wanted.rows, of_weights[:2], (False, False), ()), Wanted(True, of_weights[2:], (False,), ())


ROWWISE, BLOCKWISE, MXFP8 = RowwiseProducts(ROWS), Fp8Products(BLOCKS), Fp8Products(MX)
