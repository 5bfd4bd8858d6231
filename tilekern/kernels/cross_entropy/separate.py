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
    DLOGITS,
    FLAGS,
    OPTIONS,
    READ,
    STEPS_FIT,
    capped_logits,
    logits_and_options,
    option_arguments,
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
    target_weight,
)
from tilekern.kernels.families.vocabulary import (
    STEPS_MATCH,
    by_parts,
    each_step,
    generic_steps,
    in_tile,
    load_number,
    of_rows,
    place_of,
    spec,
    step_axes,
    step_config,
    step_shapes,
    tile_axes,
    tile_config,
    tiles_full,
)
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt
from tilekern.spec import Config, Constraint, Problem, Space, Value
from tilekern.spec.targets import Target

__all__ = ["BACKWARD", "FORWARD", "SPECS", "option_arguments"]


def _forward_row(row, logits, target, ignore_index, loss, lse, tile_n, unroll, options):
    label = ct.load(target, (row,), ())
    if label == ignore_index:
        store_row(loss, row, ct.zeros((1, 1), ct.float32))
        store_row(lse, row, ct.zeros((1, 1), ct.float32))
    else:
        store_loss(logits, loss, lse, row, label, tile_n, unroll, options)


@ct.kernel
def cross_entropy_forward(
    logits, target, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, loss, lse, columns: ConstInt,
    tile_n: ConstInt, unroll: ConstInt, persistent: ConstBool, weighted: ConstBool, smoothed: ConstBool,
    capped: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One row a block, or resident blocks that loop; logits [rows, columns], target, loss and lse [rows].

    weight [1, columns], weight_sum [1].
    """
    options = (weight, weight_sum, smoothing, z_loss, softcap, columns, weighted, smoothed, capped, tma)
    arguments = (logits, target, ignore_index, loss, lse, tile_n, unroll, options)
    each_step(_forward_row, logits.shape[0], persistent, arguments)


def _backward_tile(row, c, bounded, logits, dlogits, label, ignore_index, upstream, lse, tile_n, options):
    weight, columns, weighted = options[0], options[5], ct.static_eval(options[6])
    if (label == ignore_index) | (upstream == 0.0):
        store_zeros(dlogits, row, c, tile_n, bounded)
    else:
        share = target_weight(weight, label, weighted)
        factors = gradient_factors(upstream, share, lse, options)
        shift = ct.where((label < 0) | (label >= columns), NAN, lse)
        store_gradient(logits, dlogits, row, c, label, shift, factors, tile_n, bounded, options)


def _backward_item(item, logits, target, lse, scale, ignore_index, dlogits, tile_n, options):
    columns = ct.static_eval(options[5])
    row, c = place_of(item, columns, tile_n)
    label = ct.load(target, (row,), ())
    upstream = ct.load(scale, (row,), ())
    arguments = (logits, dlogits, label, ignore_index, upstream, load_number(lse, row), tile_n, options)
    in_tile(_backward_tile, row, c, columns, tile_n, arguments)


@ct.kernel
def cross_entropy_backward(
    logits, target, lse, scale, weight, weight_sum, ignore_index, smoothing, z_loss, softcap, dlogits,
    columns: ConstInt, tile_n: ConstInt, persistent: ConstBool, weighted: ConstBool, smoothed: ConstBool,
    capped: ConstBool, tma: ConstBool,
):  # fmt: skip
    """One tile a block, or resident blocks that loop; logits and dlogits [rows, columns].

    target, lse and scale [rows], weight [1, columns], weight_sum [1].
    """
    options = (weight, weight_sum, smoothing, z_loss, softcap, columns, weighted, smoothed, capped, tma)
    arguments = (logits, target, lse, scale, ignore_index, dlogits, tile_n, options)
    each_step(_backward_item, logits.shape[0] * ct.cdiv(columns, tile_n), persistent, arguments)


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


def _forward_default(problem: Problem, target: Target) -> Config:
    """Long rows by resident blocks, which end together; short ones by as many blocks as fit, to hide latencies."""
    shapes = step_shapes(problem["vocabulary"], 0)
    if len(shapes) < 4:
        return step_config("block", *shapes[0])
    # Weights, smoothing and a cap double the code of each element, so that half as many are written out.
    return step_config("persistent", *shapes[0 if any(problem[flag] for flag in FLAGS) else 1])


def _backward_config(problem: Problem, schedule: str, widest: int, occupancy: int) -> Config:
    return Config(tile_config(problem, schedule, widest, occupancy), tma=False)


def _backward_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    inputs = logits_and_options(problem, generator, device)
    saved = by_parts(
        lambda x: {"lse": capped_logits(x, inputs["softcap"], problem["capped"]).logsumexp(1)}, inputs["logits"],
        names=("lse",),
    )  # fmt: skip
    return inputs | saved | {"scale": upstream(problem, generator, device)}


FORWARD = spec(
    "cross_entropy_forward",
    "loss and log of the sum of exponentials of every row of logits, in one read",
    cross_entropy_forward,
    (*READ, *OPTIONS, *of_rows("loss", "lse", role="output")),
    reference_rows,
    flags=FLAGS,
    flops=5,
    space=Space(_forward_axes, (STEPS_MATCH, STEPS_FIT, _TMA_IS_PERSISTENT, TMA_NEEDS_HOPPER)),
    default=_forward_default,
    generic=generic_steps,
    inputs=logits_and_options,
    exact_as="float32",
)
BACKWARD = spec(
    "cross_entropy_backward",
    "gradient of cross_entropy with respect to the logits",
    cross_entropy_backward,
    (*READ, *of_rows("lse", "scale"), *OPTIONS, DLOGITS),
    reference_gradient,
    flags=FLAGS,
    flops=6,
    space=Space(
        lambda problem: tile_axes(problem, 1024, 2048, 4096, 8192) | {"tma": [False]},
        (tiles_full(8, 64, 8192), TMA_NEEDS_HOPPER),
    ),
    default=lambda problem, target: _backward_config(problem, "block", 4096, 8),
    generic=lambda problem: _backward_config(problem, "persistent", 512, 4),
    inputs=_backward_inputs,
)

SPECS = (FORWARD, BACKWARD)
