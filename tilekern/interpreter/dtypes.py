"""cuTile's dtypes on torch: which torch dtype carries which, how two of them promote, how one becomes another."""

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
    ct.uint64: torch.uint64,
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
}
FROM_TORCH = {carrier: dtype for dtype, carrier in IN_MEMORY.items()}
# torch has next to no arithmetic for the wider unsigned integers, and no tfloat32 at all.
WIDE_UNSIGNED = {ct.uint16: 0xFFFF, ct.uint32: 0xFFFF_FFFF, ct.uint64: None}
CARRIERS = {**IN_MEMORY, **dict.fromkeys(WIDE_UNSIGNED, torch.int64), ct.tfloat32: torch.float32}
HALVES = (ct.float16, ct.bfloat16)
FLOATS = (ct.float16, ct.bfloat16, ct.float32, ct.float64)
RESTRICTED_FLOATS = (ct.tfloat32, ct.float8_e4m3fn, ct.float8_e5m2)
SIGNED = (ct.int8, ct.int16, ct.int32, ct.int64)
UNSIGNED = (ct.uint8, *WIDE_UNSIGNED)
INTEGERS = (*SIGNED, *UNSIGNED)


def dtype_of(tensor: torch.Tensor) -> Any:
    """The ct dtype of a tensor's elements."""
    try:
        return FROM_TORCH[tensor.dtype]
    except KeyError:
        raise InterpreterError(f"the interpreter does not know arrays of {tensor.dtype}") from None


def carrier_of(dtype: Any) -> torch.dtype:
    """The torch dtype in which tiles of a ct dtype are computed."""
    try:
        return CARRIERS[dtype]
    except (KeyError, TypeError):
        raise InterpreterError(f"the interpreter does not know tiles of {dtype}") from None


def from_memory(data: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Elements as they lie in an array, in the form in which tiles compute; may share memory."""
    if dtype not in WIDE_UNSIGNED:
        return data
    return data.view(torch.int64) if dtype == ct.uint64 else data.to(torch.int64)


def to_memory(data: torch.Tensor, dtype: Any) -> torch.Tensor:
    """The reverse of :func:`from_memory`."""
    if dtype == ct.tfloat32:
        raise InterpreterError("tfloat32 has no form in memory: cast with astype first")
    if dtype not in WIDE_UNSIGNED:
        return data
    return data.view(torch.uint64) if dtype == ct.uint64 else data.to(IN_MEMORY[dtype])


def wrapped(data: torch.Tensor, dtype: Any) -> torch.Tensor:
    """The result of integer arithmetic in a carrier, wrapped around as the dtype itself would."""
    mask = WIDE_UNSIGNED.get(dtype)
    return data if mask is None else data & mask


def cast(data: torch.Tensor, source: Any, target: Any) -> torch.Tensor:
    """Carrier data of one dtype as carrier data of another, rounded to nearest even."""
    if source == target:
        return data
    if source == ct.uint64 and target not in INTEGERS:
        refuse_large_uint64(data, "conversion")
    if target == ct.bool_:
        return data != 0
    if target == ct.tfloat32:
        return _to_tfloat32(data.float())
    return wrapped(data.to(carrier_of(target)), target)


def refuse_large_uint64(data: torch.Tensor, operation: str) -> None:
    """uint64 is carried by int64, which is right for wrap-around arithmetic only."""
    if bool((data < 0).any()):
        raise InterpreterError(f"the interpreter does not know {operation} of uint64 values of 2**63 and more")


def _to_tfloat32(data: torch.Tensor) -> torch.Tensor:
    """Float32 with 10 bits of mantissa, to nearest even; infinities and NaNs stay what they are."""
    bits = data.view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(data.isfinite(), rounded.view(torch.float32), data)


@functools.cache
def promoted(left: Any, right: Any, force_float: bool = False) -> Any:
    """The dtype in which two tiles meet: the compiler's own rule."""
    try:
        return promote_dtypes(left, right, force_float)
    except ct.TileError as error:
        raise InterpreterError(first_line(error)) from None


@functools.lru_cache(maxsize=4096, typed=True)
def promoted_with_scalar(dtype: Any, value: Scalar, force_float: bool = False) -> Any:
    """The dtype in which a tile and a Python scalar, which is weakly typed, meet: the compiler's own rule."""
    try:
        return promote_dtypes(dtype, LooselyTypedScalar(value), force_float)
    except ct.TileError as error:
        raise InterpreterError(first_line(error)) from None


def first_line(error: Exception) -> str:
    """The text of a compiler's error, without its lines on a place in the source, which is not known here."""
    return str(error).partition("\n")[0]


def check_stored(dtype: Any, target: Any, what: str) -> None:
    """Refuse the implicit conversions that the compiler refuses when a tile is stored."""
    if dtype != target:
        _check_cast(TileTy(dtype, ()), target, what)


def check_stored_scalar(value: Scalar, target: Any, what: str) -> None:
    """The same for a Python scalar."""
    _check_cast(LooselyTypedScalar(value), target, what)


def _check_cast(source: Any, target: Any, what: str) -> None:
    try:
        check_implicit_cast(source, target)
    except ct.TileError as error:
        raise InterpreterError(f"{what}: {first_line(error)}") from None


def filled(value: Scalar, dtype: Any, shape: tuple[int, ...] = ()) -> torch.Tensor:
    """Carrier data with the same value everywhere."""
    if dtype == ct.tfloat32:
        return _to_tfloat32(torch.full(shape, value, dtype=torch.float32, device="cpu"))
    if dtype in INTEGERS:
        bits = int(dtype.bitwidth)
        lowest = -(1 << (bits - 1)) if dtype in SIGNED else 0
        value = int(value)
        if not lowest <= value < lowest + (1 << bits):
            raise InterpreterError(f"{value} is out of range of {dtype}")
        if dtype == ct.uint64 and value >= 1 << 63:
            value -= 1 << 64
    return torch.full(shape, value, dtype=carrier_of(dtype), device="cpu")


@functools.lru_cache(maxsize=1024)
def check_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A tile's shape, refused as the compiler would unless every dimension is a power of two."""
    if any(type(size) is not int or size < 1 or size & (size - 1) for size in shape):
        raise InterpreterError(f"a tile's shape must be powers of two, got {shape}")
    return shape


def shape_of(shape: Any) -> tuple[int, ...]:
    """A shape as kernels write it: one int or a tuple of ints."""
    return check_shape((shape,) if isinstance(shape, int) else tuple(shape))


def normal_axis(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    if not -rank <= axis < rank:
        raise InterpreterError(f"axis {axis} is out of range for rank {rank}")
    return axis % rank
