"""Copies kernels' Python functions with ``ct`` and everything made from it bound to something else.

A function is copied with new globals. Of the names that its code uses, the module ``cuda.tile`` becomes a namespace of
the caller, a function of ``cuda.tile`` becomes the namespace's function of that name, and any other function (a helper
of any module) is copied in the same way, closures included. So the interpreter runs kernels on the CPU, and CuTe DSL
compiles the formulas of cuTile kernels.
"""

from __future__ import annotations

import builtins
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import cuda.tile as ct

_STUBS = {id(getattr(ct, name)): name for name in ct.__all__ if isinstance(getattr(ct, name), FunctionType)}


class _Module:
    """A module of helpers that a kernel uses by attribute."""

    def __init__(self, module: ModuleType, rebinder: Rebinder) -> None:
        self._module, self._rebinder = module, rebinder

    def __getattr__(self, name: str) -> Any:
        return self._rebinder.value(getattr(self._module, name))


class Rebinder:
    """Copies functions, each once, so that helpers may be recursive.

    ``namespace`` replaces the module ``cuda.tile``, ``instead`` some helpers, ``builtin`` the built-ins.
    """

    def __init__(
        self, namespace: Any, instead: Mapping[FunctionType, Callable[..., Any]] | None = None,
        builtin: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._namespace, self._instead = namespace, instead or {}
        self._builtins = dict(vars(builtins) if builtin is None else builtin)
        self._copies: dict[int, FunctionType] = {}

    def function(self, original: FunctionType) -> FunctionType:
        """Return the copy of a function."""
        if id(original) in self._copies:
            return self._copies[id(original)]
        names: dict[str, Any] = {"__builtins__": self._builtins, "__name__": original.__module__}
        cells = tuple(CellType() for _ in original.__closure__ or ())
        copy = FunctionType(original.__code__, names, original.__name__, original.__defaults__, cells)
        copy.__kwdefaults__ = original.__kwdefaults__
        self._copies[id(original)] = copy
        real = original.__globals__
        names.update({name: self.value(real[name]) for name in set(_names(original.__code__)) if name in real})
        for cell, known in zip(cells, original.__closure__ or (), strict=True):
            try:
                cell.cell_contents = self.value(known.cell_contents)
            except ValueError:
                continue  # an empty cell: a name that the enclosing function has not bound yet
        return copy

    def value(self, value: Any) -> Any:
        """Return the replacement for the value of a global, closure or module."""
        if isinstance(value, FunctionType):
            return self._function_value(value)
        if isinstance(value, ModuleType):
            return self._module_value(value)
        # A container stays the same object, which code may fill, unless something in it is rebound.
        if type(value) in (tuple, list):
            items = [self.value(item) for item in value]
            return type(value)(items) if any(map(operator.is_not, items, value)) else value
        if type(value) is dict:
            entries = {key: self.value(item) for key, item in value.items()}
            return entries if any(map(operator.is_not, entries.values(), value.values())) else value
        return value

    def _function_value(self, value: FunctionType) -> Any:
        if value in self._instead:
            return self._instead[value]
        if id(value) in _STUBS:
            return getattr(self._namespace, _STUBS[id(value)])
        if getattr(value, "_cutile_function_wrapper", False):
            return self.function(value.__wrapped__)  # type: ignore[attr-defined]
        return value if _is_stdlib(value.__module__) else self.function(value)

    def _module_value(self, value: ModuleType) -> Any:
        if value is ct:
            return self._namespace
        return value if _is_stdlib(value.__name__) else _Module(value, self)


def _is_stdlib(module: str | None) -> bool:
    return module is None or module.partition(".")[0] in sys.stdlib_module_names


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
