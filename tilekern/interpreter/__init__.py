"""Run cuTile kernels on CPU tensors, block by block, with no GPU and no compiler, and check their memory accesses.

A kernel's own Python function is executed with ``ct`` bound to this package, where a tile is a torch tensor. Blocks run
in a shuffled order, the same at every launch. Errors:

- :class:`OutOfBounds`: an access outside an array that the kernel neither masks nor pads.
- :class:`InterpreterError`: two blocks touch the same element and one of them stores it; a block of a dependent launch
  touches memory other than constants, or lets the next kernel be launched, before it has waited; a block stores to a
  constant; or the kernel uses a part of ``ct`` that no kernel of tilekern uses (most atomics, ``scan``, ``matmul``,
  printing).
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import random
import typing
from collections.abc import Callable
from types import FunctionType
from typing import Any

import cuda.tile as ct
import torch

from tilekern.compile.rebinding import Rebinder
from tilekern.interpreter.arithmetic import arithmetic
from tilekern.interpreter.arrays import Array
from tilekern.interpreter.dtypes import CARRIERS
from tilekern.interpreter.errors import InterpreterError, OutOfBounds
from tilekern.interpreter.functions import FUNCTIONS
from tilekern.interpreter.memory import FUNCTIONS as MEMORY_FUNCTIONS
from tilekern.interpreter.races import Launch
from tilekern.interpreter.tiles import Tile, as_tile

__all__ = ["InterpreterError", "OutOfBounds", "launch"]

# The stand-ins for ``ct`` and for the built-ins while a kernel runs.
_AS_THEY_ARE = (
    *(dtype.name for dtype in CARRIERS), "Constant", "MemoryOrder", "PaddingMode", "RoundingMode", "function", "kernel",
)  # fmt: skip
OFFERED: dict[str, Any] = {
    **{name: getattr(ct, name) for name in _AS_THEY_ARE},
    **FUNCTIONS,
    **MEMORY_FUNCTIONS,
}


class Namespace:
    """Stand-in for the module ``cuda.tile`` while a launch runs."""

    def __init__(self, launch: Launch) -> None:
        self.__dict__.update(OFFERED)
        self.__dict__["bid"] = lambda axis: launch.block[axis]
        self.__dict__["num_blocks"] = lambda axis: launch.sizes[axis]
        self.__dict__["grid_dependency_control_wait"] = launch.wait
        self.__dict__["grid_dependency_control_launch_dependents"] = launch.launch_next

    def __getattr__(self, name: str) -> Any:
        raise InterpreterError(f"the interpreter does not know ct.{name}")


def _elementwise(name: str, python: Callable[..., Any]) -> Callable[..., Any]:
    def choose(*values: Any, **options: Any) -> Any:
        if any(isinstance(value, Tile) for value in values):
            return functools.reduce(functools.partial(arithmetic, name), values)
        return python(*values, **options)

    return choose


# In kernels, the built-in min and max of tiles are elementwise; other built-ins use the tiles' operators.
BUILTINS = {**vars(builtins), "min": _elementwise("minimum", min), "max": _elementwise("maximum", max)}


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], *, check_races: bool = True,
    dependent: bool = False, constants: frozenset[str] = frozenset(),
) -> None:  # fmt: skip
    """Run a kernel (``ct.kernel`` or a plain function) over a grid of one to three axes; it writes tensors in place.

    Arguments are in the kernel's order: CPU tensors of any strides, Python scalars and constants. A float that is not
    annotated as ``ct.Constant`` is a float32 scalar tile in the kernel, as on the GPU. For ``dependent``, and for
    ``constants``, the names of arrays that a dependent kernel may read before it waits, see
    :class:`tilekern.spec.Implementation`.
    """
    function: FunctionType = getattr(kernel, "_pyfunc", kernel)
    if not 1 <= len(grid) <= 3 or any(size < 1 for size in grid):
        raise InterpreterError(f"a grid has one to three positive sizes, got {grid}")
    parameters = _parameters(function)
    if len(arguments) != len(parameters):
        raise InterpreterError(f"kernel {function.__name__} takes {len(parameters)} arguments, got {len(arguments)}")
    running = Launch(function.__name__, tuple(grid), check_races, _shuffled(math.prod(grid)), dependent, constants)
    values = [
        _argument(running, name, constant, value) for (name, constant), value in zip(parameters, arguments, strict=True)
    ]
    body = Rebinder(Namespace(running), builtin=BUILTINS).function(function)
    with torch.no_grad():
        for number in range(len(running.order)):
            running.enter(number)
            try:
                body(*values)
            except Exception as error:
                error.add_note(f"in kernel {running.kernel}, block {running.where()} of grid {running.grid}")
                raise
        running.finish()


@functools.lru_cache(maxsize=512)
def _parameters(function: FunctionType) -> tuple[tuple[str, bool], ...]:
    hints = typing.get_type_hints(function, include_extras=True)
    return tuple(
        (name, any(isinstance(extra, ct.ConstantAnnotation) for extra in typing.get_args(hints.get(name))[1:]))
        for name in inspect.signature(function).parameters
    )


@functools.lru_cache(maxsize=64)
def _shuffled(blocks: int) -> tuple[int, ...]:
    order = list(range(blocks))
    random.Random(blocks).shuffle(order)
    return tuple(order[::-1] if order == sorted(order) else order)


def _argument(running: Launch, name: str, constant: bool, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Array(running, name, value)
    if type(value) in (list, tuple):
        return type(value)(_argument(running, f"{name}[{i}]", constant, item) for i, item in enumerate(value))
    if isinstance(value, float) and not constant:
        return as_tile(value, ct.float32)
    return value
