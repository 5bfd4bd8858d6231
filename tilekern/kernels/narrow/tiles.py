"""Code that the kernels of narrow models share: norms of whole rows, and products with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays, drawn, tensors
from tilekern.kernels.rms_norm import reference_forward
from tilekern.kernels.skinny.tiles import is_exact
from tilekern.kernels.tiles import load
from tilekern.spec import Config, Constraint, Problem
from tilekern.spec.targets import Target


def row(array, j, width):
    """Return numbers [width] of a constant array."""
    return load(array, (j,), (width,), True, 0, False)


def column(numbers):
    """Return numbers [n] as float32 [n, 1]."""
    return ct.reshape(numbers, (numbers.shape[0], 1)).astype(ct.float32)


def added_up(residual, rows):
    """Return the sum of two tiles in their dtype."""
    return (residual.astype(ct.float32) + rows.astype(ct.float32)).astype(residual.dtype)


def normal(tile, weight, bias, eps, width, layer):
    """Return the norm of whole rows, rounded as by a launch of its own.

    ``tile`` [tile_m, at least width] has zeros beyond ``width``, as do weight and bias.
    """
    dtype, wide, scale = tile.dtype, tile.astype(ct.float32), weight.astype(ct.float32)
    if ct.static_eval(layer):
        left = wide - ct.sum(wide, axis=1, keepdims=True) / width
        if ct.static_eval(width != tile.shape[1]):
            left = ct.where(ct.arange(tile.shape[1], dtype=ct.int32)[None, :] < width, left, 0.0)
        rstd = ct.rsqrt(ct.sum(left * left, axis=1, keepdims=True) / width + eps)
        return (left * rstd * scale + bias.astype(ct.float32)).astype(dtype)
    rstd = ct.rsqrt(ct.sum(wide * wide, axis=1, keepdims=True) / width + eps)
    return ((wide * rstd).astype(dtype).astype(ct.float32) * scale).astype(dtype)


def product(weight, rows, sums):
    """Return sums + weight @ rows^T, [columns, tile_m]: an instruction has 64 rows of its first operand."""
    return ct.mma(weight, rows.transpose(), sums)


def constraints(
    generic: Callable[[Problem], Config], *others: tuple[str, Callable[[Problem, Config, Target], bool]]
) -> tuple[Constraint, ...]:
    """Return constraints on configs beside the generic one, which serves what no other does."""
    of_all = (
        ("float32 products run on a GPU's scalar units, since TF32 would round the inputs", is_exact),
        ("blocks have a tile each, whose weights they load before they wait", _is_block),
        *others,
    )
    return tuple(Constraint(reason, _or_generic(generic, holds)) for reason, holds in of_all)


def _is_block(problem: Problem, config: Config, target: Target) -> bool:
    return bool(config["schedule"] == "block")


def _or_generic(
    generic: Callable[[Problem], Config], holds: Callable[[Problem, Config, Target], bool]
) -> Callable[[Problem, Config, Target], bool]:
    return lambda problem, config, target: config == generic(problem) or holds(problem, config, target)


def threads(config: Config) -> int:
    """Return the threads of a block that compute."""
    return 32 * int(config["num_worker_warps"] or 4)


def normal_reference(rows: Any, weight: Any, bias: Any, eps: float, *, layer: bool) -> Any:
    """Return the norm of rows, computed in float64 and rounded to their dtype."""
    if not layer:
        return reference_forward(rows, weight, eps)["y"].to(rows.dtype)
    left = rows.double() - rows.double().mean(-1, keepdim=True)
    rstd = (left.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (left * rstd * weight.double() + bias.double()).to(rows.dtype)


def inputs_of(arrays: Arrays, problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw inputs whose products keep the variance of a row: an activation then gets values near 0."""
    found = drawn(arrays, problem, generator, device)
    matrices = {x.name: x for x in tensors(arrays, "input") if x.constant and len(x.shape_in(problem)) == 2}
    return found | {
        name: drawn((x,), problem, generator, device, about_one=False)[name] * x.shape_in(problem)[1] ** -0.5
        for name, x in matrices.items()
        if x.is_in(problem)
    }
