"""The functions of ``ct`` that reduce tiles and scan them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch

from tilekern.interpreter.arithmetic import arithmetic, check_rounding
from tilekern.interpreter.dtypes import HALVES, RESTRICTED_FLOATS, normal_axis, refuse_large_uint64, wrapped
from tilekern.interpreter.errors import InterpreterError
from tilekern.interpreter.tiles import Tile, as_tile, is_float


def _axes(tile: Tile, axis: Any) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(tile.ndim))
    return tuple(normal_axis(a, tile.ndim) for a in (axis if isinstance(axis, tuple) else (axis,)))


def _summand(x: Any, operation: str) -> Tile:
    if not isinstance(x, Tile):
        raise InterpreterError(f"{operation} takes a tile, got {type(x).__name__}")
    if x.dtype in RESTRICTED_FLOATS:
        raise InterpreterError(f"{operation} does not support {x.dtype}")
    return x.astype(ct.int32) if x.dtype == ct.bool_ else x


def _shaped(data: torch.Tensor, tile: Tile, axes: tuple[int, ...], keepdims: bool) -> torch.Tensor:
    kept = ((1,) if axis in axes and keepdims else () if axis in axes else (n,) for axis, n in enumerate(tile.shape))
    return data.reshape(tuple(size for sizes in kept for size in sizes))


def _accumulation(name: str, halves: Callable[..., torch.Tensor], whole: Callable[..., torch.Tensor]) -> Any:
    def accumulate(
        x: Tile, /, axis: Any = None, *, keepdims: bool = False, rounding_mode: Any = None, flush_to_zero: bool = False
    ) -> Tile:
        tile = _summand(x, name)
        check_rounding("mul" if name == "prod" else "add", tile.dtype, rounding_mode, flush_to_zero)
        axes = _axes(tile, axis)
        rest = [a for a in range(tile.ndim) if a not in axes]
        data = tile.data.permute(*rest, *axes).reshape(*(tile.shape[a] for a in rest), -1)
        if tile.dtype in HALVES:
            # The compiler reduces a half tile with half additions; torch would keep float32 until the end.
            while data.shape[-1] > 1:
                data = halves(data[..., 0::2], data[..., 1::2])
            data = data[..., 0]
        else:
            data = wrapped(whole(data, -1, dtype=data.dtype), tile.dtype)
        return Tile(_shaped(data, tile, axes, keepdims), tile.dtype)

    return accumulate


def _extremum(name: str, find: Callable[..., torch.Tensor], worst: float) -> Any:
    def extremum(
        x: Tile,
        /,
        axis: Any = None,
        *,
        keepdims: bool = False,
        flush_to_zero: bool = False,
        propagate_nan: bool = False,
    ) -> Tile:
        tile = _summand(x, name)
        check_rounding(name, tile.dtype, None, flush_to_zero)
        if tile.dtype == ct.uint64:
            refuse_large_uint64(tile.data, name)
        axes = _axes(tile, axis)
        data = find(tile.data, axes)
        if is_float(tile.dtype) and not propagate_nan and bool(data.isnan().any()):
            data = find(tile.data.masked_fill(tile.data.isnan(), worst), axes)
        return Tile(_shaped(data, tile, axes, keepdims), tile.dtype)

    return extremum


def _position(name: str, find: Callable[..., torch.Tensor], worst: float) -> Any:
    def position(x: Tile, /, axis: Any = None, *, keepdims: bool = False, propagate_nan: bool = False) -> Tile:
        tile = _summand(x, name)
        axes = _axes(tile, axis)
        if isinstance(axis, tuple):
            raise InterpreterError(f"{name} takes one axis or None")
        data = tile.data
        if is_float(tile.dtype) and not propagate_nan:
            data = data.masked_fill(data.isnan(), worst)
        found = find(data.reshape(-1), 0) if axis is None else find(data, axes[0])
        return Tile(_shaped(found.to(torch.int32), tile, axes, keepdims), ct.int32)

    return position


def reduce(x: Any, /, axis: int, func: Callable[..., Any], identity: Any, *, keepdims: bool = False) -> Any:
    """See ``ct.reduce``: neighbours are combined pairwise, so ``func`` must be associative."""
    tiles, single = _group(x, identity)
    shape, at = tiles[0].shape, normal_axis(axis, tiles[0].ndim)
    while tiles[0].shape[at] > 1:
        pairs = [[Tile(t.data.unflatten(at, (-1, 2)).select(at + 1, i), t.dtype) for t in tiles] for i in (0, 1)]
        tiles = _combined(func, pairs[0], pairs[1], single)
    results = tuple(tile.reshape(shape[:at] + (1,) * keepdims + shape[at + 1 :]) for tile in tiles)
    return results[0] if single else results


def scan(x: Any, /, axis: int, func: Callable[..., Any], identity: Any, *, reverse: bool = False) -> Any:
    """See ``ct.scan``: inclusive, by doubling, so ``func`` must be associative."""
    tiles, single = _group(x, identity)
    at = normal_axis(axis, tiles[0].ndim)
    size, distance = tiles[0].shape[at], 1
    if reverse:
        tiles = [Tile(tile.data.flip(at), tile.dtype) for tile in tiles]
    while distance < size:
        earlier = [Tile(tile.data.narrow(at, 0, size - distance), tile.dtype) for tile in tiles]
        later = [Tile(tile.data.narrow(at, distance, size - distance), tile.dtype) for tile in tiles]
        combined = _combined(func, earlier, later, single)
        tiles = [
            Tile(torch.cat([old.data.narrow(at, 0, distance), new.data], at), old.dtype)
            for old, new in zip(tiles, combined, strict=True)
        ]
        distance *= 2
    results = tuple(Tile(tile.data.flip(at) if reverse else tile.data, tile.dtype) for tile in tiles)
    return results[0] if single else results


def _group(x: Any, identity: Any) -> tuple[list[Tile], bool]:
    single = isinstance(x, Tile)
    tiles = [x] if single else list(x)
    if not single and len(identity) != len(tiles):
        raise InterpreterError(f"{len(identity)} identities for {len(tiles)} tiles")
    shape = torch.broadcast_shapes(*(tile.shape for tile in tiles))
    return [Tile(tile.data.broadcast_to(shape), tile.dtype) for tile in tiles], single


def _combined(func: Callable[..., Any], left: list[Tile], right: list[Tile], single: bool) -> list[Tile]:
    result = func(*left, *right)
    results = [result] if single else list(result)
    return [
        Tile(tile.data.broadcast_to(old.shape), old.dtype)
        for tile, old in ((as_tile(new, old.dtype), old) for new, old in zip(results, left, strict=True))
    ]


def _scan_of(name: str, operation: str, whole: Callable[..., torch.Tensor]) -> Any:
    def accumulate(
        x: Tile, /, axis: int = 0, *, reverse: bool = False, rounding_mode: Any = None, flush_to_zero: bool = False
    ) -> Tile:
        tile = _summand(x, name)
        check_rounding(operation, tile.dtype, rounding_mode, flush_to_zero)
        if tile.dtype in HALVES:
            result: Tile = scan(tile, axis, functools.partial(arithmetic, operation), 0, reverse=reverse)
            return result
        at = normal_axis(axis, tile.ndim)
        data = tile.data.flip(at) if reverse else tile.data
        data = wrapped(whole(data, at, dtype=data.dtype), tile.dtype)
        return Tile(data.flip(at) if reverse else data, tile.dtype)

    return accumulate


FUNCTIONS: dict[str, Any] = {
    "sum": _accumulation("sum", torch.add, torch.sum),
    "prod": _accumulation("prod", torch.mul, torch.prod),
    "max": _extremum("max", torch.amax, -math.inf),
    "min": _extremum("min", torch.amin, math.inf),
    "argmax": _position("argmax", torch.argmax, -math.inf),
    "argmin": _position("argmin", torch.argmin, math.inf),
    "cumsum": _scan_of("cumsum", "add", torch.cumsum),
    "cumprod": _scan_of("cumprod", "mul", torch.cumprod),
    "reduce": reduce,
    "scan": scan,
}
