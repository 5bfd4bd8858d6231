"""The gate between the products of experts by 8-bit floats: each result is rounded to e4m3 where it is computed.

The formulas are those of :mod:`tilekern.kernels.experts.gate`. Only products read ``y``, ``dpre`` and the weighted
value, along rows, so a row is stored as e4m3 numbers and its scale, rounded once from float32; gate and up gradients of
a row share one. If experts have biases, ``wide`` is ``dpre`` in the layer's dtype, which the biases' gradients sum.
Rows without an expert get zeros.
"""

from __future__ import annotations

import functools
from typing import Any

import cuda.tile as ct

from tilekern.kernels.experts.gate import (
    BACKWARD_READ,
    DIMENSIONS,
    READ,
    WIDE,
    _halves,
    _parts,
    _store_halves,
    backward_given,
    backward_reference,
    given,
    reference,
)
from tilekern.kernels.experts.rows import expert_of, sizes
from tilekern.kernels.families.arrays import ROWS, Arrays
from tilekern.kernels.fp8.gated import READ_BYTES, VALUE_BYTES, gate_spec, nan_rows
from tilekern.kernels.fp8.scales import E4M3, bits_of, scale_of
from tilekern.kernels.tiles import ConstBool, ConstInt, each_step, load
from tilekern.spec import Array, Dimension, Problem


def _gates(pre, bias, expert, tile, n, c, columns, shape, biased, interleaved):
    """Return the halves of a tile in float32, read or ``tile`` if that is not None, with the bias of its expert."""
    if ct.static_eval(tile is None):
        gate, up = _halves(pre, n, c, columns, shape, True, interleaved)
    else:
        gate, up = tile[0].astype(ct.float32), tile[1].astype(ct.float32)
    if ct.static_eval(biased):
        more, above = _halves(bias, expert, c, columns, shape, True, interleaved)
        gate, up = gate + more, up + above
    return gate, up


def _scaled(largest, scale, n):
    """Store a row's scale, and return its reciprocal."""
    step, inverse = scale_of(ct.max(largest, 1, keepdims=True))
    ct.store(scale, (n,), ct.reshape(step, (1,)), allow_tma=False)
    return inverse


def _value(pre, bias, expert, is_on, numbers, n, c, columns, shape, biased, interleaved, tanh):
    gate, up = _gates(pre, bias, expert, None, n, c, columns, shape, biased, interleaved)
    value, _, rest = _parts(gate, up, numbers[0], numbers[1], numbers[2], tanh)
    return ct.where(is_on, value * rest, 0.0)


def _forward(
    n, pre, bias, experts, total, numbers, y, scale, columns, tile_n, chunks, held, tanh, interleaved, biased
):  # fmt: skip
    shape, is_on = (1, tile_n), ct.load(experts, (n,), ()) < total
    expert, largest, kept = 0, ct.zeros((1, tile_n), ct.int32), ()
    if ct.static_eval(biased):
        expert = expert_of(experts, n, bias)
    if ct.static_eval(held):
        for c in ct.static_iter(range(chunks)):
            tile = _value(pre, bias, expert, is_on, numbers, n, c, columns, shape, biased, interleaved, tanh)
            largest, kept = ct.maximum(largest, bits_of(tile)), kept + (tile,)
        inverse = _scaled(largest, scale, n)
        for c in ct.static_iter(range(chunks)):
            ct.store(y, (n, c), (kept[c] * inverse).astype(y.dtype), allow_tma=False)
    else:
        # A number that the compiler does not know: of loops that it knows it unrolled all, and spilled.
        steps = chunks * ct.minimum(1, scale.shape[0])
        for c in range(steps):
            tile = _value(pre, bias, expert, is_on, numbers, n, c, columns, shape, biased, interleaved, tanh)
            largest = ct.maximum(largest, bits_of(tile))
        inverse = _scaled(largest, scale, n)
        for c in range(steps):
            tile = _value(pre, bias, expert, is_on, numbers, n, c, columns, shape, biased, interleaved, tanh)
            ct.store(y, (n, c), (tile * inverse).astype(y.dtype), allow_tma=False)


@ct.kernel
def fp8_experts_gate(
    pre, bias, experts, total, alpha, limit, shift, y, scale, columns: ConstInt, tile_n: ConstInt, chunks: ConstInt,
    held: ConstBool, persistent: ConstBool, tanh: ConstBool, interleaved: ConstBool, biased: ConstBool,
):  # fmt: skip
    """A row a block, or resident blocks that loop; pre [rows, 2 columns], bias [experts, 2 columns], experts [rows].

    y [rows, columns], scale [rows]; there are ``total`` experts. A row's values stay in registers if it is ``held``,
    else it is read and computed twice.
    """
    each_step(
        _forward, y.shape[0], persistent,
        (
            pre, bias, experts, total, (alpha, limit, shift), y, scale, columns, tile_n, chunks, held, tanh,
            interleaved, biased,
        ),
    )  # fmt: skip


def _read(dy, pre, n, c, columns, shape, interleaved):
    """Return what is held of a tile: dy, gate and up in their dtype."""
    gate, up = _halves(pre, n, c, columns, shape, True, interleaved)
    return load(dy, (n, c), shape, True, 0, False), (gate.astype(pre.dtype), up.astype(pre.dtype))


def _gradients(tile, pre, bias, expert, is_on, weight, numbers, n, c, columns, shape, biased, interleaved, tanh):
    """Return the gradients of gate and up, the weighted value, and the terms of the routing weight's gradient."""
    gate, up = _gates(pre, bias, expert, tile[1], n, c, columns, shape, biased, interleaved)
    slope, limit = ct.where(is_on, tile[0].astype(ct.float32), 0.0), numbers[1]
    value, rise, rest = _parts(gate, up, numbers[0], limit, numbers[2], tanh)
    made, dvalue = ct.where(is_on, value * rest, 0.0), slope * weight
    dgate = ct.where(is_on & (gate <= limit), dvalue * rest * rise, 0.0)
    dup = ct.where(is_on & (ct.abs(up) <= limit), dvalue * value, 0.0)
    return dgate, dup, made * weight, slope * made


def _backward(
    n, dy, pre, bias, experts, order, weights, shares, total, numbers, dpre, wide, y, dpre_scale, y_scale, dweights,
    columns, tile_n, chunks, held, tanh, interleaved, biased,
):  # fmt: skip
    shape, slot = (1, tile_n), ct.load(order, (n,), ())
    is_on, expert = ct.load(experts, (n,), ()) < total, 0
    weight = ct.where(is_on, ct.load(weights, (slot,), ()).astype(ct.float32), 0.0)
    if ct.static_eval(biased):
        expert = expert_of(experts, n, bias)
    known = (pre, bias, expert, is_on, weight, numbers, n)
    more = (columns, shape, biased, interleaved, tanh)
    of_dpre, of_y = ct.zeros(shape, ct.int32), ct.zeros(shape, ct.int32)
    products, kept = ct.zeros(shape, ct.float32), ()
    if ct.static_eval(held):
        for c in ct.static_iter(range(chunks)):
            kept = kept + (_read(dy, pre, n, c, columns, shape, interleaved),)
            dgate, dup, made, terms = _gradients(kept[c], *known, c, *more)
            of_dpre = ct.maximum(of_dpre, ct.maximum(bits_of(dgate), bits_of(dup)))
            of_y, products = ct.maximum(of_y, bits_of(made)), products + terms
    else:
        steps = chunks * ct.minimum(1, dpre_scale.shape[0])
        for c in range(steps):
            tile = _read(dy, pre, n, c, columns, shape, interleaved)
            dgate, dup, made, terms = _gradients(tile, *known, c, *more)
            of_dpre = ct.maximum(of_dpre, ct.maximum(bits_of(dgate), bits_of(dup)))
            of_y, products = ct.maximum(of_y, bits_of(made)), products + terms
    inverse, of_value = _scaled(of_dpre, dpre_scale, n), _scaled(of_y, y_scale, n)
    outputs = (dpre, wide, y, inverse, of_value)
    if ct.static_eval(held):
        for c in ct.static_iter(range(chunks)):
            dgate, dup, made, _ = _gradients(kept[c], *known, c, *more)
            _store(outputs, dgate, dup, made, n, c, columns, shape, biased, interleaved)
    else:
        for c in range(steps):
            tile = _read(dy, pre, n, c, columns, shape, interleaved)
            dgate, dup, made, _ = _gradients(tile, *known, c, *more)
            _store(outputs, dgate, dup, made, n, c, columns, shape, biased, interleaved)
    summed = ct.sum(products, axis=1)
    if ct.static_eval(biased):
        summed = summed + ct.where(is_on, ct.load(shares, (n,), ()), 0.0)
    ct.store(dweights, (slot,), summed, allow_tma=False)


def _store(outputs, dgate, dup, made, n, c, columns, shape, biased, interleaved):
    dpre, wide, y, inverse, of_value = outputs
    _store_halves(dpre, n, c, columns, shape, True, interleaved, dgate * inverse, dup * inverse)
    if ct.static_eval(biased):
        _store_halves(wide, n, c, columns, shape, True, interleaved, dgate, dup)
    ct.store(y, (n, c), (made * of_value).astype(y.dtype), allow_tma=False)


@ct.kernel
def fp8_experts_gate_backward(
    dy, pre, bias, experts, order, weights, shares, total, alpha, limit, shift, dpre, wide, y, dpre_scale, y_scale,
    dweights, columns: ConstInt, tile_n: ConstInt, chunks: ConstInt, held: ConstBool, persistent: ConstBool,
    tanh: ConstBool, interleaved: ConstBool, biased: ConstBool,
):  # fmt: skip
    """As the forward; dy and y [rows, columns], pre, dpre and wide [rows, 2 columns], scales, order and shares [rows].

    weights and dweights [rows] are in the order of slots; ``order`` is the slot of each row.
    """
    each_step(
        _backward, dy.shape[0], persistent,
        (
            dy, pre, bias, experts, order, weights, shares, total, (alpha, limit, shift), dpre, wide, y, dpre_scale,
            y_scale, dweights, columns, tile_n, chunks, held, tanh, interleaved, biased,
        ),
    )  # fmt: skip


_NUMBERS = (Array("y", E4M3, ROWS, "output"), Array("scale", "float32", ("rows",), "output"))


def _backward_arrays(problem: Problem) -> Arrays:
    return (
        *BACKWARD_READ,
        Array("dpre", E4M3, WIDE, "output"),
        # Not written without biases.
        Array("wide", "dtype", WIDE, "output" if problem["biased"] else "input", flag="biased"),
        Array("y", E4M3, ROWS, "output"),
        Array("dpre_scale", "float32", ("rows",), "output"),
        Array("y_scale", "float32", ("rows",), "output"),
        Array("dweights", "float32", ("rows",), "output"),
    )


@functools.wraps(reference)
def _forward_reference(**inputs: Any) -> dict[str, Any]:
    """Compute the value in float64; a row with NaN or infinity is NaN."""
    return {"y": nan_rows(reference(**inputs)["y"])}


def _backward_reference(
    tanh: bool, interleaved: bool, biased: bool, wide: Any = None, **inputs: Any
) -> dict[str, Any]:  # fmt: skip
    """Compute the gradients and the weighted value in float64; a row with NaN or infinity is NaN."""
    made = backward_reference(**inputs, tanh=tanh, interleaved=interleaved, biased=biased, remade=True)
    wide = {"wide": made["dpre"]} if biased else {}
    return {"dpre": nan_rows(made["dpre"]), **wide, "y": nan_rows(made["y"]), "dweights": made["dweights"]}


FORWARD = gate_spec(
    fp8_experts_gate,
    "the gate between the products of experts, in e4m3 with a scale for each row",
    DIMENSIONS,
    (*READ, *_NUMBERS),
    _forward_reference,
    VALUE_BYTES,
    {"y": "scale"},
    sizes=sizes,
    given=given,
    flops=lambda problem: 13 * problem["rows"] * problem["columns"],
)
BACKWARD = gate_spec(
    fp8_experts_gate_backward,
    "gradients of the gate between the products of experts, and the weighted value, in e4m3",
    (*DIMENSIONS, Dimension("weight_dtype", "dtype")),
    _backward_arrays,
    _backward_reference,
    READ_BYTES,
    {"dpre": "dpre_scale", "y": "y_scale"},
    sizes=sizes,
    given=backward_given,
    flops=lambda problem: 33 * problem["rows"] * problem["columns"],
)
SPECS = (FORWARD, BACKWARD)
