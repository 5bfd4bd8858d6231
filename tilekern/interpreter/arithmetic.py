"""cuTile's operators on tiles, with its promotion and rounding; importing this module gives them to :class:`Tile`.

Every operation rounds to its result's dtype, half types included, since torch computes a half operation in float32
and rounds once, which is what the hardware's own half operation gives.
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
    carrier_of,
    cast,
    filled,
    first_line,
    promoted,
    promoted_with_scalar,
    refuse_large_uint64,
    wrapped,
)
from tilekern.interpreter.errors import InterpreterError
from tilekern.interpreter.tiles import Tile, is_float, is_scalar

Rounding = ct.RoundingMode
_DIRECTED = (Rounding.RN, Rounding.RZ, Rounding.RM, Rounding.RP)
ROUNDINGS: dict[str, tuple[Any, ...]] = {
    "add": _DIRECTED,
    "sub": _DIRECTED,
    "mul": _DIRECTED,
    "truediv": (*_DIRECTED, Rounding.FULL, Rounding.APPROX),
    "sqrt": (*_DIRECTED, Rounding.APPROX),
    "tanh": (Rounding.FULL, Rounding.APPROX),
    "exp": (Rounding.FULL, Rounding.APPROX),
}


_remembered = functools.lru_cache(maxsize=4096, typed=True)(filled)


def meet(left: Any, right: Any, force_float: bool = False) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The dtype in which two operands meet, and both in it; one of them at least is a tile."""
    if isinstance(left, Tile) and isinstance(right, Tile):
        dtype = promoted(left.dtype, right.dtype, force_float)
        return dtype, cast(left.data, left.dtype, dtype), cast(right.data, right.dtype, dtype)
    tile, scalar = (left, right) if isinstance(left, Tile) else (right, left)
    if not is_scalar(scalar):
        raise InterpreterError(f"expected a tile or a scalar, got {type(scalar).__name__}")
    dtype = promoted_with_scalar(tile.dtype, scalar, force_float)
    # Zeros are not remembered: 0.0 and -0.0 are the same key.
    scalar_data = _remembered(scalar, dtype) if scalar else filled(scalar, dtype)
    tile_data = cast(tile.data, tile.dtype, dtype)
    return (dtype, tile_data, scalar_data) if tile is left else (dtype, scalar_data, tile_data)


def check_rounding(operation: str, dtype: Any, rounding_mode: Any, flush_to_zero: bool) -> None:
    """Refuse what the compiler refuses; what it takes is approximated by rounding to nearest."""
    if rounding_mode is not None:
        only_float32 = rounding_mode in (Rounding.FULL, Rounding.APPROX)
        if rounding_mode not in ROUNDINGS.get(operation, ()) or dtype not in FLOATS:
            raise InterpreterError(f"rounding mode {rounding_mode.value} is not supported for {operation} of {dtype}")
        if only_float32 and dtype != ct.float32:
            raise InterpreterError(f"rounding mode {rounding_mode.value} is for float32 only, got {dtype}")
    if flush_to_zero and dtype != ct.float32:
        raise InterpreterError(f"flush_to_zero is for float32 only, got {dtype}")


def _floordiv(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    # cuTile floors the rounded quotient; torch's own floor division corrects the remainder instead.
    if left.is_floating_point():
        return (left / right).floor()
    return torch.div(left, right, rounding_mode="floor")


def _smaller(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.fmin(left, right) if left.is_floating_point() else torch.minimum(left, right)


def _larger(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.fmax(left, right) if left.is_floating_point() else torch.maximum(left, right)


def _power(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if not left.is_floating_point():
        raise InterpreterError("pow of integer tiles is not supported: cast to a float first")
    return torch.pow(left, right)


def _arctangent(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if not left.is_floating_point():
        raise InterpreterError("atan2 of integer tiles is not supported: cast to a float first")
    return torch.atan2(left, right)


_Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_ARITHMETIC: dict[str, tuple[_Binary, Callable[..., Any]]] = {
    "add": (torch.add, operator.add),
    "sub": (torch.sub, operator.sub),
    "mul": (torch.mul, operator.mul),
    "truediv": (torch.true_divide, operator.truediv),
    "floordiv": (_floordiv, operator.floordiv),
    "mod": (torch.remainder, operator.mod),
    "pow": (_power, operator.pow),
    "atan2": (_arctangent, math.atan2),
    "minimum": (_smaller, min),
    "maximum": (_larger, max),
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
_WRAPS = ("add", "sub", "mul", "eq", "ne", "and", "or", "xor", "lshift")


def _check_uint64(name: str, dtype: Any, left: torch.Tensor, right: torch.Tensor) -> None:
    if dtype == ct.uint64 and name not in _WRAPS:
        refuse_large_uint64(left, name)
        refuse_large_uint64(right, name)


def arithmetic(name: str, left: Any, right: Any, rounding_mode: Any = None, flush_to_zero: bool = False) -> Any:
    """A binary arithmetic operation on tiles and scalars; two Python scalars give a Python scalar."""
    compute, on_scalars = _ARITHMETIC[name]
    if not isinstance(left, Tile) and not isinstance(right, Tile):
        return on_scalars(left, right)
    dtype, a, b = meet(left, right, name == "truediv")
    if dtype == ct.bool_ or dtype in RESTRICTED_FLOATS:
        raise InterpreterError(f"{name} does not support {dtype}: cast first")
    if rounding_mode is not None or flush_to_zero:
        check_rounding(name, dtype, rounding_mode, flush_to_zero)
    _check_uint64(name, dtype, a, b)
    return Tile(wrapped(compute(a, b), dtype), dtype)


def compare(name: str, left: Any, right: Any) -> Any:
    """A comparison of tiles and scalars: a tile of bool_, or a bool for two Python scalars."""
    compute, on_scalars = _COMPARISONS[name]
    if not isinstance(left, Tile) and not isinstance(right, Tile):
        return on_scalars(left, right)
    dtype, a, b = meet(left, right)
    _check_uint64(name, dtype, a, b)
    return Tile(compute(a, b), ct.bool_)


def bitwise(name: str, left: Any, right: Any) -> Any:
    """A bitwise operation or shift on integer (or, but for shifts, bool) tiles and scalars."""
    compute, on_scalars = _BITWISE[name]
    if not isinstance(left, Tile) and not isinstance(right, Tile):
        return on_scalars(left, right)
    shift = name.endswith("shift")
    if isinstance(left, Tile) and isinstance(right, Tile) and left.dtype != right.dtype and not shift:
        raise InterpreterError(f"bitwise operands must have the same dtype, got {left.dtype} and {right.dtype}")
    dtype, a, b = meet(left, right)
    if dtype not in INTEGERS and (shift or dtype != ct.bool_):
        raise InterpreterError(f"bitwise {name} does not support {dtype}")
    _check_uint64(name, dtype, a, b)
    return Tile(wrapped(compute(a, b), dtype), dtype)


_FLOAT, _STRICT, _NUMBER, _BITS = "float", "strict float", "number", "bits"
_UNARY: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[Any], Any], str]] = {
    "exp": (torch.exp, math.exp, _FLOAT),
    "exp2": (torch.exp2, lambda x: 2**x, _FLOAT),
    "log": (torch.log, math.log, _FLOAT),
    "log2": (torch.log2, math.log2, _FLOAT),
    "sqrt": (torch.sqrt, math.sqrt, _FLOAT),
    "rsqrt": (torch.rsqrt, lambda x: x**-0.5, _FLOAT),
    "sin": (torch.sin, math.sin, _FLOAT),
    "cos": (torch.cos, math.cos, _FLOAT),
    "tan": (torch.tan, math.tan, _FLOAT),
    "sinh": (torch.sinh, math.sinh, _FLOAT),
    "cosh": (torch.cosh, math.cosh, _FLOAT),
    "tanh": (torch.tanh, math.tanh, _FLOAT),
    "floor": (torch.floor, math.floor, _STRICT),
    "ceil": (torch.ceil, math.ceil, _STRICT),
    "isnan": (torch.isnan, math.isnan, _STRICT),
    "abs": (torch.abs, abs, _NUMBER),
    "neg": (torch.neg, operator.neg, _NUMBER),
    "bitwise_not": (torch.bitwise_not, lambda x: not x if isinstance(x, bool) else ~x, _BITS),
}


def unary(name: str, value: Any, rounding_mode: Any = None, flush_to_zero: bool = False) -> Any:
    """A unary operation on a tile; a Python scalar gives a Python scalar."""
    compute, on_scalar, kind = _UNARY[name]
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
    _check_mma_dtypes(x.dtype, y.dtype, acc.dtype)
    product = _product(x, y)
    if tuple(product.shape) != acc.shape:
        raise InterpreterError(f"mma: acc must have shape {tuple(product.shape)}, got {acc.shape}")
    return Tile((product + acc.data.to(product.dtype)).to(acc.data.dtype), acc.dtype)


def matmul(x: Tile, y: Tile, /) -> Tile:
    """See ``ct.matmul``: the result has the dtype to which x and y promote."""
    if not isinstance(x, Tile) or not isinstance(y, Tile) or 0 in (x.ndim, y.ndim):
        raise InterpreterError("matmul takes tiles with at least one axis")
    dtype = promoted(x.dtype, y.dtype)
    accumulator = _check_mma_dtypes(dtype, dtype, None)
    product = _product(x.astype(dtype), y.astype(dtype)).to(carrier_of(accumulator))
    return Tile(product, accumulator).astype(dtype)


def _check_mma_dtypes(x: Any, y: Any, acc: Any) -> Any:
    try:
        return _resolve_mma_supported_dtype(x, y, acc)
    except ct.TileError as error:
        raise InterpreterError(first_line(error)) from None


def _product(x: Tile, y: Tile) -> torch.Tensor:
    computed = torch.int32 if x.dtype in INTEGERS else torch.float64 if x.dtype == ct.float64 else torch.float32
    try:
        return torch.matmul(x.data.to(computed), y.data.to(computed))
    except RuntimeError:
        raise InterpreterError(f"matmul: shapes {x.shape} and {y.shape} do not fit") from None


def quotient_and_remainder(left: Any, right: Any, /) -> tuple[Any, Any]:
    """Both results of ``divmod``; as in cuTile, not for floats."""
    quotient, remainder = arithmetic("floordiv", left, right), arithmetic("mod", left, right)
    if isinstance(quotient, Tile) and is_float(quotient.dtype):
        raise InterpreterError("divmod is not supported for floats")
    return quotient, remainder


def _install_operators() -> None:
    def install(method: str, function: Callable[..., Any], *names: str) -> None:
        setattr(Tile, f"__{method}__", lambda self, other: function(*names, self, other))
        setattr(Tile, f"__r{method}__", lambda self, other: function(*names, other, self))

    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        install(name, arithmetic, name)
    for name in _BITWISE:
        install(name, bitwise, name)
    install("divmod", quotient_and_remainder)
    install("matmul", matmul)
    for name in _COMPARISONS:
        setattr(Tile, f"__{name}__", lambda self, other, name=name: compare(name, self, other))
    for method, name in (("neg", "neg"), ("abs", "abs"), ("invert", "bitwise_not")):
        setattr(Tile, f"__{method}__", lambda self, name=name: unary(name, self))


_install_operators()
