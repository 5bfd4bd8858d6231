"""Linear layers of few rows, as in decoding: ``y = addend + act(x @ weight^T + bias) * (x @ up^T)``, rounded once.

The time is that of reading the weights. So the weights are the rows of the matrix units' products and the tokens their
columns, padded to ``tile_m`` (8, 16, 32 or 64), which wastes no bandwidth; and a block takes few of the weights' rows
(``tile_n``), so that all SMs read. Bias, activation (gelu by tanh, silu, both or none), the gate's factor ``x @ up^T``
and the addend are parts of a problem or not. All sums are in float32.

Each block computes whole sums, step by step of ``tile_k`` in the order of the inner dimension, and each token is a
column of its own. So a row of the result depends on its own row of ``x`` only, and of the config's axes only
``tile_k`` and ``implementation`` can change its bits: configs of all numbers of rows that share these give a row the
same bits. ``tile_m``, ``tile_n``, ``schedule`` and the hints choose who computes a sum, and when.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays, drawn
from tilekern.kernels.families.tables import flags_of, names_of, spec
from tilekern.kernels.geglu import by_tanh
from tilekern.kernels.swiglu import sigmoid
from tilekern.kernels.tiles import ConstBool, ConstInt, each_step, grid_of, load, power_of_two
from tilekern.spec import ITEM_BYTES, Array, Config, Constraint, Dimension, LibraryCall, Problem, Space, Value, cdiv
from tilekern.spec.targets import INTERPRETED, Target

# The rows that one column of tiles holds; more rows read the weights again.
MOST_ROWS = 64
_LEAST_ROWS = 8
FLAGS = ("gated", "biased", "gelu_tanh", "silu", "accumulated")
DIMENSIONS = (
    Dimension("rows", "bucketed"),
    *(Dimension(name, "exact") for name in ("inner", "columns")),
    *flags_of(FLAGS),
    Dimension("dtype", "dtype"),
)


def _activated(z, gelu_tanh, silu):
    if ct.static_eval(gelu_tanh):
        z = z * by_tanh(z)[0]
    if ct.static_eval(silu):
        z = z * sigmoid(z)
    return z


def _tile(
    item, x, weight, up, bias, addend, y, gated, biased, gelu_tanh, silu, accumulated, tile_m, tile_n, tile_k, latency
):
    """Compute tile number ``item`` of the result: ``tile_m`` tokens of ``tile_n`` columns."""
    down = ct.cdiv(y.shape[0], tile_m)
    i, j = item % down, item // down
    total, factor = ct.zeros((tile_n, tile_m), ct.float32), ct.zeros((tile_n, tile_m), ct.float32)
    for step in range(ct.cdiv(x.shape[1], tile_k)):
        tokens = load(x, (i, step), (tile_m, tile_k), True, latency, True).transpose()
        total = ct.mma(load(weight, (j, step), (tile_n, tile_k), True, latency, True), tokens, total)
        if ct.static_eval(gated):
            factor = ct.mma(load(up, (j, step), (tile_n, tile_k), True, latency, True), tokens, factor)
    if ct.static_eval(biased):
        row = load(bias, (j,), (tile_n,), True, 0, False).astype(ct.float32)
        total = total + ct.reshape(row, (tile_n, 1))
    z = _activated(total, gelu_tanh, silu)
    if ct.static_eval(gated):
        z = z * factor
    z = z.transpose()
    if ct.static_eval(accumulated):
        z = z + load(addend, (i, j), (tile_m, tile_n), True, 0, False).astype(ct.float32)
    ct.store(y, (i, j), z.astype(y.dtype), allow_tma=False)


@ct.kernel
def skinny_linear(
    x, weight, up, bias, addend, y, gated: ConstBool, biased: ConstBool, gelu_tanh: ConstBool, silu: ConstBool,
    accumulated: ConstBool, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, latency: ConstInt,
    persistent: ConstBool,
):  # fmt: skip
    """x [rows, inner], weight and up [columns, inner], bias [columns], addend and y [rows, columns]."""
    tiles = ct.cdiv(y.shape[0], tile_m) * ct.cdiv(y.shape[1], tile_n)
    arguments = (
        x, weight, up, bias, addend, y, gated, biased, gelu_tanh, silu, accumulated, tile_m, tile_n, tile_k, latency,
    )  # fmt: skip
    each_step(_tile, tiles, persistent, arguments)


_ARRAYS: Arrays = (
    Array("x", "dtype", ("rows", "inner")),
    Array("weight", "dtype", ("columns", "inner")),
    Array("up", "dtype", ("columns", "inner"), flag="gated"),
    Array("bias", "dtype", ("columns",), flag="biased"),
    Array("addend", "dtype", ("rows", "columns"), flag="accumulated"),
    Array("y", "dtype", ("rows", "columns"), "output"),
)


def sizes(rows: int, inner: int, columns: int, dtype: Any, on: Collection[str]) -> dict[str, Any]:
    """Return the values of the dimensions in their order, with the flags in ``on`` set."""
    return {
        "rows": rows, "inner": inner, "columns": columns, **{name: name in on for name in FLAGS}, "dtype": dtype
    }  # fmt: skip


def _by_cublas(problem: Problem) -> LibraryCall:
    def call(x: Any, weight: Any, up: Any, bias: Any, addend: Any) -> tuple[Any]:
        import torch

        z = torch.addmm(bias, x, weight.t()) if problem["biased"] else torch.mm(x, weight.t())
        if problem["gelu_tanh"]:
            z = torch.nn.functional.gelu(z, approximate="tanh")
        if problem["silu"]:
            z = torch.nn.functional.silu(z)
        if problem["gated"]:
            z = z * torch.mm(x, up.t())
        return (z + addend if problem["accumulated"] else z,)

    return LibraryCall(call, names_of(_ARRAYS))


def is_tile(config: Config) -> bool:
    """Tell whether a device function, not a library, runs the config."""
    return bool(config["implementation"] == "tile")


def padded(rows: int) -> int:
    """Return the tokens of a tile: the rows, padded to what the matrix units take."""
    return min(MOST_ROWS, max(_LEAST_ROWS, power_of_two(rows)))


def tiles(problem: Problem, config: Config) -> int:
    """Count the tiles of the result."""
    return cdiv(problem["rows"], config["tile_m"]) * cdiv(problem["columns"], config["tile_n"])


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "implementation": ["tile", "cublas"],
        "schedule": ["block", "persistent"],
        "tile_m": [padded(problem["rows"])],
        "tile_n": [64, 32, 128],
        "tile_k": [128, 64, 256],
        "occupancy": [1, 2, 4],
        "num_worker_warps": [0, 8],
        "latency": [0, 6],
    }


def config_of(problem: Problem, **changes: Value) -> Config:
    """Return the first value of each axis, with changes."""
    return Config({name: values[0] for name, values in _axes(problem).items()}).but(**changes)


SPACE = Space(_axes)


def default(problem: Problem, target: Target) -> Config:
    return config_of(problem)


def generic(problem: Problem) -> Config:
    """Return small tiles that any GPU holds, on any grid."""
    return config_of(problem, schedule="persistent", tile_k=64, num_worker_warps=8)


def reference(
    x: Any, weight: Any, up: Any, bias: Any, addend: Any, *, gated: bool, biased: bool, gelu_tanh: bool, silu: bool,
    accumulated: bool,
) -> dict[str, Any]:  # fmt: skip
    """Compute the formula in float64."""
    import torch

    z = x.double() @ weight.double().t()
    z = z + bias.double() if biased else z
    z = torch.nn.functional.gelu(z, approximate="tanh") if gelu_tanh else z
    z = torch.nn.functional.silu(z) if silu else z
    z = z * (x.double() @ up.double().t()) if gated else z
    return {"y": z + addend.double() if accumulated else z}


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw weights that keep the variance of a row: an activation then gets values near 0."""
    found = drawn(_ARRAYS, problem, generator, device, about_one=False)
    return found | {name: found[name] * problem["inner"] ** -0.5 for name in ("weight", "up")}


SPEC = spec(
    "skinny_linear",
    "y = addend + act(x @ weight^T + bias) * (x @ up^T) for few rows, summed in float32",
    DIMENSIONS,
    _ARRAYS,
    reference,
    function=skinny_linear,
    library=lambda problem, config: None if is_tile(config) else _by_cublas(problem),
    grid=lambda sizes, config, sm_count: grid_of(tiles(sizes, config), config, sm_count),
    space=SPACE,
    default=default,
    generic=generic,
    given=_inputs,
    flops=lambda problem: (4 if problem["gated"] else 2) * problem["rows"] * problem["inner"] * problem["columns"],
)

SPECS = (SPEC,)
