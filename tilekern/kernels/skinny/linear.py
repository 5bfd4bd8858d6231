"""Linear layers of few rows, as in decoding: ``y = addend + act(x @ weight^T + bias) * (x @ up^T)``, rounded once.

The time is that of reading the weights. So the weights are the rows of the matrix units' products and the tokens their
columns, padded to ``tile_m`` (8, 16, 32 or 64), which wastes no bandwidth; and a block takes few of the weights' rows
(``tile_n``), so that all SMs read. Bias, activation (gelu by tanh, silu, both or none), the gate's factor ``x @ up^T``
and the addend belong to a problem or not. All sums are in float32. A gate that is ``rounded`` has its two products
rounded before the activation, as two launches would have them.

Bits: a block computes whole sums, ``tile_k`` terms a step, in the order of the inner dimension, and each token is a
column of its own. So a row of the result depends on its own row of ``x`` alone, not on the number of rows. Of the
config's axes these can change its bits:

- ``implementation``: whole sums, cuBLAS, or sums in parts (:mod:`tilekern.kernels.skinny.split`), which repeat too
- ``splits``, the number of parts; and ``tile_k``, which also says where a part ends
- ``tile_n`` below 64 or not, as these tiles have instructions of their own on sm_90 and sm_100

The others, ``tile_m`` among them, choose which block computes a sum, and when.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import Arrays, drawn
from tilekern.kernels.families.tables import flags_of, names_of, spec
from tilekern.kernels.matmul.space import is_tile, of_tiles, one_for_library, unit_of
from tilekern.kernels.skinny import split
from tilekern.kernels.skinny.tiles import (
    TOO_LARGE,
    TOO_SMALL,
    USUAL,
    WIDTHS,
    activated,
    config_of,
    count,
    fits_shared,
    has_tokens,
    is_exact,
    sums,
    tokens_of,
)
from tilekern.kernels.tiles import ConstBool, ConstInt, each_step, grid_of, load
from tilekern.spec import Array, Config, Constraint, Dimension, LibraryCall, Problem, Space, Value, cdiv
from tilekern.spec.targets import INTERPRETED, Target

FLAGS = ("gated", "rounded", "biased", "gelu_tanh", "silu", "accumulated")
DIMENSIONS = (
    Dimension("rows", "bucketed"),
    *(Dimension(name, "exact") for name in ("inner", "columns")),
    *flags_of(FLAGS),
    Dimension("dtype", "dtype"),
)


def _tile(
    item, x, weight, up, bias, addend, y, gated, rounded, biased, gelu_tanh, silu, accumulated, tile_m, tile_n, tile_k,
    latency,
):  # fmt: skip
    """Compute tile number ``item`` of the result: ``tile_m`` tokens of ``tile_n`` columns."""
    down, steps = ct.cdiv(y.shape[0], tile_m), ct.cdiv(x.shape[1], tile_k)
    i, j = item % down, item // down
    total, factor = sums(x, weight, up, i, j, 0, steps, gated, tile_m, tile_n, tile_k, latency)
    if ct.static_eval(biased):
        row = load(bias, (j,), (tile_n,), True, 0, False).astype(ct.float32)
        total = total + ct.reshape(row, (tile_n, 1))
    if ct.static_eval(rounded):
        total, factor = total.astype(y.dtype).astype(ct.float32), factor.astype(y.dtype).astype(ct.float32)
    z = activated(total, gelu_tanh, silu)
    if ct.static_eval(gated):
        z = z * factor
    z = z.transpose()
    if ct.static_eval(accumulated):
        z = z + load(addend, (i, j), (tile_m, tile_n), True, 0, False).astype(ct.float32)
    ct.store(y, (i, j), z.astype(y.dtype), allow_tma=False)


@ct.kernel
def skinny_linear(
    x, weight, up, bias, addend, y, gated: ConstBool, rounded: ConstBool, biased: ConstBool, gelu_tanh: ConstBool,
    silu: ConstBool, accumulated: ConstBool, tile_m: ConstInt, tile_n: ConstInt, tile_k: ConstInt, latency: ConstInt,
    persistent: ConstBool,
):  # fmt: skip
    """x [rows, inner], weight and up [columns, inner], bias [columns], addend and y [rows, columns]."""
    # Its launch overlaps the end of the kernel that writes x, and the next kernel's its own: in decoding each of many
    # small kernels would begin with idle memory.
    ct.grid_dependency_control_wait()
    ct.grid_dependency_control_launch_dependents()
    tiles = ct.cdiv(y.shape[0], tile_m) * ct.cdiv(y.shape[1], tile_n)
    arguments = (
        x, weight, up, bias, addend, y, gated, rounded, biased, gelu_tanh, silu, accumulated, tile_m, tile_n, tile_k,
        latency,
    )  # fmt: skip
    each_step(_tile, tiles, persistent, arguments)


_ARRAYS: Arrays = (
    Array("x", "dtype", ("rows", "inner")),
    Array("weight", "dtype", ("columns", "inner")),
    Array("up", "dtype", ("columns", "inner"), flag="gated"),
    Array("bias", "dtype", ("columns",), flag="biased"),
    Array("addend", "dtype", ("rows", "columns"), flag="accumulated"),
    Array("y", "dtype", ("rows", "columns"), "output"),
)


def sizes(rows: int, inner: int, columns: int, dtype: Any, on: Collection[str]) -> dict[str, Any]:
    """Return the values of the dimensions in their order, with the flags in ``on`` set."""
    return {
        "rows": rows, "inner": inner, "columns": columns, **{name: name in on for name in FLAGS}, "dtype": dtype
    }  # fmt: skip


def _by_cublas(problem: Problem) -> LibraryCall:
    def call(x: Any, weight: Any, up: Any, bias: Any, addend: Any) -> tuple[Any]:
        import torch

        z = torch.addmm(bias, x, weight.t()) if problem["biased"] else torch.mm(x, weight.t())
        if problem["gelu_tanh"]:
            z = torch.nn.functional.gelu(z, approximate="tanh")
        if problem["silu"]:
            z = torch.nn.functional.silu(z)
        if problem["gated"]:
            z = z * torch.mm(x, up.t())
        return (z + addend if problem["accumulated"] else z,)

    return LibraryCall(call, names_of(_ARRAYS))


def _by_parts(problem: Problem, splits: int) -> LibraryCall:
    flags = [problem[name] for name in split.FLAGS]
    otherwise = _by_cublas(problem).call

    def call(plan_for: Callable[..., Any], x: Any, weight: Any, up: Any, bias: Any, addend: Any) -> tuple[Any]:
        import torch

        (rows, inner), columns, device = x.shape, weight.shape[0], x.device
        of_parts = plan_for(split.PARTS, device, rows, inner, columns, splits, x.dtype)
        of_join = plan_for(split.JOIN, device, rows, columns, splits, *flags, x.dtype)
        if of_parts is None or of_join is None:
            return otherwise(x, weight, up, bias, addend)
        parts = torch.empty((splits, rows, columns), dtype=torch.float32, device=device)
        y = torch.empty((rows, columns), dtype=x.dtype, device=device)
        of_parts.launch(x.get_device(), x, weight, parts)
        of_join.launch(x.get_device(), parts, bias, addend, y)
        return (y,)

    return LibraryCall(call, names_of(_ARRAYS), composite=True)


def _library(problem: Problem, config: Config) -> LibraryCall | None:
    if is_tile(config):
        return None
    return _by_cublas(problem) if config["implementation"] == "cublas" else _by_parts(problem, config["splits"])


def _axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "implementation": ["tile", "cublas"],
        "schedule": ["block", "persistent"],
        "tile_m": sorted({tokens_of(problem["rows"], tile_n) for tile_n in WIDTHS}),
        "tile_n": list(WIDTHS),
        "tile_k": [128, 64, 256, 512],
        "occupancy": [2, 1, 4],
        "num_worker_warps": [0, 8],
        "latency": [0, 6],
    }


def _is_read_by_most(problem: Problem, config: Config, target: Target) -> bool:
    if config["tile_n"] == USUAL:
        return True
    found = count(problem, config)
    return found <= 4 * target.sm_count if config["tile_n"] < USUAL else found >= target.sm_count


def _loops(problem: Problem, config: Config, target: Target) -> bool:
    resident = target.sm_count * config["occupancy"]
    return config["schedule"] == "block" or count(problem, config) > resident or target == INTERPRETED


def _fills(problem: Problem, config: Config, target: Target) -> bool:
    blocks = cdiv(problem["columns"], USUAL) * config["splits"]
    return 2 * target.sm_count <= 3 * blocks <= 6 * target.sm_count


_TF32 = "float32 products run on a GPU's scalar units, since TF32 would round the inputs"
_SPLIT = Space(
    lambda problem: {"implementation": ["split"], "splits": [2, 4, 8, 16]},
    (
        Constraint(_TF32, is_exact),
        Constraint(
            "the two products of a gate have tiles enough", lambda problem, config, target: not problem["gated"]
        ),
        Constraint(
            "a part has 512 terms or more",
            lambda problem, config, target: bool(problem["inner"] >= 512 * config["splits"]),
        ),
        Constraint("the parts' tiles are about as many as the SMs, or up to twice as many", _fills),
    ),
)
SPACE = Space(
    _axes,
    (
        one_for_library(_axes),
        of_tiles(_TF32, is_exact),
        of_tiles(TOO_SMALL, has_tokens),
        of_tiles(TOO_LARGE, fits_shared),
        of_tiles(
            "as many as 512 terms are for a block that has an SM to itself",
            lambda problem, config, target: (
                config["tile_k"] < 512 or (config["tile_n"] == USUAL and config["occupancy"] == 1)
            ),
        ),
        of_tiles("narrow tiles are for SMs that wider ones leave idle, wide ones for more columns", _is_read_by_most),
        of_tiles("blocks loop if there are more tiles than stay resident", _loops),
        of_tiles(
            "eight warps are two groups of Hopper's four, with 64 of a tile's columns each",
            lambda problem, config, target: (
                not config["num_worker_warps"] or (unit_of(target) == "wgmma" and config["tile_n"] >= 128)
            ),
        ),
        of_tiles(
            "the latency hint gains stages on GPUs with tensor memory alone, for a block that has an SM to itself",
            lambda problem, config, target: (
                not config["latency"] or (unit_of(target) == "tcgen05" and config["occupancy"] == 1)
            ),
        ),
    ),
    beside=(_SPLIT,),
)


def default(problem: Problem, target: Target) -> Config:
    """Return cuBLAS for float32, else the widest of the narrow tiles with which three quarters of the SMs read."""
    if problem["dtype"] == "float32" and target != INTERPRETED:
        return Config({name: values[0] for name, values in _axes(problem).items()}).but(implementation="cublas")
    found = [config_of(problem["rows"], tile_n) for tile_n in WIDTHS if tile_n <= USUAL]
    found = [c if fits_shared(problem, c, target) else c.but(occupancy=1, tile_k=64) for c in found]
    return next((c for c in found if 4 * count(problem, c) >= 3 * target.sm_count), found[-1])


def generic(problem: Problem) -> Config:
    """Return a tile that any GPU holds, on any grid; eight warps share its loads of single elements."""
    return config_of(problem["rows"], USUAL, schedule="persistent", tile_k=32, occupancy=1, num_worker_warps=8)


def reference(
    x: Any, weight: Any, up: Any, bias: Any, addend: Any, *, gated: bool, rounded: bool, biased: bool, gelu_tanh: bool,
    silu: bool, accumulated: bool,
) -> dict[str, Any]:  # fmt: skip
    """Compute the formula in float64, where ``rounded`` changes nothing."""
    import torch

    z = x.double() @ weight.double().t()
    z = z + bias.double() if biased else z
    z = torch.nn.functional.gelu(z, approximate="tanh") if gelu_tanh else z
    z = torch.nn.functional.silu(z) if silu else z
    z = z * (x.double() @ up.double().t()) if gated else z
    return {"y": z + addend.double() if accumulated else z}


def _inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    """Draw weights that keep the variance of a row: an activation then gets values near 0."""
    found = drawn(_ARRAYS, problem, generator, device, about_one=False)
    return found | {name: found[name] * problem["inner"] ** -0.5 for name in ("weight", "up")}


SPEC = spec(
    "skinny_linear",
    "y = addend + act(x @ weight^T + bias) * (x @ up^T) for few rows, summed in float32",
    DIMENSIONS,
    _ARRAYS,
    reference,
    function=skinny_linear,
    library=_library,
    grid=lambda sizes, config, sm_count: grid_of(count(sizes, config), config, sm_count),
    space=SPACE,
    default=default,
    generic=generic,
    given=_inputs,
    flops=lambda problem: (4 if problem["gated"] else 2) * problem["rows"] * problem["inner"] * problem["columns"],
    dependent=True,
    streamed=True,
)

SPECS = (SPEC,)
