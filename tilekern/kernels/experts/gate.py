"""The gate between the two products of experts, forward and backward, with the bias of each row's expert.

With a and b the gate's and the up half of a row of the first product, the bias of the row's expert added, and
``g = min(a, limit)``, ``u = min(max(b, -limit), limit)``: ``y = p(g) * (u + shift)``, where p is ``x * sigmoid(alpha *
x)`` or gelu by tanh (:mod:`tilekern.kernels.geglu`). An infinite limit, alpha 1 and shift 0 are SwiGLU; 7, 1.702 and 1
are GPT-OSS's (arXiv:2508.10925). The halves stand one behind the other, or are interleaved: a, b, a, b.

The backward takes dy, the gradient of the weighted sum of rows multiplied by the down weight. With w the routing weight
of a row: ``da = w * dy * (u + shift) * p'(g)`` where a is not above the limit, ``db = w * dy * p(g)`` where b is
within it, and ``dw = sum(dy * y) + share``, the share being that of the down bias. It makes ``w * y`` again, which the
gradient of the down weight needs, so that of both products nothing but a and b is kept. Rows of no expert get zeros.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import cuda.tile as ct

from tilekern.kernels.experts.route import routed
from tilekern.kernels.experts.rows import EXPERTS, bias_of, expert_of, widths
from tilekern.kernels.geglu import by_tanh
from tilekern.kernels.grouped.routing import drawn_experts
from tilekern.kernels.swiglu import sigmoid
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of, hints, load
from tilekern.spec import (
    ITEM_BYTES,
    ArrayParameter,
    Config,
    Constraint,
    Dimension,
    Implementation,
    KernelSpec,
    Problem,
    ScalarParameter,
    Space,
    Value,
    cdiv,
)


def _is_odd():
    """Which of a pair is its second number."""
    return ct.reshape(ct.arange(2, dtype=ct.int32), (1, 1, 2)) == 1


def _halves(array, row, c, columns, shape, bounded, interleaved):
    """The gate's and the up numbers of a tile, in float32."""
    if ct.static_eval(interleaved):
        tile = load(array, (row, c), (shape[0], 2 * shape[1]), bounded, 0, False).astype(ct.float32)
        pairs = ct.reshape(tile, (shape[0], shape[1], 2))
        # Sums of which one term is 0: a thread that has loaded 16 bytes has whole pairs.
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
    """The halves of a tile with the bias of its expert, of which a tile with a bias has one."""
    gate, up = _halves(pre, row, c, columns, shape, bounded, interleaved)
    if ct.static_eval(biased):
        more, above = _halves(bias, expert_of(experts, row, bias), c, columns, shape, bounded, interleaved)
        gate, up = gate + more, up + above
    return gate, up


def _parts(gate, up, alpha, limit, shift, tanh):
    """p(g), its slope, and u + shift."""
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

    weights and dweights [rows] are in the order of slots; of a row's number the slot is its ``order``.
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


_DIMENSIONS = (
    Dimension("rows", "bucketed"),
    Dimension("columns", "exact"),
    Dimension("dtype", "dtype"),
    Dimension("tanh", "flag"),
    Dimension("interleaved", "flag"),
    Dimension("biased", "flag"),
)
BACKWARD_DIMENSIONS = (*_DIMENSIONS, Dimension("weight_dtype", "dtype"), Dimension("remade", "flag"))
_SCALARS = (
    ScalarParameter("total", "int32"),
    *(ScalarParameter(name, "float32") for name in ("alpha", "limit", "shift")),
)


def _matrix(name: str, problem: Problem, times: int, role: Any = "input") -> ArrayParameter:
    return ArrayParameter(name, problem["dtype"], 2, times * problem["columns"], role)


def _rows(name: str, dtype: str = "int32", role: Any = "input") -> ArrayParameter:
    return ArrayParameter(name, dtype, 1, role=role)


def _inputs_of(problem: Problem) -> tuple[ArrayParameter, ...]:
    bias = bias_of(problem["dtype"], 2 * problem["columns"], problem["biased"])
    return _matrix("pre", problem, 2), bias, _rows("experts")


def _forward_parameters(problem: Problem) -> tuple[ArrayParameter | ScalarParameter, ...]:
    return (*_inputs_of(problem), *_SCALARS, _matrix("y", problem, 1, "output"))


def _backward_parameters(problem: Problem) -> tuple[ArrayParameter | ScalarParameter, ...]:
    return (
        _matrix("dy", problem, 1),
        *_inputs_of(problem),
        _rows("order"),
        _rows("weights", problem["weight_dtype"]),
        _rows("shares", "float32"),
        *_SCALARS,
        _matrix("dpre", problem, 2, "output"),
        # Not written where nobody asks for it.
        _matrix("y", problem, 1, "output")
        if problem["remade"]
        else ArrayParameter("y", problem["dtype"], 2, aligned=False),
        _rows("dweights", "float32", "output"),
    )


def _implement(function: Any, parameters: Any, across: bool, problem: Problem, config: Config) -> Implementation:
    """``across``: a block takes one tile of its rows and not all of them."""
    columns, tile_m, tile_n = problem["columns"], config["tile_m"], config["tile_n"]
    flags = [name for name in ("tanh", "interleaved", "biased", "remade") if name in problem]
    return Implementation(
        function=function,
        parameters=parameters(problem),
        constants=(
            ("columns", columns),
            ("tile_m", tile_m),
            ("tile_n", tile_n),
            ("bounded", tile_m > 1 or columns % tile_n != 0),
            *((name, problem[name]) for name in flags),
        ),
        grid=lambda sizes, sm_count: grid_of(
            cdiv(sizes["rows"], tile_m) * (cdiv(columns, tile_n) if across else 1), config, sm_count
        ),
        hints=hints(config),
    )


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    rows, columns = problem["rows"], problem["columns"]
    _, _, _, chosen = routed(drawn_experts(rows, EXPERTS, generator, device), EXPERTS)
    bias = (EXPERTS, 2 * columns) if problem["biased"] else (1, 1)
    pre, bias = (
        torch.randn(size, generator=generator, device=device).to(getattr(torch, problem["dtype"]))
        for size in ((rows, 2 * columns), bias)
    )
    numbers = {"total": EXPERTS, "alpha": 1.702, "limit": 1.5, "shift": 1.0}
    return {"pre": pre, "bias": bias, "experts": chosen, **numbers}


def _backward_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    rows, columns = problem["rows"], problem["columns"]
    dy, weights = (
        torch.randn(size, generator=generator, device=device).to(getattr(torch, problem[dtype]))
        for size, dtype in (((rows, columns), "dtype"), ((rows,), "weight_dtype"))
    )
    shares = torch.randn(rows, generator=generator, device=device)
    order = torch.randperm(rows, generator=generator, device=device).to(torch.int32)
    known = {"order": order, "weights": weights, "shares": shares}
    if not problem["remade"]:
        known["y"] = torch.zeros((1, 1), dtype=dy.dtype, device=device)
    return {"dy": dy, **_inputs(problem, generator, device), **known}


def value_of(
    pre: Any, bias: Any, experts: Any, alpha: float, limit: float, shift: float, tanh: bool, interleaved: bool,
    biased: bool,
) -> Any:  # fmt: skip
    """The gate in torch's own operations, in the dtype of ``pre``; of rows of no expert too."""
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
    """The gate's value; 0 for rows of no expert."""
    y = value_of(pre.double(), bias.double(), experts, alpha, limit, shift, tanh, interleaved, biased)
    return {"y": y.where((experts < total)[:, None], 0.0)}


def backward_reference(
    dy: Any, pre: Any, bias: Any, experts: Any, order: Any, weights: Any, shares: Any, total: int, alpha: float,
    limit: float, shift: float, tanh: bool, interleaved: bool, biased: bool, remade: bool, y: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """The gradients of the pre-activation and of the routing weights, and the weighted value."""
    import torch

    slot, counts = order.long(), experts < total
    factor = weights.double()[slot][:, None]
    with torch.enable_grad():
        wide = pre.detach().double().requires_grad_()
        y = value_of(wide, bias.double(), experts, alpha, limit, shift, tanh, interleaved, biased)
        (dpre,) = torch.autograd.grad(y, wide, dy.double() * factor)
    summed = (y.detach() * dy.double()).sum(1) + (shares.double() if biased else 0.0)
    dweights = torch.zeros_like(summed).scatter_(0, slot, summed.where(counts, 0.0))
    made = {"y": (y.detach() * factor).where(counts[:, None], 0.0)} if remade else {}
    return {"dpre": dpre.where(counts[:, None], 0.0), "dweights": dweights, **made}


def _bytes(matrices: int, problem: Problem) -> int:
    """Of so many matrices [rows, columns], and numbers of each row."""
    remade, biased = bool(problem.get("remade", False)), problem["biased"]
    item = ITEM_BYTES[problem["dtype"]]
    each = (matrices + remade) * item * problem["columns"]
    return problem["rows"] * (each + 4) + (EXPERTS * 2 * problem["columns"] * item if biased else 0)


FORWARD = KernelSpec(
    name="experts_gate",
    summary="the gate between the products of experts, with the bias of each row's expert",
    module=__name__,
    dimensions=_DIMENSIONS,
    space=_space(4096),
    implement=lambda problem, config: _implement(experts_gate, _forward_parameters, True, problem, config),
    default=lambda problem, target: _config(problem, 1024, "block", 4),
    generic=lambda problem: _config(problem, 256, "persistent", 1),
    inputs=_inputs,
    outputs=lambda problem, blocks: {"y": ((problem["rows"], problem["columns"]), problem["dtype"])},
    reference=reference,
    bytes_moved=functools.partial(_bytes, 3),
    flops=lambda problem: 10 * problem["rows"] * problem["columns"],
    result_dtype=lambda problem: problem["dtype"],
)


def _backward_outputs(problem: Problem, blocks: int) -> dict[str, tuple[tuple[int, ...], str]]:
    rows, columns, dtype = problem["rows"], problem["columns"], problem["dtype"]
    return {
        "dpre": ((rows, 2 * columns), dtype),
        **({"y": ((rows, columns), dtype)} if problem["remade"] else {}),
        "dweights": ((rows,), "float32"),
    }


BACKWARD = KernelSpec(
    name="experts_gate_backward",
    summary="gradients of the gate between the products of experts and of the routing weights",
    module=__name__,
    dimensions=BACKWARD_DIMENSIONS,
    space=_space(2048),
    implement=lambda problem, config: _implement(experts_gate_backward, _backward_parameters, False, problem, config),
    default=lambda problem, target: _config(problem, 1024, "block", 4),
    generic=lambda problem: _config(problem, 256, "persistent", 1),
    inputs=_backward_inputs,
    outputs=_backward_outputs,
    reference=backward_reference,
    bytes_moved=functools.partial(_bytes, 5),
    flops=lambda problem: 24 * problem["rows"] * problem["columns"],
    result_dtype=lambda problem: problem["dtype"],
)

SPECS = (FORWARD, BACKWARD)
