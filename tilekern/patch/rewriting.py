"""Compile a function again from its source with some statements changed; its other code and globals stay the same."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

# Decorators that only write documentation, slowly.
_DOCUMENTING = ("auto_docstring", "replace_return_docstrings", "add_start_docstrings")


def rewritten(function: Any, change: Callable[[ast.FunctionDef], int], variables: dict[str, Any]) -> FunctionType:
    """Return a twin of ``function`` whose text ``change`` has changed, with the same decorators.

    Args:
        function: a plain function, or one inside decorators that are in its text.
        change: changes the definition in place; returns 0 if it could not.
        variables: additional variables of the changed text, which become closure variables.

    Raises:
        ValueError: the function has closure variables already, its source is not available, or nothing was changed.
    """
    core = inspect.unwrap(function)
    if not isinstance(core, FunctionType) or core.__code__.co_freevars:
        raise ValueError("cannot be compiled again on its own")
    try:
        lines, first = inspect.getsourcelines(core)
    except OSError:
        raise ValueError("has no source at hand") from None
    definition = ast.parse(textwrap.dedent("".join(lines))).body[0]
    if not isinstance(definition, ast.FunctionDef) or not change(definition):
        raise ValueError("is not what was to be changed")
    definition.decorator_list = [x for x in definition.decorator_list if not _is_documenting(x)]
    ast.increment_lineno(definition, first - 1)
    frame = ast.parse(f"def make({', '.join(variables)}):\n    return {core.__name__}")
    frame.body[0].body.insert(0, definition)  # type: ignore[attr-defined]
    made: dict[str, Any] = {}
    code: CodeType = compile(ast.fix_missing_locations(frame), core.__code__.co_filename, "exec", dont_inherit=True)
    exec(code, core.__globals__, made)
    twin: FunctionType = made["make"](*variables.values())
    twin.__doc__ = function.__doc__
    inner = inspect.unwrap(twin)
    inner.__qualname__, inner.__module__ = core.__qualname__, core.__module__
    return twin


def named_as(function: Any, original: Any) -> Any:
    """Rename the arguments of ``function`` to those of ``original``, so that callers may pass them by name."""
    names = original.__code__.co_varnames[: original.__code__.co_argcount]
    code = function.__code__
    function.__code__ = code.replace(co_varnames=(*names, *code.co_varnames[len(names) :]))
    return function


def _is_documenting(decorator: ast.expr) -> bool:
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(name, ast.Name) and name.id in _DOCUMENTING
