"""cuTile's operators on tiles, with its promotion and rounding; importing this module adds them to :class:`Tile`.

Every operation rounds to its result's dtype, half types included: torch computes a half operation in float32 and
rounds once, and so does the hardware's own half operation.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile._datatype import _resolve_mma_supported_dtype

from tilekern.interpreter.dtypes import (
    FLOATS,
    INTEGERS,
    RESTRICTED_FLOATS,
    UNSIGNED,
    cast,
    filled,
    first_line,
    is_float,
    is_scalar,
    promoted,
    wrapped,
)
from tilekern.interpreter.errors import InterpreterError
from tilekern.interpreter.tiles import Tile

_APPROXIMATED = ("truediv", "sqrt", "tanh", "exp")


_remembered = functools.lru_cache(maxsize=4096, typed=True)(filled)


def meet(left: Any, right: Any, force_float: bool = False) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return the common dtype of two operands, and both operands in it; at least one is a tile."""
    if isinstance(left, Tile) and isinstance(right, Tile):
        dtype = promoted(left.dtype, right.dtype, force_float)
        return dtype, cast(left.data, left.dtype, dtype), cast(right.data, right.dtype, dtype)
    tile, scalar = (left, right) if isinstance(left, Tile) else (right, left)
    if not is_scalar(scalar):
        raise InterpreterError(f"expected a tile or a scalar, got {type(scalar).__name__}")
    dtype = promoted(tile.dtype, scalar, force_float)
    # Zeros are not cached: 0.0 and -0.0 are the same key.
    scalar_data = _remembered(scalar, dtype) if scalar else filled(scalar, dtype)
    tile_data = cast(tile.data, tile.dtype, dtype)
    return (dtype, tile_data, scalar_data) if tile is left else (dtype, scalar_data, tile_data)


def check_rounding(operation: str, dtype: Any, rounding_mode: Any, flush_to_zero: bool) -> None:
    """Refuse rounding modes that the compiler refuses or that the interpreter does not support."""
    if rounding_mode is not None and (rounding_mode is not ct.RoundingMode.APPROX or operation not in _APPROXIMATED):
        raise InterpreterError(f"the interpreter does not know rounding mode {rounding_mode.value} of {operation}")
    if (rounding_mode is not None or flush_to_zero) and dtype != ct.float32:
        raise InterpreterError(f"approximation and flush_to_zero are for float32 only, got {dtype}")


_Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _by_kind(of_floats: _Binary, of_integers: _Binary) -> _Binary:
    return lambda left, right: (of_floats if left.is_floating_point() else of_integers)(left, right)


_ARITHMETIC: dict[str, tuple[_Binary, Callable[..., Any]]] = {
    "add": (torch.add, operator.add),
    "sub": (torch.sub, operator.sub),
    "mul": (torch.mul, operator.mul),
    "truediv": (torch.true_divide, operator.truediv),
    # cuTile floors the rounded quotient; torch's own floor division of floats corrects the remainder instead.
    "floordiv": (_by_kind(lambda a, b: (a / b).floor(), torch.floor_divide), operator.floordiv),
    "mod": (torch.remainder, operator.mod),
    "pow": (torch.pow, operator.pow),
    "minimum": (_by_kind(torch.fmin, torch.minimum), min),
    "maximum": (_by_kind(torch.fmax, torch.maximum), max),
    "minimum_nan": (torch.minimum, min),
    "maximum_nan": (torch.maximum, max),
}
_COMPARISONS: dict[str, tuple[_Binary, Callable[..., Any]]] = {
    name: (getattr(torch, name), getattr(operator, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_BITWISE: dict[str, tuple[_Binary, Callable[..., Any]]] = {
    "and": (torch.bitwise_and, operator.and_),
    "or": (torch.bitwise_or, operator.or_),
    "xor": (torch.bitwise_xor, operator.xor),
    "lshift": (torch.bitwise_left_shift, operator.lshift),
    "rshift": (torch.bitwise_right_shift, operator.rshift),
}


def arithmetic(name: str, left: Any, right: Any, rounding_mode: Any = None, flush_to_zero: bool = False) -> Any:
    """Apply a binary arithmetic operation to tiles and scalars; two Python scalars give a Python scalar."""
    compute, on_scalars = _ARITHMETIC[name]
    if not isinstance(left, Tile) and not isinstance(right, Tile):
        return on_scalars(left, right)
    dtype, a, b = meet(left, right, name == "truediv")
    if dtype == ct.bool_ or dtype in RESTRICTED_FLOATS:
        raise InterpreterError(f"{name} does not support {dtype}: cast first")
    if name == "pow" and dtype not in FLOATS:
        raise InterpreterError("pow of integer tiles is not supported: cast to a float first")
    if rounding_mode is not None or flush_to_zero:
        check_rounding(name, dtype, rounding_mode, flush_to_zero)
    return Tile(wrapped(compute(a, b), dtype), dtype)


def compare(name: str, left: Any, right: Any) -> Any:
    """Compare tiles and scalars: a tile of bool_, or a bool for two Python scalars."""
    compute, on_scalars = _COMPARISONS[name]
    if not isinstance(left, Tile) and not isinstance(right, Tile):
        return on_scalars(left, right)
    _, a, b = meet(left, right)
    return Tile(compute(a, b), ct.bool_)


def bitwise(name: str, left: Any, right: Any) -> Any:
    """Apply a bitwise operation to integers or bools, or a shift to integers; tiles and scalars."""
    compute, on_scalars = _BITWISE[name]
    if not isinstance(left, Tile) and not isinstance(right, Tile):
        return on_scalars(left, right)
    shift = name.endswith("shift")
    if isinstance(left, Tile) and isinstance(right, Tile) and left.dtype != right.dtype and not shift:
        raise InterpreterError(f"bitwise operands must have the same dtype, got {left.dtype} and {right.dtype}")
    dtype, a, b = meet(left, right)
    if dtype not in INTEGERS and (shift or dtype != ct.bool_):
        raise InterpreterError(f"bitwise {name} does not support {dtype}")
    return Tile(wrapped(compute(a, b), dtype), dtype)


_FLOAT, _STRICT, _NUMBER, _BITS = "float", "strict float", "number", "bits"
UNARY: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[Any], Any], str]] = {
    "exp": (torch.exp, math.exp, _FLOAT),
    "exp2": (torch.exp2, lambda x: 2**x, _FLOAT),
    "log": (torch.log, math.log, _FLOAT),
    "log2": (torch.log2, math.log2, _FLOAT),
    "sqrt": (torch.sqrt, math.sqrt, _FLOAT),
    "rsqrt": (torch.rsqrt, lambda x: x**-0.5, _FLOAT),
    "sin": (torch.sin, math.sin, _FLOAT),
    "cos": (torch.cos, math.cos, _FLOAT),
    "tanh": (torch.tanh, math.tanh, _FLOAT),
    "floor": (torch.floor, math.floor, _STRICT),
    "ceil": (torch.ceil, math.ceil, _STRICT),
    "isnan": (torch.isnan, math.isnan, _STRICT),
    "abs": (torch.abs, abs, _NUMBER),
    "negative": (torch.neg, operator.neg, _NUMBER),
    "bitwise_not": (torch.bitwise_not, lambda x: not x if isinstance(x, bool) else ~x, _BITS),
}


def unary(name: str, value: Any, rounding_mode: Any = None, flush_to_zero: bool = False) -> Any:
    """Apply a unary operation to a tile; a Python scalar gives a Python scalar."""
    compute, on_scalar, kind = UNARY[name]
    if not isinstance(value, Tile):
        return on_scalar(value)
    tile = value
    if is_float(tile.dtype):
        if kind == _BITS or tile.dtype in RESTRICTED_FLOATS:
            raise InterpreterError(f"{name} does not support {tile.dtype}")
    elif kind == _STRICT:
        raise InterpreterError(f"{name} takes float tiles only, got {tile.dtype}")
    elif kind == _FLOAT:
        tile = tile.astype(ct.float32)
    elif kind == _NUMBER and tile.dtype == ct.bool_:
        tile = tile.astype(ct.int32)
    if rounding_mode is not None or flush_to_zero:
        check_rounding(name, tile.dtype, rounding_mode, flush_to_zero)
    if name == "abs" and tile.dtype in UNSIGNED:
        return tile
    dtype = ct.bool_ if name == "isnan" else tile.dtype
    return Tile(wrapped(compute(tile.data), dtype), dtype)


def mma(x: Tile, y: Tile, /, acc: Tile, *, use_fast_acc: bool = False) -> Tile:
    """See ``ct.mma``: float products are summed in float32 whatever the inputs."""
    if use_fast_acc and x.dtype not in (ct.float8_e4m3fn, ct.float8_e5m2):
        raise InterpreterError(f"mma: use_fast_acc is for float8 only, got {x.dtype}")
    if x.ndim < 2 or y.ndim < 2:
        raise InterpreterError(f"mma: x and y must have two axes or more, got {x.shape} and {y.shape}")
    try:
        _resolve_mma_supported_dtype(x.dtype, y.dtype, acc.dtype)
    except ct.TileError as error:
        raise InterpreterError(first_line(error)) from None
    computed = torch.int32 if x.dtype in INTEGERS else torch.float64 if x.dtype == ct.float64 else torch.float32
    try:
        product = torch.matmul(x.data.to(computed), y.data.to(computed))
    except RuntimeError:
        raise InterpreterError(f"mma: shapes {x.shape} and {y.shape} do not fit") from None
    if tuple(product.shape) != acc.shape:
        raise InterpreterError(f"mma: acc must have shape {tuple(product.shape)}, got {acc.shape}")
    return Tile((product + acc.data.to(product.dtype)).to(acc.data.dtype), acc.dtype)


# Numbers that share a scale of e8m0.
_SCALED = 32


def mma_scaled(x: Tile, x_scale: Tile, y: Tile, y_scale: Tile, /, acc: Tile) -> Tile:
    """See ``ct.mma_scaled``: of float8, with scales of e8m0 for 32 numbers; sums are float32."""
    for numbers, scale in ((x, x_scale), (y, y_scale)):
        if numbers.dtype not in (ct.float8_e4m3fn, ct.float8_e5m2) or scale.dtype != ct.float8_e8m0fnu:
            raise InterpreterError(
                f"mma_scaled: the interpreter knows float8 with scales of float8_e8m0fnu, got {numbers.dtype} and "
                f"{scale.dtype}"
            )
    if acc.dtype != ct.float32:
        raise InterpreterError(f"mma_scaled: acc must be float32, got {acc.dtype}")
    left, right = _scaled(x, x_scale, -1), _scaled(y, y_scale, -2)
    product = torch.matmul(left, right)
    if tuple(product.shape) != acc.shape:
        raise InterpreterError(f"mma_scaled: acc must have shape {tuple(product.shape)}, got {acc.shape}")
    return Tile(product + acc.data, acc.dtype)


def _scaled(numbers: Tile, scale: Tile, axis: int) -> torch.Tensor:
    factors = scale.data.float().repeat_interleave(_SCALED, axis)
    if factors.shape != numbers.data.shape:
        raise InterpreterError(
            f"mma_scaled: {_SCALED} numbers have a scale, got shapes {numbers.shape} and {scale.shape}"
        )
    return numbers.data.float() * factors


def _install_operators() -> None:
    def install(name: str, function: Callable[..., Any]) -> None:
        setattr(Tile, f"__{name}__", lambda self, other: function(name, self, other))
        setattr(Tile, f"__r{name}__", lambda self, other: function(name, other, self))

    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        install(name, arithmetic)
    for name in _BITWISE:
        install(name, bitwise)
    for name in _COMPARISONS:
        setattr(Tile, f"__{name}__", lambda self, other, name=name: compare(name, self, other))
    for method, name in (("neg", "negative"), ("abs", "abs"), ("invert", "bitwise_not")):
        setattr(Tile, f"__{method}__", lambda self, name=name: unary(name, self))


_install_operators()
