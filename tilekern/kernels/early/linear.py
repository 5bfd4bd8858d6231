"""Linear layers of many rows in one wave of blocks: ``y = act(x @ weight^T + bias)``, launched early.

``act`` is gelu by tanh or nothing. Sums are in float32 and rounded once. The kernel waits for its predecessor before it
reads anything, weights too, which a launch before may have made; its blocks then stand ready. To read weights before
would not pay: the compiler lets each such load end before it issues the next.

A product of 1024 rows has about as many tiles as a GPU has SMs, so that it takes as long as the SM with the most. Sides
of tiles are powers of two: 1024 x 3072 is 192 tiles of 128 x 128, two for some of an H200's 132 SMs, or 96 of 128 x
256, which leave 36 idle. So a block may have a second tile of ``more_n`` columns for the same rows of ``x``: it
computes 128 x (128 + 64) as two sums in one loop, and 128 blocks compute 1024 x 3072 in one wave. The first tiles of
all blocks are the columns from 0 on, the second ones those behind, so that each begins at a multiple of its own width.

Bits: a row of the result depends on its own row of ``x`` alone, and sums have the order of the inner dimension.
``tile_k`` and the widths of tiles can change them.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.early.space import SPACE, count, default, generic
from tilekern.kernels.families.arrays import Arrays, drawn
from tilekern.kernels.families.tables import flags_of, spec
from tilekern.kernels.matmul import product as matmul
from tilekern.kernels.skinny import linear as skinny
from tilekern.kernels.tiles import ConstBool, ConstInt, each_step, grid_of, load
from tilekern.spec import ITEM_BYTES, Array, Dimension, Problem

FLAGS = ("biased", "gelu_tanh")
# The unit of a store by TMA.
_ALIGNMENT_BYTES = 16


def _store(y, bias, i, j, total, tile_n, gelu_tanh, whole_rows):
    z = matmul._finish(total, bias, j, tile_n, gelu_tanh, False)
    matmul._store(y, i, j, z.astype(y.dtype), tile_n, whole_rows)


def _share(item, x, weight, bias, y, gelu_tanh, whole_rows, tile_m, tile_n, more_n, tile_k, group_m, latency):
    """Compute share number ``item`` of the result: ``tile_n`` columns, and ``more_n`` behind all first tiles."""
    across = ct.cdiv(y.shape[1], tile_n + more_n)
    i, j = matmul.place_and_column(item, ct.cdiv(y.shape[0], tile_m), across, group_m)
    total = ct.zeros((tile_m, tile_n), ct.float32)
    if ct.static_eval(more_n > 0):
        behind, last = across * (tile_n // more_n) + j, ct.cdiv(y.shape[1], more_n) - 1
        more = ct.zeros((tile_m, more_n), ct.float32)
    for step in range(ct.cdiv(x.shape[1], tile_k)):
        rows = load(x, (i, step), (tile_m, tile_k), True, latency, True)
        total = ct.mma(rows, load(weight, (j, step), (tile_n, tile_k), True, latency, True).transpose(), total)
        if ct.static_eval(more_n > 0):
            tile = load(weight, (min(behind, last), step), (more_n, tile_k), True, latency, True)
            more = ct.mma(rows, tile.transpose(), more)
    _store(y, bias, i, j, total, tile_n, gelu_tanh, whole_rows)
    if ct.static_eval(more_n > 0):  # noqa: SIM102 (decided when it is compiled)
        # The last shares may lack a second tile.
        if behind <= last:
            _store(y, bias, i, behind, more, more_n, gelu_tanh, whole_rows)


@ct.kernel
def early_linear(
    x, weight, bias, y, biased: ConstBool, gelu_tanh: ConstBool, whole_rows: ConstBool, tile_m: ConstInt,
    tile_n: ConstInt, more_n: ConstInt, tile_k: ConstInt, group_m: ConstInt, latency: ConstInt, persistent: ConstBool,
):  # fmt: skip
    """x [rows, inner], weight [columns, inner], bias [columns], y [rows, columns].

    ``whole_rows`` means that the rows of y are whole 16 bytes.
    """
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    shares = ct.cdiv(y.shape[0], tile_m) * ct.cdiv(y.shape[1], tile_n + more_n)
    known = ct.static_eval(bias if biased else None)
    arguments = (x, weight, known, y, gelu_tanh, whole_rows, tile_m, tile_n, more_n, tile_k, group_m, latency)
    each_step(_share, shares, persistent, arguments)


_ARRAYS: Arrays = (
    Array("x", "dtype", ("rows", "inner")),
    Array("weight", "dtype", ("columns", "inner")),
    Array("bias", "dtype", ("columns",), flag="biased"),
    Array("y", "dtype", ("rows", "columns"), "output"),
)


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw weights that keep the variance of a row: an activation then gets values near 0."""
    found = drawn(_ARRAYS, problem, generator, device, about_one=False)
    return found | {"weight": found["weight"] * problem["inner"] ** -0.5}


def _reference(x: Any, weight: Any, bias: Any, *, biased: bool, gelu_tanh: bool) -> dict[str, Any]:
    """Compute the formula in float64."""
    flags = dict.fromkeys(("gated", "rounded", "silu", "accumulated"), False)
    return skinny.reference(x, weight, None, bias, None, biased=biased, gelu_tanh=gelu_tanh, **flags)


SPEC = spec(
    "early_linear",
    "y = act(x @ weight^T + bias) for many rows, launched before its predecessor has ended",
    (
        Dimension("rows", "bucketed"),
        *(Dimension(name, "exact") for name in ("inner", "columns")),
        *flags_of(FLAGS),
        Dimension("dtype", "dtype"),
    ),
    _ARRAYS,
    _reference,
    function=early_linear,
    constants=lambda problem, config: {
        "whole_rows": problem["columns"] * ITEM_BYTES[problem["dtype"]] % _ALIGNMENT_BYTES == 0
    },
    grid=lambda sizes, config, sm_count: grid_of(count(sizes, config), config, sm_count),
    space=SPACE,
    default=default,
    generic=generic,
    given=_inputs,
    flops=lambda problem: 2 * problem["rows"] * problem["inner"] * problem["columns"],
    dependent=True,
    streamed=True,
)

SPECS = (SPEC,)
