"""All between the attentions of two layers in one launch: a product, a norm, an MLP, a norm, a product.

``t = cast(residual + cast(x @ out_weight^T + out_bias))``, ``n = cast(norm(t))`` and
``y = cast(t + cast(h @ down^T + down_bias))``, where h is ``gelu(n @ up^T + up_bias)`` by tanh, or, if ``gated``,
``silu(cast(n @ gate^T)) * cast(n @ up^T + up_bias)``, rounded. The norm is RMSNorm, or with ``layer`` layer
normalisation. ``normed = cast(norm(y))`` is what the final norm leaves, if ``ended``, and
``following = cast(normed @ next_weight^T + next_bias)`` are the next layer's q, k and v, if ``followed``. All casts are
those of launches apart, so a result differs from theirs by the order of sums alone.

In a narrow model each of these products takes as long as its launch. A block takes ``tile_m`` rows; all that is between
x and y stays in it. The weights go through each block, ``tile_h`` numbers of the inner size or columns at a time.

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

FLAGS = ("layer", "gated", "biased", "out_biased", "followed", "next_biased", "ended")


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


def _behind_attention(i, residual, x, out_weight, constants, out_biased, tile_m, tile_w, tile_a):
    """Return the residual stream with attention's product, which is taken by steps if no weight is held."""
    out, out_bias = constants[:2]
    # Loads without TMA leave a row to few threads, which add it up sooner.
    rows, sums = load(residual, (i, 0), (tile_m, tile_w), True, 0, False), ct.zeros((tile_w, tile_m), ct.float32)
    if ct.static_eval(out is None):
        for c in range(ct.cdiv(x.shape[1], tile_a)):
            of_step = load(out_weight, (0, c), (tile_w, tile_a), True, 0, True)
            sums = product(of_step, load(x, (i, c), (tile_m, tile_a), True, 0, True), sums)
    else:
        sums = product(out, load(x, (i, 0), (tile_m, tile_a), True, 0, True), sums)
    return _with(rows, sums, out_bias, out_biased)


def _follow(i, n, next_weight, next_bias, following, next_biased, tile_h):
    """Store the product of rows with the next layer's weight."""
    tile_m, tile_w = n.shape
    for c in range(ct.cdiv(next_weight.shape[0], tile_h)):
        of_step = load(next_weight, (c, 0), (tile_h, tile_w), True, 0, True)
        z = product(of_step, n, ct.zeros((tile_h, tile_m), ct.float32))
        if ct.static_eval(next_biased):
            z = z + column(row(next_bias, c, tile_h))
        ct.store(following, (i, c), z.astype(following.dtype).transpose(), allow_tma=False)


def _rows(
    i, residual, x, out_weight, eps, gate, up, up_bias, down, next_weight, next_bias, y, normed, following, constants,
    layer, gated, biased, out_biased, followed, next_biased, ended, width, tile_m, tile_w, tile_a, tile_h,
):  # fmt: skip
    """Compute a tile of rows; ``constants`` are what is the same for all."""
    norm_weight, norm_bias, down_bias, next_norm_weight, next_norm_bias = constants[2:]
    total = _behind_attention(i, residual, x, out_weight, constants, out_biased, tile_m, tile_w, tile_a)
    n, sums = normal(total, norm_weight, norm_bias, eps, width, layer), ct.zeros((tile_w, tile_m), ct.float32)
    for c in range(ct.cdiv(up.shape[0], tile_h)):
        h = _inner(n, gate, up, up_bias, c, gated, biased, tile_h)
        sums = ct.mma(load(down, (0, c), (tile_w, tile_h), True, 0, True), h, sums)
    total = _with(total, sums, down_bias, biased)
    ct.store(y, (i, 0), total, allow_tma=False)
    n = normal(total, next_norm_weight, next_norm_bias, eps, width, layer)
    if ct.static_eval(ended):
        ct.store(normed, (i, 0), n, allow_tma=False)
    if ct.static_eval(followed):
        _follow(i, n, next_weight, next_bias, following, next_biased, tile_h)


@ct.kernel
def narrow_block(
    residual, x, out_weight, out_bias, norm_weight, norm_bias, eps, gate, up, up_bias, down, down_bias,
    next_norm_weight, next_norm_bias, next_weight, next_bias, y, normed, following, layer: ConstBool, gated: ConstBool,
    biased: ConstBool, out_biased: ConstBool, followed: ConstBool, next_biased: ConstBool, ended: ConstBool,
    width: ConstInt, tile_m: ConstInt, tile_w: ConstInt, tile_a: ConstInt, tile_h: ConstInt, persistent: ConstBool,
):  # fmt: skip
    """residual, y and normed [rows, width], x [rows, attended], out_weight [width, attended], gate and up [hidden,
    width], down [width, hidden], next_weight [columns, width], following [rows, columns], biases and the norms' weights
    of the size of the result.
    """
    # They are constants, so that they are on their way while the predecessor ends.
    constants = (
        None if ct.static_eval(persistent) else load(out_weight, (0, 0), (tile_w, tile_a), True, 0, True),
        row(out_bias, 0, tile_w) if ct.static_eval(out_biased) else None,
        row(norm_weight, 0, tile_w),
        row(norm_bias, 0, tile_w) if ct.static_eval(layer) else None,
        row(down_bias, 0, tile_w) if ct.static_eval(biased) else None,
        row(next_norm_weight, 0, tile_w),
        row(next_norm_bias, 0, tile_w) if ct.static_eval(layer) else None,
    )
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    arguments = (
        residual, x, out_weight, eps, gate, up, up_bias, down, next_weight, next_bias, y, normed, following, constants,
        layer, gated, biased, out_biased, followed, next_biased, ended, width, tile_m, tile_w, tile_a, tile_h,
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
    Array("next_norm_weight", "dtype", ("width",), constant=True),
    Array("next_norm_bias", "dtype", ("width",), flag="layer", constant=True),
    Array("next_weight", "dtype", ("columns", "width"), flag="followed", constant=True),
    Array("next_bias", "dtype", ("columns",), flag="next_biased", constant=True),
    Array("y", "dtype", _WIDE, "output"),
    Array("normed", "dtype", _WIDE, "output", flag="ended"),
    Array("following", "dtype", ("rows", "columns"), "output", flag="followed"),
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
        "tile_h": [128, 64, 16],
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
    return _config(16, 16, schedule="persistent")


def _fits_registers(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether a thread holds at most 64 sums of its rows, and a warp whole instructions of the inner numbers."""
    tile_w, inner = power_of_two(problem["width"]), config["tile_m"] * config["tile_h"]
    return bool(
        config["tile_m"] * tile_w <= 64 * threads(config) and 4 * threads(config) <= inner <= 64 * threads(config)
    )


def _of_step(problem: Problem, config: Config) -> int:
    """Return the bytes of a step's weights."""
    weights = 3 if problem["gated"] else 2
    return int(weights * power_of_two(problem["width"]) * config["tile_h"] * ITEM_BYTES[problem["dtype"]])


def _fits_shared(problem: Problem, config: Config, target: Target) -> bool:
    """Tell whether shared memory holds attention's weight, then those of a step, and operands of rows beside them."""
    (tile_w, tile_a), tile_m, item = _sides(problem, config).values(), config["tile_m"], ITEM_BYTES[problem["dtype"]]
    of_rows = tile_m * (tile_a + 2 * tile_w + config["tile_h"])
    most = max(tile_w * tile_a * item, _of_step(problem, config)) + of_rows * item
    return bool(most * config["occupancy"] <= target.shared_bytes)


def _default(problem: Problem, target: Target) -> Config:
    """Return the smallest tile with which each SM has at most one, or the largest; steps of which two are under way."""
    found = [_config(m, h) for m in (16, 32, 64) for h in (128, 64)]
    allowed = [config for config in found if SPACE.violated(problem, config, target) is None]
    flowing = [config for config in allowed if 2 * _of_step(problem, config) <= target.shared_bytes] or allowed
    if not flowing:
        return generic(problem)
    fitting = (config for config in flowing if _count(problem, config) <= target.sm_count)
    return next(fitting, next(c for c in flowing if c["tile_m"] == flowing[-1]["tile_m"]))


SPACE = Space(
    _axes,
    constraints(
        generic,
        ("steps of 16 leave most of an instruction empty", lambda problem, config, target: config["tile_h"] >= 64),
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
    up: Any, up_bias: Any, down: Any, down_bias: Any, next_norm_weight: Any, next_norm_bias: Any, next_weight: Any,
    next_bias: Any, *, layer: bool, gated: bool, biased: bool, out_biased: bool, followed: bool, next_biased: bool,
    ended: bool,
) -> dict[str, Any]:  # fmt: skip
    """Compute the formula in float64, with the casts of the sum, the norm and the products."""

    def product(rows: Any, weight: Any, bias: Any, *on: str) -> Any:
        flags = {name: name in on for name in linear.FLAGS}
        return linear.reference(rows, weight, None, bias, None, **flags)["y"]

    def rounded(z: Any) -> Any:
        return z.to(x.dtype)

    of_out, of_mlp, of_next = (["biased"] if is_on else [] for is_on in (out_biased, biased, next_biased))
    total = rounded(residual.double() + rounded(product(x, out_weight, out_bias, *of_out)).double())
    n = normal_reference(total, norm_weight, norm_bias, eps, layer=layer)
    if gated:
        opened = rounded(product(n, gate, None)).double()
        h = opened * opened.sigmoid() * rounded(product(n, up, up_bias, *of_mlp)).double()
    else:
        h = product(n, up, up_bias, *of_mlp, "gelu_tanh")
    found = {"y": total.double() + rounded(product(rounded(h), down, down_bias, *of_mlp)).double()}
    n = normal_reference(rounded(found["y"]), next_norm_weight, next_norm_bias, eps, layer=layer)
    if ended:
        found["normed"] = n
    if followed:
        found["following"] = product(n, next_weight, next_bias, *of_next)
    return found


def _flops(problem: Problem) -> int:
    inner = (3 if problem["gated"] else 2) * problem["hidden"]
    across = problem["attended"] + inner + (problem["columns"] if problem["followed"] else 0)
    return int(2 * problem["rows"] * problem["width"] * across)


SPEC = spec(
    "narrow_block",
    "y = t + MLP(norm(t)), where t is residual + x @ out_weight^T, then a norm and its product, for narrow models",
    (
        Dimension("rows", "bucketed"),
        *(Dimension(name, "exact") for name in ("attended", "hidden", "width", "columns")),
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
    flops=_flops,
    roundings=2,
    dependent=True,
    inputs_in_l2=True,
)

SPECS = (SPEC,)
