"""Quantise a matrix to int8 with a scale for each row, and back: ``x ~ scale * y``.

``quantize_rows`` is symmetric: ``scale`` is the row's largest magnitude over 127, and ``y`` is ``x / scale`` rounded to
nearest even, from -127 to 127, both in float32. So a weight [out, in] has a scale for each of its output channels.
Three kinds of rows have other scales:

- zeros: 1, with zeros
- so small that the scale is 0 in float32: 1, with zeros
- with NaN or an infinity: NaN, with zeros, so that all products with such a row are NaN

``dequantize_rows`` is ``y = scale * x``, rounded once to a dtype. Rows of all matrices may be any distance apart, so
that a part of a larger matrix is read or written.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct

from tilekern.kernels.families.arrays import ROWS, Arrays
from tilekern.kernels.families.tables import spec
from tilekern.kernels.tiles import ConstBool, ConstInt, each_step, grid_of, grid_of_tiles, load, power_of_two
from tilekern.spec import Array, Config, Dimension, Problem, Space, Value

_MOST = 127
# Added to a float32 below 2^22 and taken away again, it leaves the nearest whole number, the even one of two.
_ROUNDING = 1.5 * 2**23
# A narrower tile's loop is unrolled so far that it takes the compiler 10 s.
_WIDTHS = (2048, 1024, 4096)
# The int8 numbers in an access of 16 bytes.
_VECTOR = 16


def _quantized(n, x, y, scale, tile_n):
    # As in lay_out: the record of a bucket serves any size, and the compiler accesses memory by vectors only where the
    # code itself cuts rows to whole ones.
    columns = x.shape[1]
    if columns % _VECTOR == 0:
        whole = columns // _VECTOR * _VECTOR
        _quantized_row(n, x.slice(1, 0, whole), y.slice(1, 0, whole), scale, tile_n)
    else:
        _quantized_row(n, x, y, scale, tile_n)


def _quantized_row(n, x, y, scale, tile_n):
    steps = ct.cdiv(x.shape[1], tile_n)
    # Magnitudes are in the order of their bits, and those of NaN are the largest.
    largest = ct.zeros((1, 1), ct.int32)
    for step in range(steps):
        bits = ct.bitcast(load(x, (n, step), (1, tile_n), True, 0, False).astype(ct.float32), ct.int32)
        largest = ct.maximum(largest, ct.max(bits & 0x7FFFFFFF, 1, keepdims=True))
    peak = ct.bitcast(largest, ct.float32)
    is_finite, step_size = peak < math.inf, peak / float(_MOST)
    factor = ct.where(step_size > 0, step_size, 1.0)
    ct.store(scale, (n,), ct.reshape(ct.where(is_finite, factor, math.nan), (1,)), allow_tma=False)
    for step in range(steps):
        tile = load(x, (n, step), (1, tile_n), True, 0, False).astype(ct.float32)
        whole = (ct.where(is_finite, tile / factor, 0.0) + _ROUNDING) - _ROUNDING
        # Of a scale that is not a normal number, 127 steps may be less than the largest magnitude.
        whole = ct.minimum(ct.maximum(whole, -float(_MOST)), float(_MOST))
        ct.store(y, (n, step), whole.astype(ct.int8), allow_tma=False)


@ct.kernel
def quantize_rows(x, y, scale, tile_n: ConstInt, persistent: ConstBool):
    """A row a block, or resident blocks that loop; x and y [rows, columns], scale [rows]."""
    each_step(_quantized, x.shape[0], persistent, (x, y, scale, tile_n))


def _dequantized(n, x, scale, y, tile_m, tile_n):
    columns = x.shape[1]
    across = ct.cdiv(columns, tile_n)
    place = (n // across, n % across)
    if columns % _VECTOR == 0:
        whole = columns // _VECTOR * _VECTOR
        _dequantized_tile(place, x.slice(1, 0, whole), scale, y.slice(1, 0, whole), tile_m, tile_n)
    else:
        _dequantized_tile(place, x, scale, y, tile_m, tile_n)


def _dequantized_tile(place, x, scale, y, tile_m, tile_n):
    factor = ct.reshape(load(scale, (place[0],), (tile_m,), True, 0, False), (tile_m, 1))
    tile = load(x, place, (tile_m, tile_n), True, 0, False).astype(ct.float32) * factor
    ct.store(y, place, tile.astype(y.dtype), allow_tma=False)


@ct.kernel
def dequantize_rows(x, scale, y, tile_m: ConstInt, tile_n: ConstInt, persistent: ConstBool):
    """A tile a block, or resident blocks that loop; x and y [rows, columns], scale [rows]."""
    steps = ct.cdiv(x.shape[0], tile_m) * ct.cdiv(x.shape[1], tile_n)
    each_step(_dequantized, steps, persistent, (x, scale, y, tile_m, tile_n))


def _quantize_axes(problem: Problem) -> dict[str, list[Value]]:
    return {
        "schedule": ["block", "persistent"],
        "tile_n": list(_WIDTHS),
        "occupancy": [4, 8],
        "num_worker_warps": [0],
    }


def _quantize_generic(problem: Problem) -> Config:
    """Return a config whose loads of single elements eight warps share; four hold too many of them, and spill."""
    return Config(schedule="persistent", tile_n=1024, occupancy=1, num_worker_warps=8)


def _quantize_reference(x: Any) -> dict[str, Any]:
    """Compute the formula in float32, where a quotient next to a half may round to another number than in float64."""
    import torch

    numbers = x.float()
    peak = numbers.abs().amax(1, keepdim=True)
    factor = torch.where(peak / _MOST > 0, peak / _MOST, torch.ones_like(peak))
    y = torch.where(peak.isfinite(), numbers / factor, torch.zeros_like(numbers)).round().clamp(-_MOST, _MOST)
    return {"y": y.double(), "scale": torch.where(peak.isfinite(), factor, math.nan).double()[:, 0]}


_MATRIX = Dimension("rows", "bucketed"), Dimension("columns", "bucketed")
QUANTIZE = spec(
    "quantize_rows",
    "y = round(x / scale) in int8, with scale = absmax / 127 of each row",
    (*_MATRIX, Dimension("dtype", "dtype")),
    (Array("x", "dtype", ROWS), Array("y", "int8", ROWS, "output"), Array("scale", "float32", ("rows",), "output")),
    _quantize_reference,
    function=quantize_rows,
    grid=lambda sizes, config, sm_count: grid_of(sizes["rows"], config, sm_count),
    space=Space(_quantize_axes),
    default=lambda problem, target: Config(schedule="block", tile_n=2048, occupancy=4, num_worker_warps=0),
    generic=_quantize_generic,
    flops=lambda problem: 4 * problem["rows"] * problem["columns"],
)


_DEQUANTIZED: Arrays = (
    Array("x", "int8", ROWS), Array("scale", "float32", ("rows",)), Array("y", "dtype", ROWS, "output"),
)  # fmt: skip


def _dequantize_axes(problem: Problem) -> dict[str, list[Value]]:
    widest = power_of_two(problem["columns"])
    return {
        "schedule": ["persistent", "block"],
        "tile_m": [4, 1],
        "tile_n": list(dict.fromkeys(min(width, widest) for width in (1024, 512, 2048))),
        "occupancy": [4, 2],
        "num_worker_warps": [0],
    }


def _dequantize_config(problem: Problem, schedule: str) -> Config:
    tile_n = min(1024, power_of_two(problem["columns"]))
    return Config(schedule=schedule, tile_m=4, tile_n=tile_n, occupancy=4, num_worker_warps=0)


# The standard deviation of such numbers in an ordinary row, about.
SPREAD = 40


def int8_numbers(shape: tuple[int, ...], generator: Any, device: str) -> Any:
    """Draw the numbers of quantised rows."""
    import torch

    numbers = (SPREAD * torch.randn(shape, generator=generator, device=device)).nan_to_num().round()
    return numbers.clamp(-_MOST, _MOST).to(torch.int8)


def _int8_inputs(problem: Problem, generator: Any, device: str) -> dict[str, Any]:
    return {"x": int8_numbers((problem["rows"], problem["columns"]), generator, device)}


DEQUANTIZE = spec(
    "dequantize_rows",
    "y = scale * x of int8 rows, rounded to a dtype",
    (*_MATRIX, Dimension("dtype", "dtype")),
    _DEQUANTIZED,
    lambda x, scale: {"y": x.double() * scale.double()[:, None]},
    function=dequantize_rows,
    grid=grid_of_tiles,
    space=Space(_dequantize_axes),
    default=lambda problem, target: _dequantize_config(problem, "block"),
    generic=lambda problem: _dequantize_config(problem, "persistent"),
    given=_int8_inputs,
    flops=lambda problem: problem["rows"] * problem["columns"],
)

SPECS = (QUANTIZE, DEQUANTIZE)
