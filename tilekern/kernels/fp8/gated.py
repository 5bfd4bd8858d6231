"""The gate of an MLP whose products are of 8-bit floats: each result is rounded to e4m3 where it is computed.

    y = act(gate) * up,   dgate = dy * up * act'(gate),   dup = dy * act(gate)

with ``act(x) = x * p(x)`` and ``act' = p + x * p'``: silu (:mod:`tilekern.kernels.swiglu`), or gelu, exact or by tanh
(:mod:`tilekern.kernels.geglu`). Only products read the three, along rows, so a row is stored as e4m3 numbers and its
scale (:mod:`tilekern.kernels.fp8.scales`), rounded once from float32. That moves half of the bytes which a gate, and
:mod:`tilekern.kernels.fp8.rows` behind it, would. The backward computes y again, from the same inputs by the same
formula, so it has the forward's numbers, and nobody keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import ROWS, Arrays, gradients
from tilekern.kernels.families.tables import MATRIX, Table, flags_of, spec
from tilekern.kernels.fp8.scales import E4M3, bits_of, scale_of
from tilekern.kernels.fp8.space import HAS_FP8, check_target, threads
from tilekern.kernels.geglu import by_tanh, exact
from tilekern.kernels.swiglu import sigmoid
from tilekern.kernels.tiles import ConstBool, ConstInt, each_step, grid_of, load, power_of_two
from tilekern.spec import Array, Config, Constraint, Dimension, KernelSpec, Problem, Space, Value, cdiv, name_of
from tilekern.spec.targets import Target

# Bytes that a thread holds for each number of a row: the value in float32, or dy, gate and up as they were read.
VALUE_BYTES, READ_BYTES = 4, 6
# Of a row's bytes in registers: the most that a thread holds, and the share of an SM's registers for all blocks.
_HELD_BYTES, _SHARE = 352, 0.45
# The widest tile of a row that is read twice: its loops are unrolled, which spilled with wider ones.
_NARROW = 512


def _value(gate, up, gelu, tanh):
    """Return y, and p' and p of float32 tiles."""
    if ct.static_eval(not gelu):
        p = sigmoid(gate)
        return gate * p * up, p * (1.0 - p), p
    if ct.static_eval(tanh):
        p, slope = by_tanh(gate)
    else:
        p, slope = exact(gate)
    return gate * p * up, slope, p


def _tiles(inputs, n, c, tile_n, gelu, tanh):
    """Return (y,), or (dy, gate, up), which take fewer registers than the three that are computed from them."""
    tiles = ()
    for k in ct.static_iter(range(len(inputs))):
        tiles = tiles + (load(inputs[k], (n, c), (1, tile_n), True, 0, False),)
    if ct.static_eval(len(inputs) == 3):
        return tiles
    return (_value(tiles[0].astype(ct.float32), tiles[1].astype(ct.float32), gelu, tanh)[0],)


def _results(tiles, gelu, tanh):
    """Return (y,) or (dgate, dup, y)."""
    if ct.static_eval(len(tiles) == 1):
        return tiles
    dy, gate, up = tiles[0].astype(ct.float32), tiles[1].astype(ct.float32), tiles[2].astype(ct.float32)
    y, slope, p = _value(gate, up, gelu, tanh)
    return dy * up * (p + gate * slope), dy * gate * p, y


def _larger(largest, results):
    found = ()
    for k in ct.static_iter(range(len(results))):
        found = found + (ct.maximum(largest[k], bits_of(results[k])),)
    return found


def _inverses(n, largest, scales):
    """Store a row's scales, and return their reciprocals."""
    found = ()
    for k in ct.static_iter(range(len(scales))):
        scale, inverse = scale_of(ct.max(largest[k], 1, keepdims=True))
        ct.store(scales[k], (n,), ct.reshape(scale, (1,)), allow_tma=False)
        found = found + (inverse,)
    return found


def _store(outputs, n, c, results, inverses):
    for k in ct.static_iter(range(len(outputs))):
        ct.store(outputs[k], (n, c), (results[k] * inverses[k]).astype(outputs[k].dtype), allow_tma=False)


def _row(n, inputs, outputs, scales, gelu, tanh, tile_n, chunks, held):
    largest, kept = (), ()
    for _ in ct.static_iter(range(len(outputs))):
        largest = largest + (ct.zeros((1, tile_n), ct.int32),)
    if ct.static_eval(held):
        for c in ct.static_iter(range(chunks)):
            kept = kept + (_tiles(inputs, n, c, tile_n, gelu, tanh),)
            largest = _larger(largest, _results(kept[c], gelu, tanh))
        inverses = _inverses(n, largest, scales)
        for c in ct.static_iter(range(chunks)):
            _store(outputs, n, c, _results(kept[c], gelu, tanh), inverses)
    else:
        # A number that the compiler does not know: of loops that it knows it unrolled all, and spilled.
        steps = chunks * ct.minimum(1, scales[0].shape[0])
        for c in range(steps):
            largest = _larger(largest, _results(_tiles(inputs, n, c, tile_n, gelu, tanh), gelu, tanh))
        inverses = _inverses(n, largest, scales)
        for c in range(steps):
            _store(outputs, n, c, _results(_tiles(inputs, n, c, tile_n, gelu, tanh), gelu, tanh), inverses)


@ct.kernel
def fp8_gated_forward(
    gate, up, y, y_scale, tile_n: ConstInt, chunks: ConstInt, held: ConstBool, persistent: ConstBool, gelu: ConstBool,
    tanh: ConstBool,
):  # fmt: skip
    """A row a block, or resident blocks that loop; gate, up and y [rows, columns], y_scale [rows].

    A row stays in registers if it is ``held``, else it is read and computed twice.
    """
    each_step(_row, gate.shape[0], persistent, ((gate, up), (y,), (y_scale,), gelu, tanh, tile_n, chunks, held))


@ct.kernel
def fp8_gated_backward(
    dy, gate, up, dgate, dup, y, dgate_scale, dup_scale, y_scale, tile_n: ConstInt, chunks: ConstInt, held: ConstBool,
    persistent: ConstBool, gelu: ConstBool, tanh: ConstBool,
):  # fmt: skip
    """As the forward; matrices [rows, columns], scales [rows]."""
    arrays = ((dy, gate, up), (dgate, dup, y), (dgate_scale, dup_scale, y_scale))
    each_step(_row, gate.shape[0], persistent, (*arrays, gelu, tanh, tile_n, chunks, held))


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["block", "persistent"],
        "tile_n": list(dict.fromkeys(min(width, power_of_two(problem["columns"])) for width in (_NARROW, 1024, 2048))),
        "held": [True, False],
        "occupancy": [1, 2, 4, 8],
        "num_worker_warps": [0, 8],
    }


def gate_spec(
    function: Any, summary: str, dimensions: tuple[Dimension, ...], arrays: Arrays | Table,
    reference: Callable[..., dict[str, Any]], held_bytes: int, numbers: dict[str, str], **more: Any,
) -> KernelSpec:  # fmt: skip
    """Return the spec of a gate or its gradients, a row of which stays in registers or is read twice.

    Args:
        function: the device function.
        held_bytes: bytes that a thread holds for each number of a row.
        numbers: the names of e4m3 results, and of their scales.
        more: the rest, as in :func:`tilekern.kernels.families.tables.spec`.
    """

    def is_held(problem: Problem, config: Config, target: Target) -> bool:
        """Tell whether the registers hold a row of each block; code for more spilled."""
        row = held_bytes * config["tile_n"] * cdiv(problem["columns"], config["tile_n"])
        fits = row <= _HELD_BYTES * threads(config) and row * config["occupancy"] <= _SHARE * 4 * target.registers
        return bool(fits) if config["held"] else config["tile_n"] <= _NARROW

    def default(problem: Problem, target: Target) -> Config:
        check_target(target)
        columns = problem["columns"]
        config = Config(
            schedule="block", tile_n=min(1024, power_of_two(columns)), held=True, occupancy=2,
            num_worker_warps=0 if columns <= 2048 else 8,
        )  # fmt: skip
        if is_held(problem, config, target):
            return config
        return config.but(held=False, tile_n=min(_NARROW, power_of_two(columns)), occupancy=4, num_worker_warps=0)

    def results(made: dict[str, Any]) -> dict[str, Any]:
        """Return the numbers at their scales, and results that are not rounded."""
        others = {name: x for name, x in made.items() if name not in (*numbers, *numbers.values())}
        return others | {name: made[name].double() * made[of].double()[:, None] for name, of in numbers.items()}

    return spec(
        name_of(function), summary, dimensions, arrays, reference,
        function=function,
        grid=lambda sizes, config, sm_count: grid_of(sizes["rows"], config, sm_count),
        constants=lambda problem, config: {"chunks": cdiv(problem["columns"], config["tile_n"])},
        space=Space(
            _axes,
            (
                HAS_FP8,
                Constraint("the registers hold a row of each block, or it is read twice by narrow tiles", is_held),
                Constraint(
                    "each thread of eight warps has 4 numbers of a tile or more",
                    lambda problem, config, target: (
                        config["tile_n"] >= 4 * threads(config) or config["num_worker_warps"] == 0
                    ),
                ),
            ),
        ),
        default=default,
        generic=lambda problem: Config(schedule="persistent", tile_n=1024, held=False, occupancy=1, num_worker_warps=8),
        results=results,
        result_dtype=lambda problem: "bfloat16",
        # e4m3 has 4 significant bits where bfloat16 has 8.
        roundings=16,
        **more,
    )  # fmt: skip


def _spec(
    function: Any, summary: str, inputs: tuple[str, ...], outputs: tuple[str, ...],
    reference: Callable[..., dict[str, Any]], held_bytes: int, each: int,
) -> KernelSpec:  # fmt: skip
    """Return the spec of matrices by their names, with ``each`` operations for a number of a row."""
    scales = {name: f"{name}_scale" for name in outputs}
    arrays = (
        *(Array(name, "dtype", ROWS) for name in inputs),
        *(Array(name, E4M3, ROWS, "output") for name in outputs),
        *(Array(name, "float32", ("rows",), "output") for name in scales.values()),
    )
    return gate_spec(
        function, summary, (*MATRIX, *flags_of(("gelu", "tanh"))), arrays, reference, held_bytes, scales,
        flops=lambda problem: each * problem["rows"] * problem["columns"],
    )  # fmt: skip


def nan_rows(x: Any) -> Any:
    """Return a matrix whose rows with NaN or infinity are NaN."""
    return x.where(x.isfinite().all(1, keepdim=True), math.nan)


def _formula(gate: Any, up: Any, gelu: bool, tanh: bool) -> dict[str, Any]:
    import torch

    gate, functional = gate.double(), torch.nn.functional
    curve = functional.gelu(gate, approximate="tanh" if tanh else "none") if gelu else functional.silu(gate)
    return {"y": curve * up.double()}


def reference_forward(gate: Any, up: Any, gelu: bool, tanh: bool) -> dict[str, Any]:
    """Return the formula in float64; a row with NaN or infinity is NaN."""
    return {"y": nan_rows(_formula(gate, up, gelu, tanh)["y"])}


def reference_backward(dy: Any, gate: Any, up: Any, gelu: bool, tanh: bool) -> dict[str, Any]:
    """Return the gradients and the forward's result in float64; a row with NaN or infinity is NaN."""
    made = gradients(_formula, {"y": dy}, gate=gate, up=up, gelu=gelu, tanh=tanh)
    return {name: nan_rows(x) for name, x in (made | _formula(gate, up, gelu, tanh)).items()}


FORWARD = _spec(
    fp8_gated_forward, "y = act(gate) * up in e4m3, with a scale for each row", ("gate", "up"), ("y",),
    reference_forward, VALUE_BYTES, 15,
)  # fmt: skip
BACKWARD = _spec(
    fp8_gated_backward, "gradients of a gate with respect to gate and up, and its result, in e4m3",
    ("dy", "gate", "up"), ("dgate", "dup", "y"), reference_backward, READ_BYTES, 24,
)  # fmt: skip
SPECS = (FORWARD, BACKWARD)
