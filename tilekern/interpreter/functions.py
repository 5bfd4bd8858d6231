"""The functions of ``ct`` that make, change and reduce tiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch

from tilekern.interpreter.arithmetic import UNARY, arithmetic, bitwise, compare, mma, mma_scaled, unary
from tilekern.interpreter.dtypes import (
    HALVES,
    RESTRICTED_FLOATS,
    SIGNED,
    cast,
    check_shape,
    filled,
    from_memory,
    is_float,
    normal_axis,
    promoted,
    shape_of,
    to_memory,
    wrapped,
)
from tilekern.interpreter.errors import InterpreterError
from tilekern.interpreter.tiles import Tile, as_tile


def arange(size: int, /, *, dtype: Any) -> Tile:
    """See ``ct.arange``, from 0 in steps of 1."""
    check_shape((size,))
    return Tile(cast(torch.arange(size, dtype=torch.int64, device="cpu"), ct.int64, dtype), dtype)


def full(shape: Any, fill_value: Any, dtype: Any) -> Tile:
    """See ``ct.full``."""
    sizes = shape_of(shape)
    if isinstance(fill_value, Tile):
        return Tile(fill_value.item().astype(dtype).data.expand(sizes), dtype)
    return Tile(filled(fill_value, dtype, sizes), dtype)


def expand_dims(x: Any, /, axis: int) -> Tile:
    """See ``ct.expand_dims``."""
    tile = as_tile(x)
    return Tile(tile.data.unsqueeze(normal_axis(axis, tile.ndim + 1)), tile.dtype)


def broadcast_to(x: Any, /, shape: Any) -> Tile:
    """See ``ct.broadcast_to``."""
    tile, sizes = as_tile(x), shape_of(shape)
    try:
        return Tile(tile.data.broadcast_to(sizes), tile.dtype)
    except RuntimeError:
        raise InterpreterError(f"a tile of shape {tile.shape} does not broadcast to {sizes}") from None


def extract(x: Tile, /, index: Any, shape: Any) -> Tile:
    """See ``ct.extract``: the index counts tiles of ``shape``."""
    sizes, numbers = shape_of(shape), [int(n) for n in index]
    grid = [whole // size for whole, size in zip(x.shape, sizes, strict=True)]
    if any(whole % size for whole, size in zip(x.shape, sizes, strict=True)):
        raise InterpreterError(f"extract: {sizes} does not divide a tile of shape {x.shape}")
    if not all(0 <= n < count for n, count in zip(numbers, grid, strict=True)):
        raise InterpreterError(f"extract: no tile {tuple(numbers)} in a grid of {tuple(grid)}")
    data = x.data[tuple(slice(n * size, (n + 1) * size) for n, size in zip(numbers, sizes, strict=True))]
    return Tile(data, x.dtype)


def bitcast(x: Any, /, dtype: Any) -> Tile:
    """See ``ct.bitcast``."""
    tile = as_tile(x)
    if ct.bool_ in (tile.dtype, dtype) or tile.dtype.bitwidth != dtype.bitwidth:
        raise InterpreterError(f"bitcast: cannot reinterpret {tile.dtype} as {dtype}")
    raw = to_memory(tile.data, tile.dtype)
    return Tile(from_memory(raw.view(to_memory(filled(0, dtype), dtype).dtype), dtype), dtype)


def permute(x: Tile, /, axes: Any) -> Tile:
    """See ``ct.permute``."""
    if sorted(axes) != list(range(x.ndim)):
        raise InterpreterError(f"permute: axes must be each of {x.ndim} once, got {tuple(axes)}")
    return Tile(x.data.permute(*axes), x.dtype)


def where(cond: Any, x: Any, y: Any, /) -> Tile:
    """See ``ct.where``."""
    condition = as_tile(cond).astype(ct.bool_)
    if isinstance(x, Tile):
        dtype = promoted(x.dtype, y.dtype if isinstance(y, Tile) else y)
    else:
        dtype = promoted(y.dtype, x) if isinstance(y, Tile) else promoted(as_tile(x).dtype, as_tile(y).dtype)
    return Tile(torch.where(condition.data, as_tile(x, dtype).data, as_tile(y, dtype).data), dtype)


def cdiv(x: Any, y: Any, /) -> Any:
    """See ``ct.cdiv``."""
    if isinstance(x, Tile) and x.dtype not in (*SIGNED, ct.bool_):
        return arithmetic("floordiv", arithmetic("add", x, arithmetic("sub", y, 1)), y)
    return -((-x) // y)


def static_assert(condition: Any, message: Any = None, /) -> None:
    """See ``ct.static_assert``."""
    if not condition:
        raise InterpreterError(f"static_assert failed: {'' if message is None else message}")


def static_iter(iterable: Any) -> list[Any]:
    """See ``ct.static_iter``; has the same limit of 1000 iterations."""
    items = list(iterable)
    if len(items) > 1000:
        raise InterpreterError(f"static_iter: {len(items)} iterations, the compiler takes 1000 at most")
    return items


# Reductions and scans.


def _summand(x: Any, operation: str) -> Tile:
    if not isinstance(x, Tile):
        raise InterpreterError(f"{operation} takes a tile, got {type(x).__name__}")
    if x.dtype in RESTRICTED_FLOATS:
        raise InterpreterError(f"{operation} does not support {x.dtype}")
    return x.astype(ct.int32) if x.dtype == ct.bool_ else x


def _axes(tile: Tile, axis: Any) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(tile.ndim))
    return tuple(normal_axis(a, tile.ndim) for a in (axis if isinstance(axis, tuple) else (axis,)))


def _reduced(data: torch.Tensor, tile: Tile, axes: tuple[int, ...], keepdims: bool) -> Tile:
    sizes = [1 if axis in axes else n for axis, n in enumerate(tile.shape) if keepdims or axis not in axes]
    return Tile(data.reshape(sizes), tile.dtype)


def sum_of(x: Tile, /, axis: Any = None, *, keepdims: bool = False) -> Tile:
    """See ``ct.sum``."""
    tile = _summand(x, "sum")
    axes = _axes(tile, axis)
    rest = [a for a in range(tile.ndim) if a not in axes]
    data = tile.data.permute(*rest, *axes).reshape(*(tile.shape[a] for a in rest), -1)
    if tile.dtype in HALVES:
        # The compiler reduces a half tile with half additions; torch would keep float32 until the end.
        while data.shape[-1] > 1:
            data = data[..., 0::2] + data[..., 1::2]
    else:
        data = wrapped(data.sum(-1, dtype=data.dtype), tile.dtype)
    return _reduced(data, tile, axes, keepdims)


def _extremum(name: str, find: Callable[..., torch.Tensor], worst: float) -> Any:
    def extremum(x: Tile, /, axis: Any = None, *, keepdims: bool = False) -> Tile:
        tile = _summand(x, name)
        axes = _axes(tile, axis)
        data = find(tile.data, axes)
        if is_float(tile.dtype) and bool(data.isnan().any()):
            data = find(tile.data.masked_fill(tile.data.isnan(), worst), axes)
        return _reduced(data, tile, axes, keepdims)

    return extremum


def cumsum(x: Tile, /, axis: int = 0) -> Tile:
    """See ``ct.cumsum``; half types are refused, since each of their additions rounds."""
    tile = _summand(x, "cumsum")
    if tile.dtype in HALVES:
        raise InterpreterError(f"the interpreter does not know cumsum of {tile.dtype}: cast to float32 first")
    data = tile.data.cumsum(normal_axis(axis, tile.ndim), dtype=tile.data.dtype)
    return Tile(wrapped(data, tile.dtype), tile.dtype)


def reduce(x: Any, /, axis: int, func: Callable[..., Any], identity: Any, *, keepdims: bool = False) -> Any:
    """See ``ct.reduce``: neighbours are combined pairwise, so ``func`` must be associative."""
    single = isinstance(x, Tile)
    tiles = [x] if single else list(x)
    if not single and len(identity) != len(tiles):
        raise InterpreterError(f"{len(identity)} identities for {len(tiles)} tiles")
    shape = torch.broadcast_shapes(*(tile.shape for tile in tiles))
    tiles = [Tile(tile.data.broadcast_to(shape), tile.dtype) for tile in tiles]
    at = normal_axis(axis, len(shape))
    while tiles[0].shape[at] > 1:
        halves = [Tile(t.data.unflatten(at, (-1, 2)).select(at + 1, i), t.dtype) for i in (0, 1) for t in tiles]
        combined = [func(*halves)] if single else func(*halves)
        tiles = [
            Tile(as_tile(new, old.dtype).data.broadcast_to(old.shape), old.dtype)
            for new, old in zip(combined, halves, strict=False)
        ]
    results = tuple(tile.reshape(shape[:at] + (1,) * keepdims + shape[at + 1 :]) for tile in tiles)
    return results[0] if single else results


def _rounded_binary(name: str) -> Any:
    return lambda x, y, /, *, rounding_mode=None, flush_to_zero=False: arithmetic(
        name, x, y, rounding_mode, flush_to_zero
    )


def _nan_binary(name: str) -> Any:
    return lambda x, y, /, *, flush_to_zero=False, propagate_nan=False: arithmetic(
        f"{name}_nan" if propagate_nan else name, x, y, None, flush_to_zero
    )


def _binary(apply: Callable[..., Any], name: str) -> Any:
    return lambda x, y, /: apply(name, x, y)


def _unary(name: str) -> Any:
    return lambda x, /, *, rounding_mode=None, flush_to_zero=False: unary(name, x, rounding_mode, flush_to_zero)


FUNCTIONS: dict[str, Any] = {
    **{name: _rounded_binary(name) for name in ("add", "sub", "mul", "truediv")},
    **{name: _binary(arithmetic, name) for name in ("floordiv", "mod", "pow")},
    **{name: _nan_binary(name) for name in ("minimum", "maximum")},
    **{f"bitwise_{name}": _binary(bitwise, name) for name in ("and", "or", "xor", "lshift", "rshift")},
    "equal": _binary(compare, "eq"),
    "not_equal": _binary(compare, "ne"),
    "less": _binary(compare, "lt"),
    "less_equal": _binary(compare, "le"),
    "greater": _binary(compare, "gt"),
    "greater_equal": _binary(compare, "ge"),
    **{name: _unary(name) for name in UNARY},
    "zeros": lambda shape, dtype: full(shape, 0, dtype),
    "reshape": lambda x, /, shape: as_tile(x).reshape(shape),
    "transpose": lambda x, /, axis0=None, axis1=None: x.transpose(axis0, axis1),
    "astype": lambda x, dtype, /, *, rounding_mode=None: as_tile(x).astype(dtype, rounding_mode=rounding_mode),
    "sum": sum_of,
    "max": _extremum("max", torch.amax, -math.inf),
    "min": _extremum("min", torch.amin, math.inf),
    "static_eval": lambda expr, /: expr,
    **{
        function.__name__: function
        for function in (
            arange,
            bitcast,
            broadcast_to,
            cdiv,
            cumsum,
            expand_dims,
            extract,
            full,
            mma,
            mma_scaled,
            permute,
            reduce,
            static_assert,
            static_iter,
            where,
        )
    },
}
