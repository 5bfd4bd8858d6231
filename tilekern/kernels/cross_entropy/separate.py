"""Cross entropy of rows of logits, forward and backward; the formulas stand in the module ``tiles``.

The forward reads each row once (online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867); the backward computes
the softmax again from the row's ``lse``. ``dlogits`` may be the memory of ``logits``.

A row whose target is ``ignore_index`` has loss, lse and gradient 0 and is not read. A target that is neither that nor
a class gives NaN as the row's loss and gradient; no memory outside the arrays is touched.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.cross_entropy.problem import (
    DIMENSIONS,
    FLAGS,
    SCALARS,
    STEPS_FIT,
    STEPS_MATCH,
    capped_logits,
    flags,
    logits_and_options,
    matrix,
    matrix_bytes,
    option_arguments,
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
from tilekern.spec import (
    Config,
    Constraint,
    Implementation,
    KernelSpec,
    Problem,
    Space,
    Value,
    cdiv,
)
from tilekern.targets import Target

__all__ = ["BACKWARD", "FORWARD", "SPECS", "option_arguments"]


def _forward_row(
    logits, target, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, loss, lse, row, columns, tile_n,
    unroll, weighted, smoothed, capped, tma,
):  # fmt: skip
    label = ct.load(target, (row,), ())
    if label == ignore_index:
        store_row(loss, row, ct.zeros((1, 1), ct.float32))
        store_row(lse, row, ct.zeros((1, 1), ct.float32))
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


@ct.kernel
def cross_entropy_forward_block(
    logits, target, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, loss, lse, columns: ConstInt,
    tile_n: ConstInt, unroll: ConstInt, weighted: ConstBool, smoothed: ConstBool, capped: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One row a block; logits [rows, columns], target, loss and lse [rows], weight [1, columns], weight_sum [1]."""
    _forward_row(
        logits, target, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, loss, lse, ct.bid(0), columns,
        tile_n, unroll, weighted, smoothed, capped, tma,
    )  # fmt: skip


@ct.kernel
def cross_entropy_forward_persistent(
    logits, target, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, loss, lse, columns: ConstInt,
    tile_n: ConstInt, unroll: ConstInt, weighted: ConstBool, smoothed: ConstBool, capped: ConstBool, tma: ConstBool,
):  # fmt: skip
    """Resident blocks that loop over rows; arrays as in :func:`cross_entropy_forward_block`."""
    for row in range(ct.bid(0), logits.shape[0], ct.num_blocks(0)):
        _forward_row(
            logits, target, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, loss, lse, row, columns,
            tile_n, unroll, weighted, smoothed, capped, tma,
        )  # fmt: skip


def _backward_tile(
    logits, dlogits, weight, weight_sum, row, c, label, ignore_index, upstream, lse, smoothing, z_loss, softcap,
    columns, tile_n, bounded, weighted, smoothed, capped, tma,
):  # fmt: skip
    if (label == ignore_index) | (upstream == 0.0):
        store_zeros(dlogits, row, c, tile_n, bounded)
    else:
        share = target_weight(weight, label, weighted)
        factors = gradient_factors(upstream, share, lse, weight_sum, smoothing, z_loss, columns, weighted, smoothed)
        shift = ct.where((label < 0) | (label >= columns), NAN, lse)
        store_gradient(
            logits, dlogits, weight, row, c, label, shift, factors[0], factors[1], factors[2], softcap, tile_n, bounded,
            weighted, smoothed, capped, tma,
        )  # fmt: skip


def _backward_item(
    logits, target, lse, scale, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, dlogits, item, columns,
    tile_n, weighted, smoothed, capped, tma,
):  # fmt: skip
    """One tile; only the last of a row has its bounds checked."""
    across = ct.static_eval(-(-columns // tile_n))
    row, c = item // across, item % across
    label = ct.load(target, (row,), ())
    upstream = ct.load(scale, (row,), ())
    row_lse = ct.reshape(ct.load(lse, (row,), (1,)), (1, 1))
    if c < columns // tile_n:
        _backward_tile(
            logits, dlogits, weight, weight_sum, row, c, label, ignore_index, upstream, row_lse, smoothing, z_loss,
            softcap, columns, tile_n, False, weighted, smoothed, capped, tma,
        )  # fmt: skip
    elif columns % tile_n != 0:
        _backward_tile(
            logits, dlogits, weight, weight_sum, row, c, label, ignore_index, upstream, row_lse, smoothing, z_loss,
            softcap, columns, tile_n, True, weighted, smoothed, capped, tma,
        )  # fmt: skip


@ct.kernel
def cross_entropy_backward_block(
    logits, target, lse, scale, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, dlogits,
    columns: ConstInt, tile_n: ConstInt, weighted: ConstBool, smoothed: ConstBool, capped: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One tile a block; logits and dlogits [rows, columns], target, lse and scale [rows].

    weight [1, columns], weight_sum [1].
    """
    _backward_item(
        logits, target, lse, scale, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, dlogits, ct.bid(0),
        columns, tile_n, weighted, smoothed, capped, tma,
    )  # fmt: skip


@ct.kernel
def cross_entropy_backward_persistent(
    logits, target, lse, scale, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, dlogits,
    columns: ConstInt, tile_n: ConstInt, weighted: ConstBool, smoothed: ConstBool, capped: ConstBool, tma: ConstBool,
):  # fmt: skip
    """Resident blocks that loop over tiles; arrays as in :func:`cross_entropy_backward_block`."""
    for item in range(ct.bid(0), logits.shape[0] * ct.cdiv(columns, tile_n), ct.num_blocks(0)):
        _backward_item(
            logits, target, lse, scale, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, dlogits, item,
            columns, tile_n, weighted, smoothed, capped, tma,
        )  # fmt: skip


def _forward_axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["persistent", "block"],
        **step_axes(problem["vocabulary"]),
        "occupancy": [2, 4, 8],
        "tma": [False],
    }


# A block that loops over one row has too few steps for TMA's ring of buffers to fill.
_TMA_IS_PERSISTENT = Constraint(
    "TMA is for the persistent schedule",
    lambda problem, config, target: not config["tma"] or config["schedule"] == "persistent",
)


def _implement_forward(problem: Problem, config: Config) -> Implementation:
    block = config["schedule"] == "block"
    return Implementation(
        function=cross_entropy_forward_block if block else cross_entropy_forward_persistent,
        parameters=(
            matrix("logits", problem),
            vector("target", "int32"),
            *weights(problem),
            *SCALARS,
            vector("loss", role="output"),
            vector("lse", role="output"),
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


def _forward_config(schedule: str, occupancy: int, tile_n: int, unroll: int) -> Config:
    return Config(schedule=schedule, tile_n=tile_n, unroll=unroll, num_worker_warps=0, occupancy=occupancy, tma=False)


def _forward_default(problem: Problem, target: Target) -> Config:
    """Long rows by resident blocks, which end together; short ones by as many blocks as fit, to hide latencies."""
    shapes = step_shapes(problem["vocabulary"], 0)
    if len(shapes) < 4:
        return _forward_config("block", 4, *shapes[0])
    # Weights, smoothing and a cap double the code of each element, so that half as many are written out.
    return _forward_config("persistent", 4, *shapes[0 if any(problem[flag] for flag in FLAGS) else 1])


def _backward_axes(problem: Problem) -> dict[str, list[Value]]:
    width = power_of_two(problem["vocabulary"])
    return {
        "schedule": ["persistent", "block"],
        "tile_n": sorted({min(width, n) for n in (1024, 2048, 4096, 8192)}),
        "num_worker_warps": [0, 8],
        "occupancy": [4, 8],
        "tma": [False],
    }


_THREADS_FULL = Constraint(
    "a tile gives each thread 8 to 64 elements, fewer only where a row is shorter than that",
    lambda problem, config, target: (
        config["tile_n"] // (32 * (config["num_worker_warps"] or 4)) in (8, 16, 32, 64)
        or config["tile_n"] == power_of_two(problem["vocabulary"]) < 8192
    ),
)


def _implement_backward(problem: Problem, config: Config) -> Implementation:
    vocabulary, tile_n = problem["vocabulary"], config["tile_n"]
    block = config["schedule"] == "block"
    return Implementation(
        function=cross_entropy_backward_block if block else cross_entropy_backward_persistent,
        parameters=(
            matrix("logits", problem),
            vector("target", "int32"),
            vector("lse"),
            vector("scale"),
            *weights(problem),
            *SCALARS,
            matrix("dlogits", problem, "output"),
        ),
        constants=(
            ("columns", vocabulary),
            ("tile_n", tile_n),
            *flags(problem),
            ("tma", config["tma"]),
        ),
        grid=lambda sizes, sm_count: grid_of(sizes["rows"] * cdiv(vocabulary, tile_n), config, sm_count),
        hints=hints(config),
    )


def _backward_config(problem: Problem, schedule: str, widest: int, occupancy: int) -> Config:
    tile_n = min(widest, power_of_two(problem["vocabulary"]))
    return Config(schedule=schedule, tile_n=tile_n, num_worker_warps=0, occupancy=occupancy, tma=False)


_PART_ROWS = 2048


def _backward_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    import torch

    inputs = logits_and_options(problem, generator, device)
    # In parts, since in float64 all logits at once may not fit.
    parts = (capped_logits(x, inputs["softcap"], problem["capped"]) for x in inputs["logits"].split(_PART_ROWS))
    lse = torch.cat([part.logsumexp(1) for part in parts]).float()
    return {**inputs, "lse": lse, "scale": upstream(problem, generator, device)}


FORWARD = KernelSpec(
    name="cross_entropy_forward",
    summary="loss and log of the sum of exponentials of every row of logits, in one read",
    module=__name__,
    dimensions=DIMENSIONS,
    space=Space(_forward_axes, (STEPS_MATCH, STEPS_FIT, _TMA_IS_PERSISTENT, TMA_NEEDS_HOPPER)),
    implement=_implement_forward,
    default=_forward_default,
    generic=lambda problem: _forward_config("persistent", 4, min(512, power_of_two(problem["vocabulary"])), 1),
    inputs=logits_and_options,
    outputs=lambda problem, blocks: dict.fromkeys(("loss", "lse"), ((problem["rows"],), "float32")),
    reference=reference_rows,
    bytes_moved=lambda problem: matrix_bytes(problem) + weight_bytes(problem) + 12 * problem["rows"],
    flops=lambda problem: 5 * problem["rows"] * problem["vocabulary"],
    result_dtype=lambda problem: "float32",
)

BACKWARD = KernelSpec(
    name="cross_entropy_backward",
    summary="gradient of cross_entropy with respect to the logits",
    module=__name__,
    dimensions=DIMENSIONS,
    space=Space(_backward_axes, (_THREADS_FULL, TMA_NEEDS_HOPPER)),
    implement=_implement_backward,
    default=lambda problem, target: _backward_config(problem, "block", 4096, 8),
    generic=lambda problem: _backward_config(problem, "persistent", 512, 4),
    inputs=_backward_inputs,
    outputs=lambda problem, blocks: {"dlogits": ((problem["rows"], problem["vocabulary"]), problem["dtype"])},
    reference=reference_gradient,
    bytes_moved=lambda problem: 2 * matrix_bytes(problem) + weight_bytes(problem) + 12 * problem["rows"],
    flops=lambda problem: 6 * problem["rows"] * problem["vocabulary"],
    result_dtype=lambda problem: problem["dtype"],
)

SPECS = (FORWARD, BACKWARD)
