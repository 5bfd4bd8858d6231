"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101): one step of a parameter and its two moments, in place.

With the gradient g (with its sign turned if the objective is maximised) at step t:
``m = m + (1 - beta1) * (g - m)``; ``v = beta2 * v + (1 - beta2) * g^2``;
``p = (1 - lr * weight_decay) * p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)``.
Numerator and denominator of the last fraction are multiplied by ``sqrt(1 - beta2^t)``, so that the host computes
everything that changes from step to step: the kernel gets ``decay``, ``step_size`` and the scaled ``eps`` as scalars,
and one artifact serves every learning rate. All in float32 registers, each result rounded once.

The order of the elements does not matter, so a parameter's memory is viewed as rows of a few widths
(:func:`flat_shape`), whatever its shape: few problems, and rows that start at aligned addresses.
"""

from __future__ import annotations

import functools
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import ROWS, Arrays
from tilekern.kernels.families.tables import MATRIX, spec
from tilekern.kernels.tiles import ConstBool, ConstInt, bounds_of_tiles, each_step, grid_of_tiles, load, power_of_two
from tilekern.spec import Array, Config, Constraint, Problem, ScalarParameter, Space, Value


def _step_tile(
    item, param, grad, exp_avg, exp_avg_sq, sign, decay, weight1, beta2, weight2, step_size, eps, new_param,
    new_exp_avg, new_exp_avg_sq, columns, tile_m, tile_n, bounded,
):  # fmt: skip
    across = ct.cdiv(columns, tile_n)
    index, shape = (item // across, item % across), (tile_m, tile_n)
    p = load(param, index, shape, bounded, 0, False).astype(ct.float32)
    g = load(grad, index, shape, bounded, 0, False).astype(ct.float32) * sign
    m = load(exp_avg, index, shape, bounded, 0, False).astype(ct.float32)
    v = load(exp_avg_sq, index, shape, bounded, 0, False).astype(ct.float32)
    m = m + weight1 * (g - m)
    v = beta2 * v + weight2 * g * g
    # The hardware's own root and quotient are within 2 ulp in float32; exact ones cost a slow path for every element.
    root = ct.sqrt(v, rounding_mode=ct.RoundingMode.APPROX)
    step = ct.truediv(m, root + eps, rounding_mode=ct.RoundingMode.APPROX)
    p = decay * p - step_size * step
    ct.store(new_param, index, p.astype(new_param.dtype), check_bounds=bounded, allow_tma=False)
    ct.store(new_exp_avg, index, m.astype(new_exp_avg.dtype), check_bounds=bounded, allow_tma=False)
    ct.store(new_exp_avg_sq, index, v.astype(new_exp_avg_sq.dtype), check_bounds=bounded, allow_tma=False)


@ct.kernel
def adamw(
    param, grad, exp_avg, exp_avg_sq, sign, decay, weight1, beta2, weight2, step_size, eps, new_param, new_exp_avg,
    new_exp_avg_sq, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, persistent: ConstBool, bounded: ConstBool,
):  # fmt: skip
    """One tile a block, or resident blocks that loop; all arrays [rows, columns].

    Each ``new_`` array shares the memory of the array with the rest of its name.
    """
    # Its launch overlaps the end of the kernel before it, mostly the same one for another parameter.
    ct.grid_dependency_control_wait()
    arguments = (
        param, grad, exp_avg, exp_avg_sq, sign, decay, weight1, beta2, weight2, step_size, eps, new_param, new_exp_avg,
        new_exp_avg_sq, columns, tile_m, tile_n, bounded,
    )  # fmt: skip
    each_step(_step_tile, ct.cdiv(param.shape[0], tile_m) * ct.cdiv(columns, tile_n), persistent, arguments)


# Rows as wide as the widest tile; a norm's weight of 128 elements; whatever is left, one element a row and unaligned.
WIDTHS = (4096, 256, 16, 1)


@functools.lru_cache(maxsize=4096)
def flat_shape(elements: int) -> tuple[int, int]:
    """Return rows and columns of contiguous memory: columns are the largest of :data:`WIDTHS` that divides it."""
    columns = next(width for width in WIDTHS if elements % width == 0)
    return elements // columns, columns


def _axes(problem: Problem) -> dict[str, list[Value]]:
    width = power_of_two(problem["columns"])
    widths = sorted({min(width, n) for n in (1024, 2048, 4096)})
    return {
        "schedule": ["persistent", "block"],
        "tile_m": sorted({max(1, elements // n) for elements in (1024, 2048, 4096) for n in widths}),
        "tile_n": list(widths),
        "occupancy": [2, 4, 8],
        "num_worker_warps": [0, 8],
        "tma": [False],
    }


def _elements(config: Config) -> int:
    return int(config["tile_m"] * config["tile_n"])


_SIZED = Constraint(
    "a tile of fewer than 1024 or more than 4096 elements starves the memory system or spills",
    lambda problem, config, target: 1024 <= _elements(config) <= 4096,
)
_IN_ONE_PIECE = Constraint(
    "a tile of several rows takes whole ones, so that it is one piece of memory",
    lambda problem, config, target: config["tile_m"] == 1 or config["tile_n"] >= problem["columns"],
)
_IN_FLIGHT = Constraint(
    "blocks of fewer than 4096 elements together leave an SM's memory requests too few",
    lambda problem, config, target: _elements(config) * config["occupancy"] >= 4096,
)
_FITS_REGISTERS = Constraint(
    "five live values for each element of a tile exceed the SM's registers at this occupancy",
    lambda problem, config, target: _elements(config) * 5 * config["occupancy"] <= 1.25 * target.registers,
)
_READ, _WRITTEN = ("param", "grad", "exp_avg", "exp_avg_sq"), ("new_param", "new_exp_avg", "new_exp_avg_sq")
_SCALARS = {
    "sign": -1.0, "decay": 0.95, "weight1": 0.1, "beta2": 0.98, "weight2": 0.02, "step_size": 0.1, "eps": 1e-3,
}  # fmt: skip
_ARRAYS: Arrays = (
    *(Array(name, "dtype", ROWS) for name in _READ),
    *(ScalarParameter(name, "float32", sample) for name, sample in _SCALARS.items()),
    *(Array(name, "dtype", ROWS, "output") for name in _WRITTEN),
)


def _config(problem: Problem, schedule: str, elements: int, occupancy: int) -> Config:
    width = min(elements, power_of_two(problem["columns"]))
    return Config(
        schedule=schedule, tile_m=elements // width, tile_n=width, occupancy=occupancy, num_worker_warps=0, tma=False
    )


def _given(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw parameters that a step moves by many ulps, but not near zero, where relative accuracy is lost."""
    import torch

    shape, dtype = (problem["rows"], problem["columns"]), getattr(torch, problem["dtype"])

    def drawn(least: float) -> Any:
        x = torch.randn(shape, generator=generator, device=device)
        return x.add_(x.sign(), alpha=least)

    param, grad, exp_avg, exp_avg_sq = (drawn(least) for least in (2.0, 0.5, 0.5, 0.5))
    read = (param, grad, exp_avg, exp_avg_sq.square_())
    return {name: x.to(dtype) for name, x in zip(_READ, read, strict=True)}


def reference(
    param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, sign: float, decay: float, weight1: float, beta2: float,
    weight2: float, step_size: float, eps: float,
) -> dict[str, Any]:  # fmt: skip
    """Return the formula in float64."""
    g = sign * grad.double()
    m = exp_avg.double() + weight1 * (g - exp_avg.double())
    v = beta2 * exp_avg_sq.double() + weight2 * g.square()
    p = decay * param.double() - step_size * m / (v.sqrt() + eps)
    return {"new_param": p, "new_exp_avg": m, "new_exp_avg_sq": v}


SPEC = spec(
    "adamw",
    "a step of AdamW: a parameter and its two moments, in place",
    MATRIX,
    _ARRAYS,
    reference,
    function=adamw,
    constants=bounds_of_tiles,
    grid=grid_of_tiles,
    space=Space(_axes, (_SIZED, _IN_ONE_PIECE, _IN_FLIGHT, _FITS_REGISTERS)),
    default=lambda problem, target: _config(problem, "block", 1024, 8),
    generic=lambda problem: _config(problem, "persistent", 512, 1),
    given=_given,
    flops=lambda problem: 15 * problem["rows"] * problem["columns"],
    dependent=True,
)

SPECS = (SPEC,)
