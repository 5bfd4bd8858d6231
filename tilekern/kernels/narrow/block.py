"""The end of a decoder's layer in one launch: attention's product with its residual, then the MLP with its norm.

``t = cast(residual + cast(x @ out_weight^T + out_bias))``, ``n = cast(norm(t))`` and
``y = cast(t + cast(h @ down^T + down_bias))``, where h is ``gelu(n @ up^T + up_bias)`` by tanh, or, if ``gated``,
``silu(cast(n @ gate^T)) * cast(n @ up^T + up_bias)``, rounded. The norm is RMSNorm, or with ``layer`` layer
normalisation. All casts are those of launches apart, so a result differs from theirs by the order of sums alone.

In a narrow model each of these products takes as long as its launch. A block takes ``tile_m`` rows; all that is between
x and y stays in it. The weights go through each block, ``tile_h`` numbers of the inner size at a time.

Weights and biases must be constants: those of attention's product are read before the kernel that runs right before has
ended, and that must not write them.

Bits: a row of the result depends on its own row of ``residual`` and ``x`` alone. ``tile_m``, ``tile_h`` and
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

FLAGS = ("layer", "gated", "biased", "out_biased")


def _inner(n, gate, up, up_bias, c, gated, biased, tile_h):
    """Return numbers of the MLP between its products, [tile_h, tile_m]."""
    tile_m, tile_w = n.shape
    nothing = ct.zeros((tile_h, tile_m), ct.float32)
    z = product(load(up, (c, 0), (tile_h, tile_w), True, 0, True), n, nothing)
    if ct.static_eval(biased):
        z = z + column(row(up_bias, c, tile_h))
    if ct.static_eval(gated):
        opened = product(load(gate, (c, 0), (tile_h, tile_w), True, 0, True), n, nothing)
        opened, z = opened.astype(n.dtype).astype(ct.float32), z.astype(n.dtype).astype(ct.float32)
        return (activated(opened, False, True) * z).astype(n.dtype)
    return activated(z, True, False).astype(n.dtype)


def _with(rows, sums, bias, biased):
    """Return rows with sums [columns, tile_m] added, which are rounded first."""
    if ct.static_eval(biased):
        sums = sums + column(bias)
    return added_up(rows, sums.astype(rows.dtype).transpose())


def _rows(
    i, residual, x, out_weight, eps, gate, up, up_bias, down, y, constants, layer, gated, biased, out_biased, width,
    tile_m, tile_w, tile_a, tile_h,
):  # fmt: skip
    """Compute a tile of rows; ``constants`` are what is the same for all."""
    out, out_bias, norm_weight, norm_bias, down_bias = constants
    # Loads without TMA leave a row to few threads, which add it up sooner.
    total, nothing = load(residual, (i, 0), (tile_m, tile_w), True, 0, False), ct.zeros((tile_w, tile_m), ct.float32)
    if ct.static_eval(out is None):
        sums = nothing
        for c in range(ct.cdiv(x.shape[1], tile_a)):
            of_step = load(out_weight, (0, c), (tile_w, tile_a), True, 0, True)
            sums = product(of_step, load(x, (i, c), (tile_m, tile_a), True, 0, True), sums)
    else:
        sums = product(out, load(x, (i, 0), (tile_m, tile_a), True, 0, True), nothing)
    total = _with(total, sums, out_bias, out_biased)
    n = normal(total, norm_weight, norm_bias, eps, width, layer)
    sums = nothing
    for c in range(ct.cdiv(up.shape[0], tile_h)):
        h = _inner(n, gate, up, up_bias, c, gated, biased, tile_h)
        sums = ct.mma(load(down, (0, c), (tile_w, tile_h), True, 0, True), h, sums)
    ct.store(y, (i, 0), _with(total, sums, down_bias, biased), allow_tma=False)


@ct.kernel
def narrow_block(
    residual, x, out_weight, out_bias, norm_weight, norm_bias, eps, gate, up, up_bias, down, down_bias, y,
    layer: ConstBool, gated: ConstBool, biased: ConstBool, out_biased: ConstBool, width: ConstInt, tile_m: ConstInt,
    tile_w: ConstInt, tile_a: ConstInt, tile_h: ConstInt, persistent: ConstBool,
):  # fmt: skip
    """residual and y [rows, width], x [rows, attended], out_weight [width, attended], gate and up [hidden, width], down
    [width, hidden], biases and the norm's weights of the size of the result.
    """
    # They are constants, so that they are on their way while the predecessor ends.
    constants = (
        None if ct.static_eval(persistent) else load(out_weight, (0, 0), (tile_w, tile_a), True, 0, True),
        row(out_bias, 0, tile_w) if ct.static_eval(out_biased) else None,
        row(norm_weight, 0, tile_w),
        row(norm_bias, 0, tile_w) if ct.static_eval(layer) else None,
        row(down_bias, 0, tile_w) if ct.static_eval(biased) else None,
    )
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    arguments = (
        residual, x, out_weight, eps, gate, up, up_bias, down, y, constants, layer, gated, biased, out_biased, width,
        tile_m, tile_w, tile_a, tile_h,
    )  # fmt: skip
    if ct.static_eval(persistent):
        for i in range(ct.bid(0), ct.cdiv(y.shape[0], tile_m), ct.num_blocks(0)):
            _rows(i, *arguments)
    else:
        _rows(ct.bid(0), *arguments)


_WIDE = ("rows", "width")
_ARRAYS: Arrays = (
    Array("residual", "dtype", _WIDE),
    Array("x", "dtype", ("rows", "attended")),
    Array("out_weight", "dtype", ("width", "attended"), constant=True),
    Array("out_bias", "dtype", ("width",), flag="out_biased", constant=True),
    Array("norm_weight", "dtype", ("width",), constant=True),
    Array("norm_bias", "dtype", ("width",), flag="layer", constant=True),
    EPS,
    Array("gate", "dtype", ("hidden", "width"), flag="gated", constant=True),
    Array("up", "dtype", ("hidden", "width"), constant=True),
    Array("up_bias", "dtype", ("hidden",), flag="biased", constant=True),
    Array("down", "dtype", ("width", "hidden"), constant=True),
    Array("down_bias", "dtype", ("width",), flag="biased", constant=True),
    Array("y", "dtype", _WIDE, "output"),
)


def _count(problem: Problem, config: Config) -> int:
    """Count the tiles of rows."""
    return cdiv(problem["rows"], config["tile_m"])


def _sides(problem: Problem, config: Config) -> dict[str, int]:
    """Return the sides of tiles that hold rows whole; the generic config takes what attention leaves by steps."""
    whole = power_of_two(problem["attended"])
    tile_a = whole if config["schedule"] == "block" else min(whole, config["tile_h"])
    return {"tile_w": power_of_two(problem["width"]), "tile_a": tile_a}


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["block", "persistent"],
        "tile_m": [16, 8, 32, 64],
        "tile_h": [128, 64, 32],
        "occupancy": [1, 2],
        "num_worker_warps": [8, 0],
    }


def _config(tile_m: int, tile_h: int, **changes: Value) -> Config:
    known: dict[str, Value] = {
        "schedule": "block", "tile_m": tile_m, "tile_h": tile_h, "occupancy": 1, "num_worker_warps": 8,
    }  # fmt: skip
    return Config(known | changes)


def generic(problem: Problem) -> Config:
    """Return steps that any GPU holds, on any grid; eight warps share their loads of single elements."""
    return _config(16, 32, schedule="persistent")


def _fits_registers(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether a thread holds at most 64 sums of its rows, and a warp whole instructions of the inner numbers."""
    tile_w, inner = power_of_two(problem["width"]), config["tile_m"] * config["tile_h"]
    return bool(
        config["tile_m"] * tile_w <= 64 * threads(config) and 4 * threads(config) <= inner <= 64 * threads(config)
    )


def _fits_shared(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether shared memory holds attention's weight, then those of a step, and operands of rows beside them."""
    (tile_w, tile_a), tile_m, tile_h = _sides(problem, config).values(), config["tile_m"], config["tile_h"]
    weights = max(tile_w * tile_a, tile_w * tile_h * (3 if problem["gated"] else 2))
    numbers = weights + tile_m * (tile_a + 2 * tile_w + tile_h)
    return bool(numbers * ITEM_BYTES[problem["dtype"]] * config["occupancy"] <= target.shared_bytes)


def _default(problem: Problem, target: Target) -> Config:
    """Return the smallest tile with which each SM has at most one, or the largest, and the longest steps."""
    found = [_config(m, h) for m in (16, 32, 64) for h in (128, 64)]
    allowed = [config for config in found if SPACE.violated(problem, config, target) is None]
    if not allowed:
        return generic(problem)
    fitting = (config for config in allowed if _count(problem, config) <= target.sm_count)
    return next(fitting, next(c for c in allowed if c["tile_m"] == allowed[-1]["tile_m"]))


SPACE = Space(
    _axes,
    constraints(
        generic,
        ("steps of 32 leave half of an instruction empty", lambda problem, config, target: config["tile_h"] >= 64),
        ("a thread holds 4 to 64 sums of each product", _fits_registers),
        ("shared memory exceeded", _fits_shared),
        (
            "a second block on an SM is for more tiles than there are SMs",
            lambda problem, config, target: config["occupancy"] == 1 or _count(problem, config) > target.sm_count,
        ),
    ),
)


def _reference(
    residual: Any, x: Any, out_weight: Any, out_bias: Any, norm_weight: Any, norm_bias: Any, eps: float, gate: Any,
    up: Any, up_bias: Any, down: Any, down_bias: Any, *, layer: bool, gated: bool, biased: bool, out_biased: bool,
) -> dict[str, Any]:  # fmt: skip
    """Compute the formula in float64, with the casts of the sum, the norm and the products."""

    def product(rows: Any, weight: Any, bias: Any, *on: str) -> Any:
        flags = {name: name in on for name in linear.FLAGS}
        return linear.reference(rows, weight, None, bias, None, **flags)["y"]

    def rounded(z: Any) -> Any:
        return z.to(x.dtype)

    of_out, of_mlp = (["biased"] if is_on else [] for is_on in (out_biased, biased))
    total = rounded(residual.double() + rounded(product(x, out_weight, out_bias, *of_out)).double())
    n = normal_reference(total, norm_weight, norm_bias, eps, layer=layer)
    if gated:
        opened = rounded(product(n, gate, None)).double()
        h = opened * opened.sigmoid() * rounded(product(n, up, up_bias, *of_mlp)).double()
    else:
        h = product(n, up, up_bias, *of_mlp, "gelu_tanh")
    return {"y": total.double() + rounded(product(rounded(h), down, down_bias, *of_mlp)).double()}


SPEC = spec(
    "narrow_block",
    "y = t + MLP(norm(t)), where t is residual + x @ out_weight^T, for models whose rows fit into a tile",
    (
        Dimension("rows", "bucketed"),
        *(Dimension(name, "exact") for name in ("attended", "hidden", "width")),
        *flags_of(FLAGS),
        Dimension("dtype", "dtype"),
    ),
    _ARRAYS,
    _reference,
    function=narrow_block,
    grid=lambda sizes, config, sm_count: grid_of(_count(sizes, config), config, sm_count),
    constants=_sides,
    space=SPACE,
    default=_default,
    generic=generic,
    given=lambda problem, generator, device: inputs_of(_ARRAYS, problem, generator, device),
    flops=lambda problem: (
        2
        * problem["rows"]
        * problem["width"]
        * (problem["attended"] + (3 if problem["gated"] else 2) * problem["hidden"])
    ),
    roundings=2,
    dependent=True,
    inputs_in_l2=True,
)

SPECS = (SPEC,)
