"""Cross entropy of rows of logits, forward and backward; the formulas are in the module ``tiles``.

The forward reads each row once (online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867); the backward computes
the softmax again from the row's ``lse``. ``dlogits`` may be the memory of ``logits``.

A row whose target is ``ignore_index`` has loss, lse and gradient 0 and is not read. If its target is another number
that is not a class, loss and gradient are NaN; nothing outside the arrays is accessed.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.cross_entropy import problem as common
from tilekern.kernels.cross_entropy import tiles as shared
from tilekern.kernels.cross_entropy.problem import option_arguments
from tilekern.kernels.families import vocabulary as family
from tilekern.kernels.tiles import TMA_NEEDS_HOPPER, ConstBool, ConstInt, each_step
from tilekern.spec import Config, Constraint, Problem, Space, Value
from tilekern.spec.targets import Target

__all__ = ["BACKWARD", "FORWARD", "SPECS", "option_arguments"]


def _forward_row(row, logits, target, ignore_index, loss, lse, tile_n, unroll, options):
    label = ct.load(target, (row,), ())
    if label == ignore_index:
        shared.store_row(loss, row, ct.zeros((1, 1), ct.float32))
        shared.store_row(lse, row, ct.zeros((1, 1), ct.float32))
    else:
        shared.store_loss(logits, loss, lse, row, label, tile_n, unroll, options)


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
        shared.store_zeros(dlogits, row, c, tile_n, bounded)
    else:
        share = shared.target_weight(weight, label, weighted)
        factors = shared.gradient_factors(upstream, share, lse, options)
        shift = ct.where((label < 0) | (label >= columns), shared.NAN, lse)
        shared.store_gradient(logits, dlogits, row, c, label, shift, factors, tile_n, bounded, options)


def _backward_item(item, logits, target, lse, scale, ignore_index, dlogits, tile_n, options):
    columns = ct.static_eval(options[5])
    row, c = family.place_of(item, columns, tile_n)
    label = ct.load(target, (row,), ())
    upstream = ct.load(scale, (row,), ())
    arguments = (logits, dlogits, label, ignore_index, upstream, family.load_number(lse, row), tile_n, options)
    family.in_tile(_backward_tile, row, c, columns, tile_n, arguments)


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
        **family.step_axes(problem["vocabulary"]),
        "occupancy": [2, 4, 8],
        "tma": [False],
    }


# A block that loops over one row has too few steps for TMA's ring of buffers to fill.
_TMA_IS_PERSISTENT = Constraint(
    "TMA is for the persistent schedule",
    lambda problem, config, target: not config["tma"] or config["schedule"] == "persistent",
)


def _forward_default(problem: Problem, target: Target) -> Config:
    """Return resident blocks for long rows, which end together; many blocks for short rows, which hide latencies."""
    shapes = family.step_shapes(problem["vocabulary"], 0)
    if len(shapes) < 4:
        return family.step_config("block", *shapes[0])
    # Weights, smoothing and a cap double the code of each element, so only half as many are written out.
    return family.step_config("persistent", *shapes[0 if any(problem[flag] for flag in common.FLAGS) else 1])


def _backward_config(problem: Problem, schedule: str, widest: int, occupancy: int) -> Config:
    return Config(family.tile_config(problem, schedule, widest, occupancy), tma=False)


def _backward_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    inputs = common.logits_and_options(problem, generator, device)
    saved = family.by_parts(
        lambda x: {"lse": common.capped_logits(x, inputs["softcap"], problem["capped"]).logsumexp(1)}, inputs["logits"],
        names=("lse",),
    )  # fmt: skip
    return inputs | saved | {"scale": common.upstream(problem, generator, device)}


FORWARD = family.spec(
    cross_entropy_forward,
    "loss and log of the sum of exponentials of every row of logits, in one read",
    (*common.READ, *common.OPTIONS, *family.of_rows("loss", "lse", role="output")),
    common.reference_rows,
    flags=common.FLAGS,
    flops=5,
    space=Space(_forward_axes, (family.STEPS_MATCH, common.STEPS_FIT, _TMA_IS_PERSISTENT, TMA_NEEDS_HOPPER)),
    default=_forward_default,
    generic=family.generic_steps,
    inputs=common.logits_and_options,
    exact_as="float32",
)
BACKWARD = family.spec(
    cross_entropy_backward,
    "gradient of cross_entropy with respect to the logits",
    (*common.READ, *family.of_rows("lse", "scale"), *common.OPTIONS, common.DLOGITS),
    common.reference_gradient,
    flags=common.FLAGS,
    flops=6,
    space=Space(
        lambda problem: family.tile_axes(problem, 1024, 2048, 4096, 8192) | {"tma": [False]},
        (family.tiles_full(8, 64, 8192), TMA_NEEDS_HOPPER),
    ),
    default=lambda problem, target: _backward_config(problem, "block", 4096, 8),
    generic=lambda problem: _backward_config(problem, "persistent", 512, 4),
    inputs=_backward_inputs,
)

SPECS = (FORWARD, BACKWARD)
