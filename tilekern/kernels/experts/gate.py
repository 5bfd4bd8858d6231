"""The gate between the two products of experts, forward and backward, with the bias of each row's expert.

With a and b the gate's and the up half of a row of the first product, the bias of the row's expert added, and
``g = min(a, limit)``, ``u = min(max(b, -limit), limit)``: ``y = p(g) * (u + shift)``, where p is ``x * sigmoid(alpha *
x)`` or gelu by tanh (:mod:`tilekern.kernels.geglu`). An infinite limit, alpha 1 and shift 0 are SwiGLU; 7, 1.702 and 1
are GPT-OSS's (arXiv:2508.10925). The halves follow one another, or are interleaved: a, b, a, b.

The backward takes dy, the gradient of the weighted sum of rows multiplied by the down weight. With w the routing weight
of a row: ``da = w * dy * (u + shift) * p'(g)`` if a is not above the limit, ``db = w * dy * p(g)`` if b is within it,
and ``dw = sum(dy * y) + share``, where share comes from the down bias. It recomputes ``w * y`` for the gradient of the
down weight, so that only a and b are kept of both products. Rows without an expert get zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.experts.rows import EXPERTS, bias_of, expert_of, routing, sizes, widths
from tilekern.kernels.families.arrays import ROWS, Arrays, gradients
from tilekern.kernels.families.tables import MATRIX, Table, spec
from tilekern.kernels.geglu import by_tanh
from tilekern.kernels.swiglu import sigmoid
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of, load
from tilekern.spec import Array, Config, Constraint, Dimension, KernelSpec, Problem, ScalarParameter, Space, Value, cdiv


def _is_odd():
    """Return which numbers are the second of a pair."""
    return ct.reshape(ct.arange(2, dtype=ct.int32), (1, 1, 2)) == 1


def _halves(array, row, c, columns, shape, bounded, interleaved):
    """Return the gate's and the up numbers of a tile, in float32."""
    if ct.static_eval(interleaved):
        tile = load(array, (row, c), (shape[0], 2 * shape[1]), bounded, 0, False).astype(ct.float32)
        pairs = ct.reshape(tile, (shape[0], shape[1], 2))
        # Each sum has one nonzero term: a thread that has loaded 16 bytes has whole pairs.
        return ct.sum(ct.where(_is_odd(), 0.0, pairs), axis=2), ct.sum(ct.where(_is_odd(), pairs, 0.0), axis=2)
    gate = load(array.slice(1, 0, columns), (row, c), shape, bounded, 0, False)
    up = load(array.slice(1, columns, 2 * columns), (row, c), shape, bounded, 0, False)
    return gate.astype(ct.float32), up.astype(ct.float32)


def _store_halves(array, row, c, columns, shape, bounded, interleaved, gate, up):
    if ct.static_eval(interleaved):
        wide = (shape[0], shape[1], 1)
        pairs = ct.where(_is_odd(), ct.reshape(up, wide), ct.reshape(gate, wide))
        tile = ct.reshape(pairs, (shape[0], 2 * shape[1])).astype(array.dtype)
        ct.store(array, (row, c), tile, check_bounds=bounded, allow_tma=False)
    else:
        first, second = array.slice(1, 0, columns), array.slice(1, columns, 2 * columns)
        ct.store(first, (row, c), gate.astype(array.dtype), check_bounds=bounded, allow_tma=False)
        ct.store(second, (row, c), up.astype(array.dtype), check_bounds=bounded, allow_tma=False)


def _read(pre, bias, experts, row, c, columns, shape, bounded, biased, interleaved):
    """Load the halves of a tile, with the bias of its only expert."""
    gate, up = _halves(pre, row, c, columns, shape, bounded, interleaved)
    if ct.static_eval(biased):
        more, above = _halves(bias, expert_of(experts, row, bias), c, columns, shape, bounded, interleaved)
        gate, up = gate + more, up + above
    return gate, up


def _parts(gate, up, alpha, limit, shift, tanh):
    """Return p(g), its slope, and u + shift."""
    g = ct.where(gate > limit, limit, gate)
    u = ct.where(up > limit, limit, ct.where(up < -limit, -limit, up))
    if ct.static_eval(tanh):
        share, slope = by_tanh(g)
        return g * share, share + g * slope, u + shift
    s = sigmoid(alpha * g)
    return g * s, s * (1.0 + alpha * g * (1.0 - s)), u + shift


@ct.kernel
def experts_gate(
    pre, bias, experts, total, alpha, limit, shift, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt,
    bounded: ConstBool, tanh: ConstBool, interleaved: ConstBool, biased: ConstBool,
):  # fmt: skip
    """pre [rows, 2 columns], bias [experts, 2 columns], experts [rows], y [rows, columns]; ``total`` experts."""
    shape = (tile_m, tile_n)
    across = ct.cdiv(columns, tile_n)
    for item in range(ct.bid(0), ct.cdiv(y.shape[0], tile_m) * across, ct.num_blocks(0)):
        row, c = item // across, item % across
        gate, up = _read(pre, bias, experts, row, c, columns, shape, bounded, biased, interleaved)
        value, _, rest = _parts(gate, up, alpha, limit, shift, tanh)
        of = load(experts, (row,), (tile_m,), bounded, 0, False)
        tile = ct.where(ct.expand_dims(of, 1) < total, value * rest, 0.0)
        ct.store(y, (row, c), tile.astype(y.dtype), check_bounds=bounded, allow_tma=False)


@ct.kernel
def experts_gate_backward(
    dy, pre, bias, experts, order, weights, shares, total, alpha, limit, shift, dpre, y, dweights, columns: ConstInt,
    tile_m: ConstInt, tile_n: ConstInt, bounded: ConstBool, tanh: ConstBool, interleaved: ConstBool, biased: ConstBool,
    remade: ConstBool,
):  # fmt: skip
    """dy and y [rows, columns], pre and dpre [rows, 2 columns], experts, order and shares [rows].

    weights and dweights [rows] are in the order of slots; ``order`` is the slot of each row.
    """
    shape = (tile_m, tile_n)
    for row in range(ct.bid(0), ct.cdiv(dy.shape[0], tile_m), ct.num_blocks(0)):
        is_row = row * tile_m + ct.arange(tile_m, dtype=ct.int32) < dy.shape[0]
        slot = load(order, (row,), (tile_m,), bounded, 0, False)
        counts = load(experts, (row,), (tile_m,), bounded, 0, False) < total
        weight = ct.gather(weights, slot, mask=is_row).astype(ct.float32)
        is_on, factor = ct.expand_dims(counts, 1), ct.expand_dims(weight, 1)
        products = ct.zeros(shape, ct.float32)
        for c in range(ct.cdiv(dy.shape[1], tile_n)):
            gate, up = _read(pre, bias, experts, row, c, columns, shape, bounded, biased, interleaved)
            slope = ct.where(is_on, load(dy, (row, c), shape, bounded, 0, False).astype(ct.float32), 0.0)
            value, rise, rest = _parts(gate, up, alpha, limit, shift, tanh)
            made = ct.where(is_on, value * rest, 0.0)
            products = products + slope * made
            dvalue = slope * factor
            dgate = ct.where(is_on & (gate <= limit), dvalue * rest * rise, 0.0)
            dup = ct.where(is_on & (ct.abs(up) <= limit), dvalue * value, 0.0)
            _store_halves(dpre, row, c, columns, shape, bounded, interleaved, dgate, dup)
            if ct.static_eval(remade):
                ct.store(y, (row, c), (made * factor).astype(y.dtype), check_bounds=bounded, allow_tma=False)
        summed = ct.sum(products, axis=1)
        if ct.static_eval(biased):
            summed = summed + ct.where(counts, load(shares, (row,), (tile_m,), bounded, 0, False), 0.0)
        ct.scatter(dweights, slot, summed, mask=is_row)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["persistent", "block"],
        "tile_m": [1] if problem["biased"] else [1, 2, 4],
        "tile_n": sorted(n for n in widths(problem["columns"]) if n <= 2048)[-3:],
        "occupancy": [2, 4],
        "num_worker_warps": [0, 8],
    }


def _space(most: int) -> Space:
    return Space(
        _axes,
        (
            Constraint(
                f"a tile of more than {most} elements spills",
                lambda problem, config, target: config["tile_m"] * config["tile_n"] <= most,
            ),
            Constraint(
                "rows of one tile have biases of several experts",
                lambda problem, config, target: config["tile_m"] == 1 or not problem["biased"],
            ),
        ),
    )


def _config(problem: Problem, elements: int, schedule: str, occupancy: int) -> Config:
    found = widths(problem["columns"])
    tile_n = next((n for n in found if n <= elements), found[-1])
    tile_m = 1 if problem["biased"] else max(1, min(4, elements // tile_n))
    return Config(schedule=schedule, tile_m=tile_m, tile_n=tile_n, occupancy=occupancy, num_worker_warps=0)


DIMENSIONS = (*MATRIX, *(Dimension(name, "flag") for name in ("tanh", "interleaved", "biased")))
_SCALARS = (
    ScalarParameter("total", "int32", EXPERTS),
    ScalarParameter("alpha", "float32", 1.702),
    ScalarParameter("limit", "float32", 1.5),
    ScalarParameter("shift", "float32", 1.0),
)
WIDE = ("rows", "2*columns")
_READ_BY_BOTH = (Array("pre", "dtype", WIDE), bias_of("2*columns"), Array("experts", "int32", ("rows",)))
READ: Arrays = (*_READ_BY_BOTH, *_SCALARS)
BACKWARD_READ: Arrays = (
    Array("dy", "dtype", ROWS),
    *_READ_BY_BOTH,
    Array("order", "int32", ("rows",)),
    Array("weights", "weight_dtype", ("rows",)),
    Array("shares", "float32", ("rows",)),
    *_SCALARS,
)


def _backward_arrays(problem: Problem) -> Arrays:
    return (
        *BACKWARD_READ,
        Array("dpre", "dtype", WIDE, "output"),
        # Not written unless ``remade``.
        Array("y", "dtype", ROWS, "output" if problem["remade"] else "input", flag="remade"),
        Array("dweights", "float32", ("rows",), "output"),
    )


def given(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw the experts of rows."""
    return {"experts": routing(problem["rows"], generator, device)["experts"]}


def backward_given(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw the experts of rows, and their order."""
    import torch

    order = torch.randperm(problem["rows"], generator=generator, device=device).to(torch.int32)
    return given(problem, generator, device) | {"order": order}


def value_of(
    pre: Any, bias: Any, experts: Any, alpha: float, limit: float, shift: float, tanh: bool, interleaved: bool,
    biased: bool,
) -> Any:  # fmt: skip
    """Compute the gate by torch, in the dtype of ``pre``, also for rows without an expert."""
    import torch

    if biased:
        pre = pre + bias[experts.long().clamp(max=len(bias) - 1)].to(pre.dtype)
    gate, up = (pre[..., ::2], pre[..., 1::2]) if interleaved else pre.chunk(2, -1)
    if not math.isinf(limit):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    value = torch.nn.functional.gelu(gate, approximate="tanh") if tanh else gate * torch.sigmoid(alpha * gate)
    return value * (up + shift if shift else up)


def reference(
    pre: Any, bias: Any, experts: Any, total: int, alpha: float, limit: float, shift: float, tanh: bool,
    interleaved: bool, biased: bool,
) -> dict[str, Any]:  # fmt: skip
    """Compute the gate's value; 0 for rows without an expert."""
    y = value_of(pre.double(), bias.double(), experts, alpha, limit, shift, tanh, interleaved, biased)
    return {"y": y.where((experts < total)[:, None], 0.0)}


def backward_reference(
    dy: Any, pre: Any, experts: Any, order: Any, weights: Any, shares: Any, total: int, tanh: bool, interleaved: bool,
    biased: bool, remade: bool, y: Any = None, **rest: Any,
) -> dict[str, Any]:  # fmt: skip
    """Compute the gradients of the pre-activation and of the routing weights, and the weighted value."""
    slot, counts = order.long(), (experts < total)[:, None]
    factor, flags = weights.double()[slot][:, None], {"tanh": tanh, "interleaved": interleaved, "biased": biased}

    def forward(pre: Any) -> dict[str, Any]:
        return reference(pre, experts=experts, total=total, **flags, **rest)

    y, found = forward(pre)["y"], gradients(forward, {"y": dy.double() * factor}, pre=pre)
    summed = (y * dy.double()).sum(1) + (shares.double() if biased else 0.0)
    dweights = summed.new_zeros(len(summed)).scatter_(0, slot, summed.where(counts[:, 0], 0.0))
    # In rows without an expert, which nobody reads, 0 times a non-finite weight is NaN.
    made = {"y": y * factor} if remade else {}
    return {"dpre": found["dpre"].where(counts, 0.0), "dweights": dweights, **made}


def _spec(
    name: str, summary: str, dimensions: tuple[Dimension, ...], arrays: Arrays | Table,
    of: Callable[..., dict[str, Any]], most: int, **more: Any,
) -> KernelSpec:  # fmt: skip
    """Return the spec of the gate or its gradient, with tiles of at most ``most`` elements."""
    return spec(
        name, summary, dimensions, arrays, of,
        sizes=sizes,
        constants=lambda problem, config: {
            "bounded": config["tile_m"] > 1 or problem["columns"] % config["tile_n"] != 0
        },
        space=_space(most),
        default=lambda problem, target: _config(problem, 1024, "block", 4),
        generic=lambda problem: _config(problem, 256, "persistent", 1),
        **more,
    )  # fmt: skip


FORWARD = _spec(
    "experts_gate",
    "the gate between the products of experts, with the bias of each row's expert",
    DIMENSIONS,
    (*READ, Array("y", "dtype", ROWS, "output")),
    reference,
    4096,
    function=lambda problem, config: experts_gate,
    grid=lambda sizes, config, sm_count: grid_of(
        cdiv(sizes["rows"], config["tile_m"]) * cdiv(sizes["columns"], config["tile_n"]), config, sm_count
    ),
    given=given,
    flops=lambda problem: 10 * problem["rows"] * problem["columns"],
)
BACKWARD = _spec(
    "experts_gate_backward",
    "gradients of the gate between the products of experts and of the routing weights",
    (*DIMENSIONS, Dimension("weight_dtype", "dtype"), Dimension("remade", "flag")),
    _backward_arrays,
    backward_reference,
    2048,
    function=lambda problem, config: experts_gate_backward,
    grid=lambda sizes, config, sm_count: grid_of(cdiv(sizes["rows"], config["tile_m"]), config, sm_count),
    given=backward_given,
    flops=lambda problem: 24 * problem["rows"] * problem["columns"],
)

SPECS = (FORWARD, BACKWARD)
