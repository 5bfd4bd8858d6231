"""Cross entropy of a chunk of rows, loss and gradient in one launch; the formulas stand in the module ``tiles``.

A block reads a row, then reads it once more while it writes the gradient, last tile first, so that what it has just
read comes out of the L2 cache; how many rows are under way at once decides whether they fit there. As CuTe DSL compiles
it (:mod:`tilekern.kernels.cute.losses`) a cluster of blocks keeps a row in registers. ``dlogits`` may be the memory of
``logits``. The gradient is that of ``(scale * loss).sum()``; rows whose scale is 0 still get their loss. Ignored rows
and targets that are not a class are treated as in the module ``separate``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cuda.tile as ct

from tilekern.kernels.cross_entropy.problem import (
    DLOGITS,
    FLAGS,
    OPTIONS,
    READ,
    STEPS_FIT,
    logits_and_options,
    reference_gradient,
    reference_rows,
    upstream,
)
from tilekern.kernels.cross_entropy.tiles import (
    NAN,
    gradient_factors,
    store_gradient,
    store_loss,
    store_row,
    store_zeros,
)
from tilekern.kernels.families import cute_losses
from tilekern.kernels.families.vocabulary import (
    STEPS_MATCH,
    each_step,
    generic_steps,
    implement_by_both,
    of_rows,
    spec,
    step_axes,
    step_config,
    step_shapes,
)
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt
from tilekern.spec import Constraint, Problem, Space, Value


def _write_gradient(logits, dlogits, row, label, shift, factors, tile_n, options):
    """The second read of a row, from its end."""
    columns = ct.static_eval(options[5])
    whole = ct.static_eval(columns // tile_n)
    if columns % tile_n != 0:
        store_gradient(logits, dlogits, row, whole, label, shift, factors, tile_n, True, options)
    for step in range(whole):
        store_gradient(logits, dlogits, row, whole - 1 - step, label, shift, factors, tile_n, False, options)


def _write_zeros(dlogits, row, columns, tile_n):
    for c in range(columns // tile_n):
        store_zeros(dlogits, row, c, tile_n, False)
    if columns % tile_n != 0:
        store_zeros(dlogits, row, columns // tile_n, tile_n, True)


def _fused_row(row, logits, target, scale, ignore_index, loss, lse, dlogits, tile_n, unroll, options):
    label = ct.load(target, (row,), ())
    wide = ct.static_eval(tile_n * unroll)
    if label == ignore_index:
        store_row(loss, row, ct.zeros((1, 1), ct.float32))
        store_row(lse, row, ct.zeros((1, 1), ct.float32))
        _write_zeros(dlogits, row, ct.static_eval(options[5]), wide)
    else:
        found = store_loss(logits, loss, lse, row, label, tile_n, unroll, options)
        shift, factors = gradient_of_row(ct.load(scale, (row,), ()), found, options)
        _write_gradient(logits, dlogits, row, label, shift, factors, wide, options)


def gradient_of_row(scale, found, options):
    """The shift and the factors of a row's gradient, by its scale and what :func:`store_loss` found."""
    target_x, share, top, total, row_of_lse = found
    factors = gradient_factors(scale, share, row_of_lse, options)
    # Since every store needs the target's logit, none can come before that was read, whatever the compiler takes
    # for granted of logits and dlogits being two arrays.
    shift = ct.where(ct.isnan(target_x), NAN, top)
    return shift, (factors[0] / total, factors[1], factors[2])


def each_row(logits, target, scale, ignore_index, loss, lse, dlogits, tile_n, unroll, persistent, options):
    """Loss, lse and gradient of all rows: one a block, or resident blocks that loop."""
    arguments = (logits, target, scale, ignore_index, loss, lse, dlogits, tile_n, unroll, options)
    each_step(_fused_row, logits.shape[0], persistent, arguments)


@ct.kernel
def cross_entropy_fused(
    logits, target, scale, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, loss, lse, dlogits,
    columns: ConstInt, tile_n: ConstInt, unroll: ConstInt, persistent: ConstBool, weighted: ConstBool,
    smoothed: ConstBool, capped: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One row a block, or resident blocks, as many as occupancy says, that loop; logits and dlogits [rows, columns].

    target, scale, loss and lse [rows], weight [1, columns], weight_sum [1].
    """
    options = (weight, weight_sum, smoothing, z_loss, softcap, columns, weighted, smoothed, capped, tma)
    each_row(logits, target, scale, ignore_index, loss, lse, dlogits, tile_n, unroll, persistent, options)


def _axes(problem: Problem) -> dict[str, list[Value]]:
    # As many blocks as fit on an SM are under way in the block schedule: their rows must be short.
    short = problem["vocabulary"] <= 32768
    return {
        "schedule": ["persistent", "block"] if short else ["persistent"],
        **step_axes(problem["vocabulary"]),
        "occupancy": [2, 4] if short else [1, 2, 4],
        "tma": [False],
    }


_THREADS_ENOUGH = Constraint(
    "fewer than 256 threads on an SM leave its memory pipeline empty",
    lambda problem, config, target: config["num_worker_warps"] == 8 or config["occupancy"] > 1,
)


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    return logits_and_options(problem, generator, device) | {"scale": upstream(problem, generator, device)}


def reference(
    logits: Any, target: Any, scale: Any, weighted: bool, smoothed: bool, capped: bool, **options: Any
) -> dict[str, Any]:
    """Loss, lse and gradient in float64."""
    options |= {"weighted": weighted, "smoothed": smoothed, "capped": capped}
    rows = reference_rows(logits, target, **options)
    return rows | reference_gradient(logits, target, rows["lse"], scale, **options)


_ARRAYS = (*READ, *of_rows("scale"), *OPTIONS, *of_rows("loss", "lse", role="output"), DLOGITS)
FUSED = replace(
    spec(
        "cross_entropy_fused",
        "loss of every row of logits and its gradient, in place if asked, in one launch",
        cross_entropy_fused,
        _ARRAYS,
        reference,
        flags=FLAGS,
        flops=11,
        space=Space(_axes, (STEPS_MATCH, STEPS_FIT, _THREADS_ENOUGH, TMA_NEEDS_HOPPER), (cute_losses.space(FLAGS),)),
        default=lambda problem, target: step_config(
            "persistent", *step_shapes(problem["vocabulary"], 8)[0], occupancy=2, warps=8
        ),
        generic=generic_steps,
        inputs=_inputs,
    ),
    implement=lambda problem, config: implement_by_both(
        cross_entropy_fused, _ARRAYS, FLAGS, cute_losses.implement, problem, config
    ),
)

SPECS = (FUSED,)
