"""q, k and v of few rows in one launch: three products of the same rows, of which the last two have one size.

Each product's tiles are computed as by :mod:`tilekern.kernels.skinny.linear`, so its bits are that kernel's wherever
the axes that change bits agree. In a launch of its own a small product leaves most SMs idle, and the launch's beginning
and end take as long as reading the weights.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays, drawn
from tilekern.kernels.families.tables import names_of, spec
from tilekern.kernels.matmul.space import is_tile, of_tiles, one_for_library
from tilekern.kernels.skinny.tiles import TOO_LARGE, USUAL, config_of, fits_shared, is_exact, sums, tokens_of
from tilekern.kernels.tiles import ConstInt
from tilekern.spec import Array, Config, Dimension, LibraryCall, Problem, Space, Value, cdiv
from tilekern.spec.targets import INTERPRETED, Target


@ct.kernel
def skinny_projections(
    x, q_weight, k_weight, v_weight, q, k, v, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, latency: ConstInt
):  # fmt: skip
    """x [rows, inner], each weight [columns, inner], each result [rows, columns]; the columns of k and v are as many.

    One tile a block.
    """
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    down, item = ct.cdiv(q.shape[0], tile_m), ct.bid(0)
    first, others = down * ct.cdiv(q.shape[1], tile_n), down * ct.cdiv(k.shape[1], tile_n)
    # The arrays are chosen, so that there is one loop: of three, each would load ahead in a third of shared memory.
    if item < first:
        weight, y = q_weight, q
    elif item < first + others:
        weight, y, item = k_weight, k, item - first
    else:
        weight, y, item = v_weight, v, item - first - others
    i, j = item % down, item // down
    total, _ = sums(x, weight, weight, i, j, 0, ct.cdiv(x.shape[1], tile_k), False, tile_m, tile_n, tile_k, latency)
    ct.store(y, (i, j), total.transpose().astype(y.dtype), allow_tma=False)


def _count(problem: Problem, config: Config) -> int:
    across = cdiv(problem["columns"], config["tile_n"]) + 2 * cdiv(problem["kv_columns"], config["tile_n"])
    return cdiv(problem["rows"], config["tile_m"]) * across


_ARRAYS: Arrays = (
    Array("x", "dtype", ("rows", "inner")),
    Array("q_weight", "dtype", ("columns", "inner")),
    *(Array(name, "dtype", ("kv_columns", "inner")) for name in ("k_weight", "v_weight")),
    Array("q", "dtype", ("rows", "columns"), "output"),
    *(Array(name, "dtype", ("rows", "kv_columns"), "output") for name in ("k", "v")),
)


def _library(problem: Problem, config: Config) -> LibraryCall | None:
    def call(x: Any, *weights: Any) -> tuple[Any, ...]:
        import torch

        return tuple(torch.mm(x, weight.t()) for weight in weights)

    return None if is_tile(config) else LibraryCall(call, names_of(_ARRAYS))


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "implementation": ["tile", "cublas"],
        "schedule": ["block"],
        "tile_m": [tokens_of(problem["rows"], USUAL)],
        "tile_n": [USUAL],
        "tile_k": [128, 64, 256],
        "occupancy": [2, 1, 4],
        "num_worker_warps": [0],
        "latency": [0],
    }


def _default(problem: Problem, target: Target) -> Config:
    """Return cuBLAS for float32, else tiles of which two blocks load at a time on an SM, if they fit there."""
    if problem["dtype"] == "float32" and target != INTERPRETED:
        return Config({name: values[0] for name, values in _axes(problem).items()}).but(implementation="cublas")
    found = [config_of(problem["rows"], USUAL, tile_k=tile_k) for tile_k in (256, 128, 64)]
    return next((c for c in found if fits_shared(problem, c, target)), found[-1])


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    found = drawn(_ARRAYS, problem, generator, device, about_one=False)
    return found | {name: x * problem["inner"] ** -0.5 for name, x in found.items() if name != "x"}


SPEC = spec(
    "skinny_projections",
    "q, k and v = x @ weight^T for few rows, in one launch",
    (
        Dimension("rows", "bucketed"),
        *(Dimension(name, "exact") for name in ("inner", "columns", "kv_columns")),
        Dimension("dtype", "dtype"),
    ),
    _ARRAYS,
    lambda x, q_weight, k_weight, v_weight: {
        "q": x.double() @ q_weight.double().t(),
        "k": x.double() @ k_weight.double().t(),
        "v": x.double() @ v_weight.double().t(),
    },
    function=skinny_projections,
    library=_library,
    grid=lambda sizes, config, sm_count: _count(sizes, config),
    space=Space(
        _axes,
        (
            one_for_library(_axes),
            of_tiles("float32 products run on a GPU's scalar units, since TF32 would round the inputs", is_exact),
            of_tiles(TOO_LARGE, fits_shared),
        ),
    ),
    default=_default,
    generic=lambda problem: config_of(problem["rows"], USUAL, tile_k=32, occupancy=1, num_worker_warps=8),
    given=_inputs,
    flops=lambda problem: 2 * problem["rows"] * problem["inner"] * (problem["columns"] + 2 * problem["kv_columns"]),
    dependent=True,
    streamed=True,
)
SPECS = (SPEC,)
