"""The stand-ins for ``ct`` and for the built-ins while the interpreter runs a kernel."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from tilekern.interpreter import functions, memory
from tilekern.interpreter.arithmetic import arithmetic
from tilekern.interpreter.dtypes import CARRIERS
from tilekern.interpreter.errors import InterpreterError
from tilekern.interpreter.races import Launch
from tilekern.interpreter.tiles import Tile

_AS_THEY_ARE = (*(dtype.name for dtype in CARRIERS), "Constant", "PaddingMode", "RoundingMode", "function", "kernel")
OFFERED: dict[str, Any] = {
    **{name: getattr(ct, name) for name in _AS_THEY_ARE},
    **functions.FUNCTIONS,
    **memory.FUNCTIONS,
}
LAUNCH_FUNCTIONS = ("bid", "num_blocks", "grid_dependency_control_wait")


class Namespace:
    """Stand-in for the module ``cuda.tile`` while a launch runs."""

    def __init__(self, launch: Launch) -> None:
        self.__dict__.update(OFFERED)
        self.__dict__["bid"] = lambda axis: launch.block[axis]
        self.__dict__["num_blocks"] = lambda axis: launch.sizes[axis]
        self.__dict__["grid_dependency_control_wait"] = launch.wait

    def __getattr__(self, name: str) -> Any:
        raise InterpreterError(f"the interpreter does not know ct.{name}")


def _elementwise(name: str, python: Callable[..., Any]) -> Callable[..., Any]:
    def choose(*values: Any, **options: Any) -> Any:
        if any(isinstance(value, Tile) for value in values):
            return functools.reduce(functools.partial(arithmetic, name), values)
        return python(*values, **options)

    return choose


# In kernels, the built-in min and max of tiles are elementwise; the other built-ins reach tiles by their operators.
BUILTINS = {**vars(builtins), "min": _elementwise("minimum", min), "max": _elementwise("maximum", max)}
