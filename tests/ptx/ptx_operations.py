"""The arithmetic of PTX on numpy arrays: types of registers, and a function for each opcode that touches no memory.

Values of float16 and bfloat16 are computed in float32 and then rounded: its 24 digits are twice theirs and two more,
so that sums, products and quotients are as if they were rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Function = Callable[..., Any]
UNSIGNED: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_TINY = np.finfo(np.float32).tiny


class Type(NamedTuple):
    """How the bits of a register are read: ``decode`` makes numbers of them, ``encode`` bits of numbers.

    Packed types have the numbers of a register along a second axis. ``dtype`` is that of integers, else None.
    """

    bits: int
    decode: Function
    encode: Function
    dtype: Any = None


class Operation(NamedTuple):
    """A function of decoded numbers, the type of its result, and those of its arguments."""

    function: Function
    result: str
    arguments: tuple[str, ...]


def bfloat16_bits(x: Any) -> Any:
    """The bits of float32 rounded to bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def flushed(x: Any) -> Any:
    """Replace subnormal numbers by zeros of their sign, as .ftz does."""
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)


def _viewed(bits: int, dtype: Any, *, is_integer: bool = False) -> Type:
    unsigned = UNSIGNED[bits]
    return Type(bits, lambda x: x.view(dtype), lambda x: x.view(unsigned), dtype if is_integer else None)


def _packed(half: Type) -> Type:
    """Two numbers in a register, the first in its low bits."""
    unsigned, double = UNSIGNED[half.bits], UNSIGNED[2 * half.bits]
    return Type(
        2 * half.bits,
        lambda x: half.decode(x.view(unsigned).reshape(-1, 2)),
        lambda x: np.ascontiguousarray(half.encode(x)).view(double).reshape(-1),
    )


def _types() -> dict[str, Type]:
    types = {
        "pred": _viewed(1, np.bool_),
        "f16": Type(
            16, lambda x: x.view(np.float16).astype(np.float32), lambda x: x.astype(np.float16).view(np.uint16)
        ),
        "bf16": Type(16, lambda x: (x.astype(np.uint32) << np.uint32(16)).view(np.float32), bfloat16_bits),
        "f32": _viewed(32, np.float32),
        "f64": _viewed(64, np.float64),
    }
    for bits in (8, 16, 32, 64):
        types[f"b{bits}"] = types[f"u{bits}"] = _viewed(bits, UNSIGNED[bits], is_integer=True)
        types[f"s{bits}"] = _viewed(bits, getattr(np, f"int{bits}"), is_integer=True)
    return types | {f"{name}x2": _packed(types[name]) for name in ("f16", "bf16", "f32")}


TYPES = _types()


def is_float(name: str) -> bool:
    """Return whether a type has floating-point numbers."""
    return name.removesuffix("x2") in ("f16", "bf16", "f32", "f64")


# Functions of numbers.


def _shift_left(x: Any, by: Any) -> Any:
    bits = 8 * x.itemsize
    return np.where(by < bits, x << np.minimum(by, bits - 1).astype(x.dtype), x.dtype.type(0))


def _shift_right(x: Any, by: Any) -> Any:
    bits = 8 * x.itemsize
    shifted = x >> np.minimum(by, bits - 1).astype(x.dtype)
    return shifted if x.dtype.kind == "i" else np.where(by < bits, shifted, x.dtype.type(0))


def _quotient(x: Any, y: Any) -> Any:
    """The quotient of integers, towards zero."""
    down = x // y
    return (down + ((down < 0) & (down * y != x))).astype(x.dtype)


def _fused(x: Any, y: Any, z: Any) -> Any:
    # The product is exact in float64, but the sum is rounded twice: in some ten million one result is one unit off.
    return (x.astype(np.float64) * y + z).astype(np.float32)


def _extreme(pick: Function, join: Function) -> Function:
    """A minimum or maximum for which -0 is below +0, as it is not for numpy's."""

    def function(x: Any, y: Any) -> Any:
        result = pick(x, y)
        zero = (x == 0) & (y == 0)
        if zero.any():
            signs = join(np.signbit(x), np.signbit(y))
            result = np.where(zero, np.where(signs, np.float32(-0.0), np.float32(0.0)), result)
        return result

    return function


def _in_float64(function: Function) -> Function:
    """Stand in for an approximation: the float32 next to the exact result."""
    return lambda x: function(x.astype(np.float64)).astype(np.float32)


_MINIMA = {False: _extreme(np.fmin, np.logical_or), True: _extreme(np.minimum, np.logical_or)}
_MAXIMA = {False: _extreme(np.fmax, np.logical_and), True: _extreme(np.maximum, np.logical_and)}
_FLOAT: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "fma": _fused,
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rcp": lambda x: np.float32(1) / x,
    "rsqrt": _in_float64(lambda x: 1 / np.sqrt(x)),
    "ex2": _in_float64(np.exp2),
    "lg2": _in_float64(np.log2),
    "tanh": _in_float64(np.tanh),
}
_INTEGER: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "div": _quotient,
    "rem": lambda x, y: x - _quotient(x, y) * y,
    "min": np.minimum,
    "max": np.maximum,
    "neg": np.negative,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shl": _shift_left,
    "shr": _shift_right,
}
# Number of arguments of those that do not have two.
_ARGUMENTS = {
    "fma": 3, "neg": 1, "abs": 1, "sqrt": 1, "rcp": 1, "rsqrt": 1, "ex2": 1, "lg2": 1, "tanh": 1, "not": 1
}  # fmt: skip
_COMPARISONS: dict[str, Function] = {
    "eq": np.equal,
    "ne": lambda x, y: (x < y) | (x > y),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "num": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
    "nan": lambda x, y: np.isnan(x) | np.isnan(y),
}
# Those of unsigned integers by names of their own, and those of floats that hold where one is NaN.
_COMPARISONS |= {name: _COMPARISONS[other] for name, other in {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.items()}
_UNORDERED = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
_COMPARISONS |= {name: lambda x, y, f=_COMPARISONS[other]: ~f(x, y) for name, other in _UNORDERED.items()}
_JOINS: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_ROUNDINGS: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@functools.cache
def operation(opcode: str, count: int) -> Operation | None:
    """The operation of an opcode and a number of arguments; None where there is none."""
    name, *modifiers = opcode.split(".")
    types = []
    while modifiers and modifiers[-1] in TYPES:
        types.insert(0, modifiers.pop())
    if not types:
        return None
    special = {"setp": _comparison, "selp": _selection, "cvt": _conversion, "mul": _product, "mad": _product}.get(name)
    found = special(name, modifiers, types) if special is not None else None
    if found is None:
        found = _float(name, modifiers, types) if is_float(types[0]) else _integer(name, modifiers, types)
    if found is not None and name in ("min", "max") and types == ["f32"] and count == 3:
        pick = found.function
        return Operation(lambda x, y, z: pick(pick(x, y), z), "f32", ("f32",) * 3)
    return found if found is not None and len(found.arguments) == count else None


def _float(name: str, modifiers: list[str], types: list[str]) -> Operation | None:
    """Arithmetic of floats; that of two types takes the second for all but its last argument, a sum's or fma's."""
    keeps_nan = "NaN" in modifiers
    function = {"min": _MINIMA[keeps_nan], "max": _MAXIMA[keeps_nan]}.get(name) or _FLOAT.get(name)
    is_mixed = len(types) == 2 and name in ("add", "sub", "fma") and types[0] == "f32"
    known = {"NaN"} if name in ("min", "max") else {"rn", "approx", "full"}
    if function is None or not (len(types) == 1 or is_mixed) or set(modifiers) - known - {"ftz"}:
        return None
    if types[0] == "f64" and name in ("fma", "min", "max", "rsqrt", "ex2", "lg2", "tanh"):
        return None
    if "ftz" in modifiers:
        function = _flushing(function)
    count = _ARGUMENTS.get(name, 2)
    return Operation(function, types[0], (types[-1],) * (count - 1) + (types[0],))


def _flushing(function: Function) -> Function:
    return lambda *arguments: flushed(function(*map(flushed, arguments)))


def _integer(name: str, modifiers: list[str], types: list[str]) -> Operation | None:
    if types == ["pred"] and name in ("and", "or", "xor", "not") and not modifiers:
        return Operation({**_JOINS, "not": np.logical_not}[name], "pred", ("pred",) * _ARGUMENTS.get(name, 2))
    if name not in _INTEGER or modifiers or len(types) != 1 or types == ["pred"]:
        return None
    if name in ("shl", "shr"):
        return Operation(_INTEGER[name], types[0], (types[0], "u32"))
    return Operation(_INTEGER[name], types[0], (types[0],) * _ARGUMENTS.get(name, 2))


def _product(name: str, modifiers: list[str], types: list[str]) -> Operation | None:
    """Products of integers: their low half, their high one, or all of them."""
    kind = types[0]
    if is_float(kind) or len(types) != 1 or len(modifiers) != 1 or modifiers[0] not in ("lo", "hi", "wide"):
        return None
    part, bits = modifiers[0], TYPES[kind].bits
    result, function = (f"{kind[0]}{2 * bits}" if part == "wide" else kind), np.multiply
    if part != "lo":
        if bits == 64:
            return None
        function = _wide_product(TYPES[f"{kind[0]}{2 * bits}"].dtype, bits if part == "hi" else 0, TYPES[result].dtype)
    if name == "mad":
        return Operation(lambda x, y, z: function(x, y) + z, result, (kind, kind, result))
    return Operation(function, result, (kind, kind))


def _wide_product(wide: Any, shift: int, dtype: Any) -> Function:
    return lambda x, y: ((x.astype(wide) * y.astype(wide)) >> wide(shift)).astype(dtype)


def _comparison(_: str, modifiers: list[str], types: list[str]) -> Operation | None:
    comparison, *more = [modifier for modifier in modifiers if modifier != "ftz"]
    compare, join = _COMPARISONS.get(comparison), _JOINS.get(more[0]) if more else None
    if compare is None or len(types) != 1 or len(more) > (join is not None):
        return None
    function = _flushing_arguments(compare) if "ftz" in modifiers else compare
    if join is None:
        return Operation(function, "pred", (types[0],) * 2)
    return Operation(lambda x, y, p: join(function(x, y), p), "pred", (types[0], types[0], "pred"))


def _flushing_arguments(function: Function) -> Function:
    return lambda *arguments: function(*map(flushed, arguments))


def _selection(_: str, modifiers: list[str], types: list[str]) -> Operation | None:
    if modifiers or len(types) != 1 or types[0].endswith("x2"):
        return None
    # Of the bits, since a NaN must keep its own.
    bits = f"b{TYPES[types[0]].bits}"
    return Operation(lambda x, y, p: np.where(p, x, y), bits, (bits, bits, "pred"))


def _conversion(_: str, modifiers: list[str], types: list[str]) -> Operation | None:
    if len(types) != 2 or set(modifiers) - {"rn", "ftz", *_ROUNDINGS}:
        return None
    result, kind = types
    flush = flushed if "ftz" in modifiers and kind == "f32" else _same
    rounding = next((_ROUNDINGS[modifier] for modifier in modifiers if modifier in _ROUNDINGS), _same)
    if result in ("f16x2", "bf16x2") and kind == "f32":
        # The first argument goes to the high half.
        return Operation(lambda x, y: np.stack(np.broadcast_arrays(flush(y), flush(x)), -1), result, ("f32", "f32"))
    if result.endswith("x2") or kind.endswith("x2") or (is_float(kind) and result.endswith("64") and result != "f64"):
        return None
    dtype = TYPES[result].dtype or (np.float64 if result == "f64" else np.float32)
    if is_float(kind) and not is_float(result):
        return Operation(lambda x: _to_integer(rounding(flush(x).astype(np.float64)), dtype), result, (kind,))
    return Operation(lambda x: rounding(flush(x).astype(dtype)), result, (kind,))


def _same(x: Any) -> Any:
    return x


def _to_integer(x: Any, dtype: Any) -> Any:
    """Whole numbers as integers: those beyond the ends as the ends, NaN as 0."""
    limits = np.iinfo(dtype)
    return np.clip(np.nan_to_num(x), limits.min, limits.max).astype(dtype)


def literal(text: str, bits: int) -> Any:
    """The bits of a literal, as an array of one element.

    Raises:
        ValueError: it is no literal.
    """
    number = int(text[2:], 16) if text[:2].lower() in ("0f", "0d") else int(text.rstrip("U"), 0)
    return np.array([number % (1 << bits)], UNSIGNED[bits])
