"""Linear layers of few rows whose sums are split: shares of the sums by one kernel, joined by another.

``skinny_parts``: ``parts[s] = x[:, s] @ weight[:, s]^T``, s being a share of the inner dimension: whole steps of
``tile_k``, the same number for each share but the last. ``skinny_join``: ``y = addend + act(sum of parts + bias)``, the
parts added in their order and the result rounded once. :mod:`tilekern.kernels.skinny.linear` launches both.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays, drawn
from tilekern.kernels.families.tables import flags_of, spec
from tilekern.kernels.skinny.tiles import (
    TOO_LARGE,
    USUAL,
    activated,
    config_of,
    count,
    fits_shared,
    sums,
    tokens_of,
)
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of, load
from tilekern.spec import Array, Config, Constraint, Dimension, Problem, Space, Value, cdiv
from tilekern.spec.targets import Target

_ROWS, _COLUMNS, _SPLITS = Dimension("rows", "bucketed"), Dimension("columns", "exact"), Dimension("splits", "exact")
_DTYPE = Dimension("dtype", "dtype")
_PARTS = ("splits", "rows", "columns")
FLAGS = ("biased", "gelu_tanh", "silu", "accumulated")


@ct.kernel
def skinny_parts(x, weight, parts, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, latency: ConstInt):
    """x [rows, inner], weight [columns, inner], parts [splits, rows, columns]."""
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    down, across = ct.cdiv(x.shape[0], tile_m), ct.cdiv(weight.shape[0], tile_n)
    steps, splits = ct.cdiv(x.shape[1], tile_k), parts.shape[0]
    share = ct.cdiv(steps, splits)
    for item in range(ct.bid(0), down * across * splits, ct.num_blocks(0)):
        i, j, s = item % down, item // down % across, item // (down * across)
        first, last = min(steps, s * share), min(steps, (s + 1) * share)
        total, _ = sums(x, weight, weight, i, j, first, last, False, tile_m, tile_n, tile_k, latency)
        ct.store(parts, (s, i, j), ct.reshape(total.transpose(), (1, tile_m, tile_n)), allow_tma=False)


@ct.kernel
def skinny_join(
    parts, bias, addend, y, biased: ConstBool, gelu_tanh: ConstBool, silu: ConstBool,
    accumulated: ConstBool, tile_m: ConstInt, tile_n: ConstInt,
):  # fmt: skip
    """parts [splits, rows, columns], bias [columns], addend and y [rows, columns]."""
    # Its launch overlaps the end of the kernel that writes the parts.
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    down, across = ct.cdiv(y.shape[0], tile_m), ct.cdiv(y.shape[1], tile_n)
    for item in range(ct.bid(0), down * across, ct.num_blocks(0)):
        i, j = item % down, item // down
        total = ct.zeros((tile_m, tile_n), ct.float32)
        for s in range(parts.shape[0]):
            total = total + ct.reshape(load(parts, (s, i, j), (1, tile_m, tile_n), True, 0, False), (tile_m, tile_n))
        if ct.static_eval(biased):
            total = total + ct.reshape(load(bias, (j,), (tile_n,), True, 0, False).astype(ct.float32), (1, tile_n))
        z = activated(total, gelu_tanh, silu)
        if ct.static_eval(accumulated):
            z = z + load(addend, (i, j), (tile_m, tile_n), True, 0, False).astype(ct.float32)
        ct.store(y, (i, j), z.astype(y.dtype), allow_tma=False)


def _axes_of_parts(problem: Problem) -> dict[str, list[Value]]:
    return {
        "implementation": ["tile"], "schedule": ["block"], "tile_m": [tokens_of(problem["rows"], USUAL)],
        "tile_n": [USUAL], "tile_k": [128, 64, 256], "occupancy": [2, 1], "num_worker_warps": [0], "latency": [0],
    }  # fmt: skip


def _parts_reference(x: Any, weight: Any) -> dict[str, Any]:
    """Compute the sum of all parts in float64."""
    return {"y": x.double() @ weight.double().t()}


def _scaled(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    found = drawn(_ARRAYS_OF_PARTS, problem, generator, device, about_one=False)
    return {"weight": found["weight"] * problem["inner"] ** -0.5}


_ARRAYS_OF_PARTS: Arrays = (
    Array("x", "dtype", ("rows", "inner")),
    Array("weight", "dtype", ("columns", "inner")),
    Array("parts", "float32", _PARTS, "output"),
)

PARTS = spec(
    "skinny_parts",
    "shares of the sums of x @ weight^T for few rows, in float32",
    (_ROWS, Dimension("inner", "exact"), _COLUMNS, _SPLITS, _DTYPE),
    _ARRAYS_OF_PARTS,
    _parts_reference,
    function=skinny_parts,
    grid=lambda sizes, config, sm_count: count(sizes, config) * sizes["splits"],
    space=Space(_axes_of_parts, (Constraint(TOO_LARGE, fits_shared),)),
    default=lambda problem, target: config_of(problem["rows"], USUAL, **_held(problem, target)),
    generic=lambda problem: config_of(problem["rows"], USUAL, tile_k=32, occupancy=1, num_worker_warps=8),
    given=_scaled,
    flops=lambda problem: 2 * problem["rows"] * problem["inner"] * problem["columns"],
    results=lambda outputs: {"y": outputs["parts"].double().sum(0)},
    # Hopper's matrix units cut off what they add: 6144 terms have an error of 6.8e-6.
    roundings=16,
    dependent=True,
    streamed=True,
)


def _held(problem: Problem, target: Target) -> dict[str, Value]:
    usual = config_of(problem["rows"], USUAL)
    return {} if fits_shared(problem, usual, target) else {"occupancy": 1, "tile_k": 64}


def _tile(problem: Problem, tile_m: int, tile_n: int) -> Config:
    return Config(schedule="block", tile_m=tile_m, tile_n=tile_n, occupancy=2, num_worker_warps=0)


def _join_reference(
    parts: Any, bias: Any, addend: Any, *, biased: bool, gelu_tanh: bool, silu: bool, accumulated: bool
) -> dict[str, Any]:
    """Compute the formula in float64."""
    import torch

    z = parts.double().sum(0)
    z = z + bias.double() if biased else z
    z = torch.nn.functional.gelu(z, approximate="tanh") if gelu_tanh else z
    z = torch.nn.functional.silu(z) if silu else z
    return {"y": z + addend.double() if accumulated else z}


JOIN = spec(
    "skinny_join",
    "y = addend + act(sum of parts + bias), added in the parts' order",
    (_ROWS, _COLUMNS, _SPLITS, *flags_of(FLAGS), _DTYPE),
    (
        Array("parts", "float32", _PARTS),
        Array("bias", "dtype", ("columns",), flag="biased"),
        Array("addend", "dtype", ("rows", "columns"), flag="accumulated"),
        Array("y", "dtype", ("rows", "columns"), "output"),
    ),
    _join_reference,
    function=skinny_join,
    grid=lambda sizes, config, sm_count: grid_of(
        cdiv(sizes["rows"], config["tile_m"]) * cdiv(sizes["columns"], config["tile_n"]), config, sm_count
    ),
    space=Space(
        lambda problem: {
            "schedule": ["block"], "tile_m": [4, 8], "tile_n": [256, 128], "occupancy": [2],
            "num_worker_warps": [0],
        },
        (
            Constraint(
                "the compiler unrolls the sum of tiles of fewer than 1024 elements until it spills",
                lambda problem, config, target: bool(config["tile_m"] * config["tile_n"] >= 1024),
            ),
        ),
    ),
    default=lambda problem, target: _tile(problem, 4, 256),
    generic=lambda problem: _tile(problem, 4, 256),
    flops=lambda problem: (problem["splits"] + 8) * problem["rows"] * problem["columns"],
    dependent=True,
    inputs_in_l2=True,
)  # fmt: skip

SPECS = (PARTS, JOIN)
