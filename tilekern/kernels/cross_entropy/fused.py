"""Cross entropy of a chunk of rows, loss and gradient in one launch; the formulas are in the module ``tiles``.

A block reads a row, then reads it again while it writes the gradient, last tile first, so that the second read hits the
L2 cache, if the rows in flight fit there. In the CuTe DSL kernel (:mod:`tilekern.kernels.cute.losses`) a cluster of
blocks keeps a row in registers. ``dlogits`` may be the memory of ``logits``. The gradient is of ``(scale *
loss).sum()``; rows whose scale is 0 still get their loss. Ignored rows and targets that are not a class are treated as
in the module ``separate``.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.cross_entropy import problem as common
from tilekern.kernels.cross_entropy import tiles as shared
from tilekern.kernels.families import cute_losses
from tilekern.kernels.families import vocabulary as family
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, each_step
from tilekern.spec import Constraint, Problem, Space, Value


def _write_gradient(logits, dlogits, row, label, shift, factors, tile_n, options):
    """Read a row again, from its end, and store its gradient."""
    columns = ct.static_eval(options[5])
    whole = ct.static_eval(columns // tile_n)
    if columns % tile_n != 0:
        shared.store_gradient(logits, dlogits, row, whole, label, shift, factors, tile_n, True, options)
    for step in range(whole):
        shared.store_gradient(logits, dlogits, row, whole - 1 - step, label, shift, factors, tile_n, False, options)


def _write_zeros(dlogits, row, columns, tile_n):
    for c in range(columns // tile_n):
        shared.store_zeros(dlogits, row, c, tile_n, False)
    if columns % tile_n != 0:
        shared.store_zeros(dlogits, row, columns // tile_n, tile_n, True)


def _fused_row(row, logits, target, scale, ignore_index, loss, lse, dlogits, tile_n, unroll, options):
    label = ct.load(target, (row,), ())
    wide = ct.static_eval(tile_n * unroll)
    if label == ignore_index:
        shared.store_row(loss, row, ct.zeros((1, 1), ct.float32))
        shared.store_row(lse, row, ct.zeros((1, 1), ct.float32))
        _write_zeros(dlogits, row, ct.static_eval(options[5]), wide)
    else:
        found = shared.store_loss(logits, loss, lse, row, label, tile_n, unroll, options)
        shift, factors = gradient_of_row(ct.load(scale, (row,), ()), found, options)
        _write_gradient(logits, dlogits, row, label, shift, factors, wide, options)


def gradient_of_row(scale, found, options):
    """Return the shift and the factors of a row's gradient, from its scale and the results of :func:`store_loss`."""
    target_x, share, top, total, row_of_lse = found
    factors = shared.gradient_factors(scale, share, row_of_lse, options)
    # Every store needs the target's logit, so no store can precede its load, even if the compiler assumes that logits
    # and dlogits are two arrays.
    shift = ct.where(ct.isnan(target_x), shared.NAN, top)
    return shift, (factors[0] / total, factors[1], factors[2])


def each_row(logits, target, scale, ignore_index, loss, lse, dlogits, tile_n, unroll, persistent, options):
    """Compute loss, lse and gradient of all rows: one a block, or resident blocks that loop."""
    arguments = (logits, target, scale, ignore_index, loss, lse, dlogits, tile_n, unroll, options)
    each_step(_fused_row, logits.shape[0], persistent, arguments)


@ct.kernel
def cross_entropy_fused(
    logits, target, scale, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, loss, lse, dlogits,
    columns: ConstInt, tile_n: ConstInt, unroll: ConstInt, persistent: ConstBool, weighted: ConstBool,
    smoothed: ConstBool, capped: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One row a block, or resident blocks that loop; logits and dlogits [rows, columns].

    target, scale, loss and lse [rows], weight [1, columns], weight_sum [1].
    """
    options = (weight, weight_sum, smoothing, z_loss, softcap, columns, weighted, smoothed, capped, tma)
    each_row(logits, target, scale, ignore_index, loss, lse, dlogits, tile_n, unroll, persistent, options)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    # In the block schedule as many blocks run as fit on an SM: their rows must be short.
    short = problem["vocabulary"] <= 32768
    return {
        "schedule": ["persistent", "block"] if short else ["persistent"],
        **family.step_axes(problem["vocabulary"]),
        "occupancy": [2, 4] if short else [1, 2, 4],
        "tma": [False],
    }


_THREADS_ENOUGH = Constraint(
    "fewer than 256 threads on an SM leave its memory pipeline empty",
    lambda problem, config, target: config["num_worker_warps"] == 8 or config["occupancy"] > 1,
)


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    inputs = common.logits_and_options(problem, generator, device)
    return inputs | {"scale": common.upstream(problem, generator, device)}


def reference(
    logits: Any, target: Any, scale: Any, weighted: bool, smoothed: bool, capped: bool, **options: Any
) -> dict[str, Any]:
    """Return loss, lse and gradient in float64."""
    options |= {"weighted": weighted, "smoothed": smoothed, "capped": capped}
    rows = common.reference_rows(logits, target, **options)
    return rows | common.reference_gradient(logits, target, rows["lse"], scale, **options)


_ARRAYS = (
    *common.READ,
    *family.of_rows("scale"),
    *common.OPTIONS,
    *family.of_rows("loss", "lse", role="output"),
    common.DLOGITS,
)
FUSED = family.spec(
    cross_entropy_fused,
    "loss of every row of logits and its gradient, in place if asked, in one launch",
    _ARRAYS,
    reference,
    flags=common.FLAGS,
    flops=11,
    space=Space(
        _axes,
        (family.STEPS_MATCH, common.STEPS_FIT, _THREADS_ENOUGH, TMA_NEEDS_HOPPER),
        (cute_losses.space(common.FLAGS),),
    ),
    default=lambda problem, target: family.step_config(
        "persistent", *family.step_shapes(problem["vocabulary"], 8)[0], occupancy=2, warps=8
    ),
    generic=family.generic_steps,
    inputs=_inputs,
    cute=cute_losses.implement,
)

SPECS = (FUSED,)
