"""The functions of ``ct`` that make, change and print tiles."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch

from tilekern.interpreter.arithmetic import (
    arithmetic,
    bitwise,
    compare,
    matmul,
    mma,
    quotient_and_remainder,
    unary,
)
from tilekern.interpreter.dtypes import (
    SIGNED,
    cast,
    check_shape,
    filled,
    from_memory,
    normal_axis,
    promoted,
    promoted_with_scalar,
    shape_of,
    to_memory,
)
from tilekern.interpreter.errors import InterpreterError
from tilekern.interpreter.tiles import Tile, as_tile, is_scalar


def arange(size: int, /, *, dtype: Any, start: Any = 0, step: Any = 1) -> Tile:
    """See ``ct.arange``."""
    check_shape((size,))
    tile = Tile(cast(torch.arange(size, dtype=torch.int64, device="cpu"), ct.int64, dtype), dtype)
    if not (is_scalar(step) and step == 1):
        tile = arithmetic("mul", tile, as_tile(step, dtype))
    if not (is_scalar(start) and start == 0):
        tile = arithmetic("add", tile, as_tile(start, dtype))
    return tile


def full(shape: Any, fill_value: Any, dtype: Any) -> Tile:
    """See ``ct.full``."""
    sizes = shape_of(shape)
    if isinstance(fill_value, Tile):
        return Tile(fill_value.item().astype(dtype).data.expand(sizes), dtype)
    return Tile(filled(fill_value, dtype, sizes), dtype)


def ones(shape: Any, dtype: Any) -> Tile:
    """See ``ct.ones``."""
    return full(shape, 1, dtype)


def zeros(shape: Any, dtype: Any) -> Tile:
    """See ``ct.zeros``."""
    return full(shape, 0, dtype)


def astile(value: Any, /, *, dtype: Any) -> Tile:
    """See ``ct.astile``."""
    if not isinstance(value, tuple):
        return as_tile(value, dtype).item()
    parts = [astile(part, dtype=dtype) for part in value]
    if len({part.shape for part in parts}) != 1:
        raise InterpreterError("astile: sibling tuples must have the same, non-zero length")
    data = torch.stack([part.data for part in parts])
    check_shape(tuple(data.shape))
    return Tile(data, dtype)


def expand_dims(x: Any, /, axis: int) -> Tile:
    """See ``ct.expand_dims``."""
    tile = as_tile(x)
    return Tile(tile.data.unsqueeze(normal_axis(axis, tile.ndim + 1)), tile.dtype)


def cat(tiles: tuple[Tile, ...], /, axis: int) -> Tile:
    """See ``ct.cat``: one or two tiles of one dtype."""
    if not 1 <= len(tiles) <= 2 or len({tile.dtype for tile in tiles}) != 1:
        raise InterpreterError("cat takes a tuple of at most two tiles of the same dtype")
    try:
        data = torch.cat([tile.data for tile in tiles], normal_axis(axis, tiles[0].ndim))
    except RuntimeError:
        raise InterpreterError(f"cat: shapes {[tile.shape for tile in tiles]} do not fit on axis {axis}") from None
    check_shape(tuple(data.shape))
    return Tile(data, tiles[0].dtype)


def broadcast_to(x: Any, /, shape: Any) -> Tile:
    """See ``ct.broadcast_to``."""
    tile, sizes = as_tile(x), shape_of(shape)
    try:
        return Tile(tile.data.broadcast_to(sizes), tile.dtype)
    except RuntimeError:
        raise InterpreterError(f"a tile of shape {tile.shape} does not broadcast to {sizes}") from None


def reshape(x: Any, /, shape: Any) -> Tile:
    """See ``ct.reshape``."""
    return as_tile(x).reshape(shape)


def permute(x: Tile, /, axes: tuple[int, ...]) -> Tile:
    """See ``ct.permute``."""
    return x.permute(axes)


def transpose(x: Tile, /, axis0: int | None = None, axis1: int | None = None) -> Tile:
    """See ``ct.transpose``."""
    return x.transpose(axis0, axis1)


def extract(x: Tile, /, index: Any, shape: Any) -> Tile:
    """See ``ct.extract``."""
    return x.extract(index, shape)


def insert(x: Tile, /, index: Any, value: Tile) -> Tile:
    """See ``ct.insert``."""
    return x.insert(index, value)


def astype(x: Any, dtype: Any, /, *, rounding_mode: Any = None) -> Tile:
    """See ``ct.astype``."""
    return as_tile(x).astype(dtype, rounding_mode=rounding_mode)


def bitcast(x: Any, /, dtype: Any) -> Tile:
    """See ``ct.bitcast``."""
    tile = as_tile(x)
    if ct.bool_ in (tile.dtype, dtype) or tile.dtype.bitwidth != dtype.bitwidth:
        raise InterpreterError(f"bitcast: cannot reinterpret {tile.dtype} as {dtype}")
    raw = to_memory(tile.data, tile.dtype)
    return Tile(from_memory(raw.view(to_memory(filled(0, dtype), dtype).dtype), dtype), dtype)


def pack_to_bytes(x: Any, /) -> Tile:
    """See ``ct.pack_to_bytes``."""
    tile = as_tile(x)
    raw = to_memory(tile.data, tile.dtype).reshape(-1).contiguous()
    return Tile(raw.view(torch.uint8), ct.uint8)


def unpack_from_bytes(x: Tile, /, dtype: Any) -> Tile:
    """See ``ct.unpack_from_bytes``."""
    if x.dtype != ct.uint8 or x.ndim != 1:
        raise InterpreterError(f"unpack_from_bytes takes a 1-D uint8 tile, got {x!r}")
    raw = x.data.contiguous().view(to_memory(filled(0, dtype), dtype).dtype)
    check_shape(tuple(raw.shape))
    return Tile(from_memory(raw, dtype), dtype)


def where(cond: Any, x: Any, y: Any, /) -> Tile:
    """See ``ct.where``."""
    condition = as_tile(cond).astype(ct.bool_)
    left, right = (value if isinstance(value, Tile) else None for value in (x, y))
    if left is not None and right is None:
        dtype = promoted_with_scalar(left.dtype, y)
    elif left is None and right is not None:
        dtype = promoted_with_scalar(right.dtype, x)
    else:
        dtype = promoted(as_tile(x).dtype, as_tile(y).dtype)
    return Tile(torch.where(condition.data, as_tile(x, dtype).data, as_tile(y, dtype).data), dtype)


def _rounded_binary(name: str) -> Any:
    def operation(x: Any, y: Any, /, *, rounding_mode: Any = None, flush_to_zero: bool = False) -> Any:
        return arithmetic(name, x, y, rounding_mode, flush_to_zero)

    return operation


def _nan_binary(name: str) -> Any:
    def operation(x: Any, y: Any, /, *, flush_to_zero: bool = False, propagate_nan: bool = False) -> Any:
        return arithmetic(f"{name}_nan" if propagate_nan else name, x, y, None, flush_to_zero)

    return operation


def _binary(apply: Callable[..., Any], name: str) -> Any:
    def operation(x: Any, y: Any, /) -> Any:
        return apply(name, x, y)

    return operation


def _unary(name: str) -> Any:
    def operation(x: Any, /, *, rounding_mode: Any = None, flush_to_zero: bool = False) -> Any:
        return unary(name, x, rounding_mode, flush_to_zero)

    return operation


def cdiv(x: Any, y: Any, /) -> Any:
    """See ``ct.cdiv``."""
    if isinstance(x, Tile) and x.dtype not in (*SIGNED, ct.bool_):
        return arithmetic("floordiv", arithmetic("add", x, arithmetic("sub", y, 1)), y)
    return -((-x) // y)


def assume_divisible_by(x: Any, divisor: int) -> Any:
    """See ``ct.assume_divisible_by``; here the claim is checked."""
    if divisor < 1 or int(x) % divisor:
        raise InterpreterError(f"assume_divisible_by: {int(x)} is not divisible by {divisor}")
    return x


def ensure_constant(value: Any, /) -> Any:
    """See ``ct.ensure_constant``."""
    if isinstance(value, Tile):
        raise InterpreterError("ensure_constant: a tile is not a constant")
    return value


def static_assert(condition: Any, message: Any = None, /) -> None:
    """See ``ct.static_assert``."""
    if not condition:
        raise InterpreterError(f"static_assert failed: {'' if message is None else message}")


def assert_(cond: Tile, /, message: str | None = None) -> None:
    """See ``ct.assert_``."""
    tile = as_tile(cond)
    if tile.dtype != ct.bool_:
        raise InterpreterError(f"assert_ takes a bool tile, got {tile!r}")
    if not bool(tile.data.all()):
        raise InterpreterError(f"assert_ failed: {message or ''}")


def static_iter(iterable: Any) -> list[Any]:
    """See ``ct.static_iter``; with its limit of 1000 iterations."""
    items = list(iterable)
    if len(items) > 1000:
        raise InterpreterError(f"static_iter: {len(items)} iterations, the compiler takes 1000 at most")
    return items


def print_(*args: Any, sep: str = " ", end: str = "\n") -> None:
    """See ``ct.print``."""
    sys.stdout.write(sep.join(map(str, args)) + end)


_CONVERSION = re.compile(r"%(%|[-+ #0]*\d*(?:\.\d+)?(?:hh|h|ll|l)?([diuoxXeEfFgGaA]))")


def printf(format: str, *args: Any) -> None:
    """See ``ct.printf``."""
    values = iter(args)

    def convert(match: re.Match[str]) -> str:
        return "%" if match[1] == "%" else _printed(re.sub("[hl]", "", match[0]), as_tile(next(values)).data.tolist())

    sys.stdout.write(_CONVERSION.sub(convert, format))


def _printed(conversion: str, value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_printed(conversion, part) for part in value) + "]"
    return conversion.replace("u", "d") % value


def _nothing() -> None:
    """Launches here follow one another anyway."""


FUNCTIONS: dict[str, Any] = {
    **{name: _rounded_binary(name) for name in ("add", "sub", "mul", "truediv")},
    **{name: _binary(arithmetic, name) for name in ("floordiv", "mod", "pow", "atan2")},
    **{name: _nan_binary(name) for name in ("minimum", "maximum")},
    **{f"bitwise_{name}": _binary(bitwise, name) for name in ("and", "or", "xor", "lshift", "rshift")},
    "equal": _binary(compare, "eq"),
    "not_equal": _binary(compare, "ne"),
    "less": _binary(compare, "lt"),
    "less_equal": _binary(compare, "le"),
    "greater": _binary(compare, "gt"),
    "greater_equal": _binary(compare, "ge"),
    **{name: _unary(name) for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "floor", "ceil", "isnan")},
    **{name: _unary(name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "abs", "bitwise_not")},
    "negative": _unary("neg"),
    "divmod": quotient_and_remainder,
    "print": print_,
    "static_eval": lambda expr, /: expr,
    "static_exception": lambda exc, /: exc,
    "grid_dependency_control_launch_dependents": _nothing,
    **{
        function.__name__: function
        for function in (
            arange,
            assert_,
            assume_divisible_by,
            astile,
            astype,
            bitcast,
            broadcast_to,
            cat,
            cdiv,
            ensure_constant,
            expand_dims,
            extract,
            full,
            insert,
            matmul,
            mma,
            ones,
            pack_to_bytes,
            permute,
            printf,
            reshape,
            static_assert,
            static_iter,
            transpose,
            unpack_from_bytes,
            where,
            zeros,
        )
    },
}
