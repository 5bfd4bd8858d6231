"""cuTile's dtypes on torch: carriers, promotion, casts."""

from __future__ import annotations

import functools
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile._ir.cast_ops import check_implicit_cast
from cuda.tile._ir.ops_utils import promote_dtypes
from cuda.tile._ir.type import LooselyTypedScalar, TileTy

from tilekern.interpreter.errors import InterpreterError

Scalar = bool | int | float

IN_MEMORY: dict[Any, torch.dtype] = {
    ct.bool_: torch.bool,
    ct.uint8: torch.uint8,
    ct.uint16: torch.uint16,
    ct.uint32: torch.uint32,
    ct.int8: torch.int8,
    ct.int16: torch.int16,
    ct.int32: torch.int32,
    ct.int64: torch.int64,
    ct.float16: torch.float16,
    ct.bfloat16: torch.bfloat16,
    ct.float32: torch.float32,
    ct.float64: torch.float64,
    ct.float8_e4m3fn: torch.float8_e4m3fn,
    ct.float8_e5m2: torch.float8_e5m2,
    ct.float8_e8m0fnu: torch.float8_e8m0fnu,
}
_FROM_TORCH = {carrier: dtype for dtype, carrier in IN_MEMORY.items()}
# torch has almost no arithmetic for the wider unsigned integers, and no tfloat32.
_WIDE_UNSIGNED = {ct.uint16: 0xFFFF, ct.uint32: 0xFFFF_FFFF}
CARRIERS = {**IN_MEMORY, **dict.fromkeys(_WIDE_UNSIGNED, torch.int64), ct.tfloat32: torch.float32}
HALVES = (ct.float16, ct.bfloat16)
FLOATS = (ct.float16, ct.bfloat16, ct.float32, ct.float64)
RESTRICTED_FLOATS = (ct.tfloat32, ct.float8_e4m3fn, ct.float8_e5m2, ct.float8_e8m0fnu)
SIGNED = (ct.int8, ct.int16, ct.int32, ct.int64)
UNSIGNED = (ct.uint8, *_WIDE_UNSIGNED)
INTEGERS = (*SIGNED, *UNSIGNED)


def dtype_of(tensor: torch.Tensor) -> Any:
    """Return the ct dtype of a tensor's elements."""
    try:
        return _FROM_TORCH[tensor.dtype]
    except KeyError:
        raise InterpreterError(f"the interpreter does not know arrays of {tensor.dtype}") from None


def carrier_of(dtype: Any) -> torch.dtype:
    """Return the torch dtype in which tiles of a ct dtype are computed."""
    try:
        return CARRIERS[dtype]
    except (KeyError, TypeError):
        raise InterpreterError(f"the interpreter does not know tiles of {dtype}") from None


def is_float(dtype: Any) -> bool:
    """Tell whether a dtype is a float of any kind."""
    return dtype in FLOATS or dtype in RESTRICTED_FLOATS


def is_scalar(value: Any) -> bool:
    """Tell whether a value is a Python scalar."""
    return isinstance(value, (bool, int, float))


def from_memory(data: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Convert elements of an array to their carrier; the result may share memory."""
    return data.to(torch.int64) if dtype in _WIDE_UNSIGNED else data


def to_memory(data: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Convert carrier data to elements of an array."""
    if dtype == ct.tfloat32:
        raise InterpreterError("tfloat32 has no form in memory: cast with astype first")
    return data.to(IN_MEMORY[dtype]) if dtype in _WIDE_UNSIGNED else data


def wrapped(data: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Wrap integer results in a carrier around as the dtype itself would."""
    mask = _WIDE_UNSIGNED.get(dtype)
    return data if mask is None else data & mask


def cast(data: torch.Tensor, source: Any, target: Any) -> torch.Tensor:
    """Convert carrier data from one dtype to another, rounding to nearest even."""
    if source == target:
        return data
    if target == ct.bool_:
        return data != 0
    if target == ct.tfloat32:
        return _to_tfloat32(data.float())
    return wrapped(data.to(carrier_of(target)), target)


def _to_tfloat32(data: torch.Tensor) -> torch.Tensor:
    """Round float32 to 10 bits of mantissa, to nearest even; keep infinities and NaNs."""
    bits = data.view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(data.isfinite(), rounded.view(torch.float32), data)


@functools.lru_cache(maxsize=4096, typed=True)
def promoted(dtype: Any, other: Any, force_float: bool = False) -> Any:
    """Return the common dtype of a tile's dtype and another dtype or a Python scalar, by the compiler's own rule."""
    try:
        return promote_dtypes(dtype, LooselyTypedScalar(other) if is_scalar(other) else other, force_float)
    except ct.TileError as error:
        raise InterpreterError(first_line(error)) from None


def first_line(error: Exception) -> str:
    """Return a compiler error's text without its lines about the source, which is not known here."""
    return str(error).partition("\n")[0]


def check_stored(value: Any, target: Any, what: str) -> None:
    """Refuse implicit conversions in a store that the compiler refuses."""
    if value == target:
        return
    try:
        check_implicit_cast(LooselyTypedScalar(value) if is_scalar(value) else TileTy(value, ()), target)
    except ct.TileError as error:
        raise InterpreterError(f"{what}: {first_line(error)}") from None


def filled(value: Scalar, dtype: Any, shape: tuple[int, ...] = ()) -> torch.Tensor:
    """Make carrier data with the same value everywhere."""
    if dtype == ct.tfloat32:
        return _to_tfloat32(torch.full(shape, value, dtype=torch.float32, device="cpu"))
    if dtype in INTEGERS:
        bits = int(dtype.bitwidth)
        lowest = -(1 << (bits - 1)) if dtype in SIGNED else 0
        value = int(value)
        if not lowest <= value < lowest + (1 << bits):
            raise InterpreterError(f"{value} is out of range of {dtype}")
    return torch.full(shape, value, dtype=carrier_of(dtype), device="cpu")


@functools.lru_cache(maxsize=1024)
def check_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tile's shape; refuse, as the compiler does, a dimension that is not a power of two."""
    if any(type(size) is not int or size < 1 or size & (size - 1) for size in shape):
        raise InterpreterError(f"a tile's shape must be powers of two, got {shape}")
    return shape


def shape_of(shape: Any) -> tuple[int, ...]:
    """Return a shape that a kernel wrote as one int or a tuple of ints."""
    return check_shape((shape,) if isinstance(shape, int) else tuple(shape))


def normal_axis(axis: int, rank: int) -> int:
    """Return an axis counted from the front."""
    if not -rank <= axis < rank:
        raise InterpreterError(f"axis {axis} is out of range for rank {rank}")
    return axis % rank
