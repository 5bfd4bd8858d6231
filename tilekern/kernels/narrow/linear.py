"""Linear layers of narrow models with the norm before them: a block has its rows whole.

``total = cast(residual + x)``, ``n = cast(norm(total))`` and ``y = act(n @ weight^T + bias)``, where act is gelu by
tanh or nothing. The norm is RMSNorm, or with ``layer`` layer normalisation. Without ``added`` there is no residual, and
``total`` is x. All casts are those of launches apart, so a result differs from theirs by the order of sums alone.

In a narrow model a norm takes as long as its launch. So each block, which has ``tile_m`` rows and ``tile_n`` columns,
computes the norm of its rows by itself; the blocks of the first columns also write ``total``.

Weights and biases must be constants: they are read before the kernel that runs right before has ended, and that must
not write them.

Bits: a row of the result depends on its own row of ``residual`` and ``x`` alone. ``tile_m``, ``tile_n`` and
``num_worker_warps`` can change them.
"""

from __future__ import annotations

from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays
from tilekern.kernels.families.tables import flags_of, spec
from tilekern.kernels.narrow.tiles import (
    added_up,
    column,
    constraints,
    inputs_of,
    normal,
    normal_reference,
    product,
    row,
    threads,
)
from tilekern.kernels.rms_norm import EPS
from tilekern.kernels.skinny import linear
from tilekern.kernels.skinny.tiles import activated
from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of, load, power_of_two
from tilekern.spec import ITEM_BYTES, Array, Config, Dimension, Problem, Space, Value, cdiv
from tilekern.spec.targets import Target

FLAGS = ("layer", "added", "biased", "gelu_tanh")


def _held(weight, bias, norm_weight, norm_bias, j, biased, layer, tile_n, tile_w):
    """Return what is the same for all rows of a tile's columns, which need not be there yet."""
    return (
        load(weight, (j, 0), (tile_n, tile_w), True, 0, True),
        row(bias, j, tile_n) if ct.static_eval(biased) else None,
        row(norm_weight, 0, tile_w),
        row(norm_bias, 0, tile_w) if ct.static_eval(layer) else None,
    )


def _tile(i, j, held, residual, x, eps, total, y, layer, added, biased, gelu_tanh, width, tile_m, tile_n, tile_w):
    """Compute a tile of the result; store the sums of its rows if its columns are the first."""
    rows = load(x, (i, 0), (tile_m, tile_w), True, 0, False)
    if ct.static_eval(added):
        rows = added_up(load(residual, (i, 0), (tile_m, tile_w), True, 0, False), rows)
        if j == 0:
            ct.store(total, (i, 0), rows, allow_tma=False)
    n = normal(rows, held[2], held[3], eps, width, layer)
    z = product(held[0], n, ct.zeros((tile_n, tile_m), ct.float32))
    if ct.static_eval(biased):
        z = z + column(held[1])
    ct.store(y, (i, j), activated(z, gelu_tanh, False).astype(y.dtype).transpose(), allow_tma=False)


@ct.kernel
def narrow_linear(
    residual, x, norm_weight, norm_bias, eps, weight, bias, total, y, layer: ConstBool, added: ConstBool,
    biased: ConstBool, gelu_tanh: ConstBool, width: ConstInt, tile_m: ConstInt, tile_n: ConstInt, tile_w: ConstInt,
    persistent: ConstBool,
):  # fmt: skip
    """residual, x and total [rows, width], weights of the norm [width], weight [columns, width], bias [columns], y
    [rows, columns].
    """
    down = ct.cdiv(y.shape[0], tile_m)
    if ct.static_eval(persistent):
        ct.grid_dependency_control_wait()
        ct.grid_dependency_control_launch_dependents()
        for item in range(ct.bid(0), down * ct.cdiv(y.shape[1], tile_n), ct.num_blocks(0)):
            held = _held(weight, bias, norm_weight, norm_bias, item // down, biased, layer, tile_n, tile_w)
            _tile(
                item % down, item // down, held, residual, x, eps, total, y, layer, added, biased, gelu_tanh, width,
                tile_m, tile_n, tile_w,
            )  # fmt: skip
    else:
        i, j = ct.bid(0) % down, ct.bid(0) // down
        # They are constants, so that they are on their way while the predecessor ends.
        held = _held(weight, bias, norm_weight, norm_bias, j, biased, layer, tile_n, tile_w)
        ct.grid_dependency_control_wait()
        ct.grid_dependency_control_launch_dependents()
        _tile(
            i, j, held, residual, x, eps, total, y, layer, added, biased, gelu_tanh, width, tile_m, tile_n, tile_w
        )  # fmt: skip


_WIDE = ("rows", "width")
_ARRAYS: Arrays = (
    Array("residual", "dtype", _WIDE, flag="added"),
    Array("x", "dtype", _WIDE),
    Array("norm_weight", "dtype", ("width",), constant=True),
    Array("norm_bias", "dtype", ("width",), flag="layer", constant=True),
    EPS,
    Array("weight", "dtype", ("columns", "width"), constant=True),
    Array("bias", "dtype", ("columns",), flag="biased", constant=True),
    Array("total", "dtype", _WIDE, "output", flag="added"),
    Array("y", "dtype", ("rows", "columns"), "output"),
)


def _count(problem: Problem, config: Config) -> int:
    """Count the tiles of the result."""
    return cdiv(problem["rows"], config["tile_m"]) * cdiv(problem["columns"], config["tile_n"])


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["block", "persistent"],
        "tile_m": [16, 32, 64, 128],
        "tile_n": [64, 128, 32],
        "occupancy": [2, 1],
        "num_worker_warps": [0, 8],
    }


def _config(tile_m: int, tile_n: int, num_worker_warps: int, **changes: Value) -> Config:
    known: dict[str, Value] = {
        "schedule": "block", "tile_m": tile_m, "tile_n": tile_n, "occupancy": 1 if num_worker_warps else 2,
        "num_worker_warps": num_worker_warps,
    }  # fmt: skip
    return Config(known | changes)


def generic(problem: Problem) -> Config:
    """Return a small tile that any GPU holds, on any grid; eight warps share its loads of single elements."""
    return _config(16, 32, 8, schedule="persistent")


def _fits_registers(problem: Problem, config: Config, target: Target) -> bool:
    rows, sums = (config["tile_m"] * across for across in (power_of_two(problem["width"]), config["tile_n"]))
    return bool(rows <= 128 * threads(config) and sums <= 64 * threads(config))


def _fits_shared(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether shared memory holds both operands and the result, and an eighth for what the compiler adds."""
    tile_m, tile_n, tile_w = config["tile_m"], config["tile_n"], power_of_two(problem["width"])
    numbers = (tile_m + tile_n) * tile_w + tile_m * tile_n
    return bool(8 * numbers * ITEM_BYTES[problem["dtype"]] * config["occupancy"] <= 7 * target.shared_bytes)


def _default(problem: Problem, target: Target) -> Config:
    """Return the smallest tiles with which each SM has one, or two, at once, or the largest."""
    found = [_config(m, n, w) for m, n in ((16, 64), (32, 64), (64, 64), (64, 128), (128, 128)) for w in (0, 8)]
    allowed = [config for config in found if SPACE.violated(problem, config, target) is None]
    fitting = (c for c in allowed if _count(problem, c) <= target.sm_count * c["occupancy"])
    return next(fitting, allowed[-1] if allowed else generic(problem))


SPACE = Space(
    _axes,
    constraints(
        generic,
        ("32 columns leave half of an instruction empty", lambda problem, config, target: config["tile_n"] >= 64),
        ("a thread holds 128 numbers of rows, and 64 sums", _fits_registers),
        ("shared memory exceeded", _fits_shared),
        (
            "two blocks of four warps share an SM, or one of eight has it",
            lambda problem, config, target: config["occupancy"] == (1 if config["num_worker_warps"] else 2),
        ),
    ),
)


def _reference(
    residual: Any, x: Any, norm_weight: Any, norm_bias: Any, eps: float, weight: Any, bias: Any, *, layer: bool,
    added: bool, biased: bool, gelu_tanh: bool,
) -> dict[str, Any]:  # fmt: skip
    """Compute the formula in float64, with the casts of the sum and of the norm."""
    wide = residual.double() + x.double() if added else x.double()
    n = normal_reference(wide.to(x.dtype), norm_weight, norm_bias, eps, layer=layer)
    found = linear.reference(
        n, weight, None, bias, None, gated=False, rounded=False, biased=biased, gelu_tanh=gelu_tanh, silu=False,
        accumulated=False,
    )  # fmt: skip
    return found | ({"total": wide} if added else {})


SPEC = spec(
    "narrow_linear",
    "y = act(norm(residual + x) @ weight^T + bias), for models whose rows fit into a tile",
    (
        Dimension("rows", "bucketed"),
        *(Dimension(name, "exact") for name in ("width", "columns")),
        *flags_of(FLAGS),
        Dimension("dtype", "dtype"),
    ),
    _ARRAYS,
    _reference,
    function=narrow_linear,
    constants=lambda problem, config: {"tile_w": power_of_two(problem["width"])},
    grid=lambda sizes, config, sm_count: grid_of(_count(sizes, config), config, sm_count),
    space=SPACE,
    default=_default,
    generic=generic,
    given=lambda problem, generator, device: inputs_of(_ARRAYS, problem, generator, device),
    flops=lambda problem: 2 * problem["rows"] * problem["width"] * problem["columns"],
    dependent=True,
    inputs_in_l2=True,
)

SPECS = (SPEC,)
