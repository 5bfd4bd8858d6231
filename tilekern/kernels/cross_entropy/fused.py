"""Cross entropy of a chunk of rows, loss and gradient in one launch; the formulas stand in the module ``tiles``.

A block reads a row, then reads it once more while it writes the gradient, last tile first, so that what it has just
read comes out of the L2 cache; how many rows are under way at once decides whether they fit there. ``dlogits`` may be
the memory of ``logits``. The gradient is that of ``(scale * loss).sum()``; rows whose scale is 0 still get their loss.
Ignored rows and targets that are not a class are treated as in the module ``separate``.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.cross_entropy.problem import (
    DIMENSIONS,
    SCALARS,
    STEPS_FIT,
    STEPS_MATCH,
    flags,
    logits_and_options,
    matrix,
    matrix_bytes,
    reference_gradient,
    reference_rows,
    step_axes,
    step_shapes,
    upstream,
    vector,
    weight_bytes,
    weights,
)
from tilekern.kernels.cross_entropy.tiles import (
    NAN,
    gradient_factors,
    row_loss,
    scan_row,
    store_gradient,
    store_row,
    store_zeros,
    target_logit,
    target_weight,
)
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, grid_of, hints, power_of_two
from tilekern.spec import Config, Constraint, Implementation, KernelSpec, Problem, Space, Value

_CHUNKS = (512, 1024, 2048, 4096)


def _write_gradient(
    logits, dlogits, weight, row, label, shift, of_softmax, at_target, spread, softcap, columns, tile_n, weighted,
    smoothed, capped, tma,
):  # fmt: skip
    """The second read of a row, from its end."""
    whole = ct.static_eval(columns // tile_n)
    if columns % tile_n != 0:
        store_gradient(
            logits, dlogits, weight, row, whole, label, shift, of_softmax, at_target, spread, softcap, tile_n, True,
            weighted, smoothed, capped, tma,
        )  # fmt: skip
    for step in range(whole):
        store_gradient(
            logits, dlogits, weight, row, whole - 1 - step, label, shift, of_softmax, at_target, spread, softcap,
            tile_n, False, weighted, smoothed, capped, tma,
        )  # fmt: skip


def _write_zeros(dlogits, row, columns, tile_n):
    for c in range(columns // tile_n):
        store_zeros(dlogits, row, c, tile_n, False)
    if columns % tile_n != 0:
        store_zeros(dlogits, row, columns // tile_n, tile_n, True)


def _fused_row(
    logits, target, scale, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, loss, lse, dlogits, row,
    columns, tile_n, unroll, weighted, smoothed, capped, tma,
):  # fmt: skip
    label = ct.load(target, (row,), ())
    wide = ct.static_eval(tile_n * unroll)
    if label == ignore_index:
        store_row(loss, row, ct.zeros((1, 1), ct.float32))
        store_row(lse, row, ct.zeros((1, 1), ct.float32))
        _write_zeros(dlogits, row, columns, wide)
    else:
        target_x = target_logit(logits, row, label, softcap, capped)
        share = target_weight(weight, label, weighted)
        top, total, pull = scan_row(
            logits, weight, row, softcap, columns, tile_n, unroll, weighted, smoothed, capped, tma
        )
        row_of_loss, row_of_lse = row_loss(
            top, total, pull, target_x, share, weight_sum, smoothing, z_loss, columns, weighted, smoothed
        )
        store_row(loss, row, row_of_loss)
        store_row(lse, row, row_of_lse)
        factors = gradient_factors(
            ct.load(scale, (row,), ()), share, row_of_lse, weight_sum, smoothing, z_loss, columns, weighted, smoothed
        )
        # Since every store needs the target's logit, none can come before that was read, whatever the compiler takes
        # for granted of logits and dlogits being two arrays.
        shift = ct.where(ct.isnan(target_x), NAN, top)
        _write_gradient(
            logits, dlogits, weight, row, label, shift, factors[0] / total, factors[1], factors[2], softcap, columns,
            wide, weighted, smoothed, capped, tma,
        )  # fmt: skip


@ct.kernel
def cross_entropy_fused_block(
    logits, target, scale, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, loss, lse, dlogits,
    columns: ConstInt, tile_n: ConstInt, unroll: ConstInt, weighted: ConstBool, smoothed: ConstBool,
    capped: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One row a block; logits and dlogits [rows, columns], target, scale, loss and lse [rows].

    weight [1, columns], weight_sum [1].
    """
    _fused_row(
        logits, target, scale, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, loss, lse, dlogits,
        ct.bid(0), columns, tile_n, unroll, weighted, smoothed, capped, tma,
    )  # fmt: skip


@ct.kernel
def cross_entropy_fused_persistent(
    logits, target, scale, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, loss, lse, dlogits,
    columns: ConstInt, tile_n: ConstInt, unroll: ConstInt, weighted: ConstBool, smoothed: ConstBool,
    capped: ConstBool, tma: ConstBool,
):  # fmt: skip
    """Resident blocks, as many as occupancy says, that loop over rows.

    Arrays as in :func:`cross_entropy_fused_block`.
    """
    for row in range(ct.bid(0), logits.shape[0], ct.num_blocks(0)):
        _fused_row(
            logits, target, scale, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, loss, lse, dlogits,
            row, columns, tile_n, unroll, weighted, smoothed, capped, tma,
        )  # fmt: skip


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


def _implement(problem: Problem, config: Config) -> Implementation:
    block = config["schedule"] == "block"
    return Implementation(
        function=cross_entropy_fused_block if block else cross_entropy_fused_persistent,
        parameters=(
            matrix("logits", problem),
            vector("target", "int32"),
            vector("scale"),
            *weights(problem),
            *SCALARS,
            vector("loss", role="output"),
            vector("lse", role="output"),
            matrix("dlogits", problem, "output"),
        ),
        constants=(
            ("columns", problem["vocabulary"]),
            ("tile_n", config["tile_n"]),
            ("unroll", config["unroll"]),
            *flags(problem),
            ("tma", config["tma"]),
        ),
        grid=lambda sizes, sm_count: grid_of(sizes["rows"], config, sm_count),
        hints=hints(config),
    )


def _config(warps: int, occupancy: int, tile_n: int, unroll: int) -> Config:
    return Config(
        schedule="persistent",
        tile_n=tile_n,
        unroll=unroll,
        num_worker_warps=warps,
        occupancy=occupancy,
        tma=False,
    )


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    return {
        **logits_and_options(problem, generator, device),
        "scale": upstream(problem, generator, device),
    }


def reference(
    logits: Any, target: Any, scale: Any, weighted: bool, smoothed: bool, capped: bool, **options: Any
) -> dict[str, Any]:
    """Loss, lse and gradient in float64."""
    options |= {"weighted": weighted, "smoothed": smoothed, "capped": capped}
    rows = reference_rows(logits, target, **options)
    return rows | reference_gradient(logits, target, rows["lse"], scale, **options)


def _outputs(problem: Problem, blocks: int) -> dict[str, tuple[tuple[int, ...], str]]:
    rows = ((problem["rows"],), "float32")
    return {"loss": rows, "lse": rows, "dlogits": ((problem["rows"], problem["vocabulary"]), problem["dtype"])}


FUSED = KernelSpec(
    name="cross_entropy_fused",
    summary="loss of every row of logits and its gradient, in place if asked, in one launch",
    module=__name__,
    dimensions=DIMENSIONS,
    space=Space(_axes, (STEPS_MATCH, STEPS_FIT, _THREADS_ENOUGH, TMA_NEEDS_HOPPER)),
    implement=_implement,
    default=lambda problem, target: _config(8, 2, *step_shapes(problem["vocabulary"], 8)[0]),
    generic=lambda problem: _config(0, 4, min(512, power_of_two(problem["vocabulary"])), 1),
    inputs=_inputs,
    outputs=_outputs,
    reference=reference,
    bytes_moved=lambda problem: 2 * matrix_bytes(problem) + weight_bytes(problem) + 16 * problem["rows"],
    flops=lambda problem: 11 * problem["rows"] * problem["vocabulary"],
    result_dtype=lambda problem: problem["dtype"],
)

SPECS = (FUSED,)
