"""Represent a kernel's arguments in the form that cuTile's launcher passes.

An array of n axes is 1 + 2 n parameters of the cubin: its address, then its n sizes and its n strides in elements, all
int32; a scalar is one. CuTe DSL makes a parameter of each value of a tuple, in its order.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import cuda.tile as ct
import cutlass
from cutlass import Float32, Int32, Int64, cute

from tilekern.spec import ArrayParameter, ScalarParameter

ALIGNED_BYTES = 16
NUMERIC = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}


class Argument:
    """An array in a kernel, from its parameter and the passed values: address, sizes and strides."""

    def __init__(self, parameter: ArrayParameter, values: Any) -> None:
        self.parameter, self.address = parameter, values[0]
        self.sizes, self._strides = values[1 : 1 + parameter.ndim], values[1 + parameter.ndim :]

    @property
    def dtype(self) -> Any:
        """Return the dtype of cuTile."""
        return getattr(ct, self.parameter.dtype)

    @property
    def numeric(self) -> Any:
        """Return the dtype of CuTe DSL."""
        return NUMERIC[self.parameter.dtype]

    def row(self, place: tuple[Any, ...]) -> Any:
        """Return the number of elements before a row; ``place`` is its index in each axis except the last."""
        # The variant's assumptions promise rows that begin at whole 16 bytes.
        divisor = 8 * ALIGNED_BYTES // self.numeric.width
        steps = [
            index * cute.assume(Int64(stride), divby=divisor)
            for index, stride in zip(place, self._strides[:-1], strict=True)
        ]
        return functools.reduce(operator.add, steps) if steps else Int64(0)


def samples(parameters: tuple[ArrayParameter | ScalarParameter, ...]) -> tuple[Any, ...]:
    """Make sample arguments of an aligned variant: they tell the compiler dtypes, ranks and alignment."""
    return tuple(map(_sample, parameters))


def _sample(parameter: ArrayParameter | ScalarParameter) -> Any:
    if isinstance(parameter, ScalarParameter):
        return Float32(0.0) if parameter.dtype == "float32" else Int32(0)
    address = cute.runtime.make_ptr(
        NUMERIC[parameter.dtype], ALIGNED_BYTES, cute.AddressSpace.gmem, assumed_align=ALIGNED_BYTES
    )
    return (address, *(Int32(0) for _ in range(2 * parameter.ndim)))
