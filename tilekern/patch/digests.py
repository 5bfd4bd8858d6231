"""Digests of functions: what a patch knows of the code that it replaces.

A digest is the sha256 of a function's syntax tree without docstrings, so that comments, blank lines, indentation and
the version of Python do not matter, while every name, constant, annotation and decorator does.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any

_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# What older and newer parsers note beside the code itself.
_NOTES = ("kind", "type_comment")
# By the identity of code objects, which stay alive here: code that is equal may have another text around it.
_found: dict[int, tuple[Any, str, int]] = {}


def digest_of(value: Any) -> str:
    """The digest of a function, or of the function inside a module that the ``kernels`` package made of one.

    Raises:
        ValueError: ``value`` is not a Python function, its source is missing, or something has been wrapped around it.
    """
    function = function_of(value)
    if function is None:
        raise ValueError("it is not a plain Python function")
    function = _uncheckpointed(function)
    digest, decorators = _read(function)
    if _wrappers(function) > decorators:
        raise ValueError("something has been wrapped around it")
    return digest


def _wrappers(function: Any) -> int:
    """The number of functions around the innermost one, as far as they tell; each decorator makes one at most."""
    count = 0
    while (function := getattr(function, "__wrapped__", None)) is not None:
        count += 1
    return count


def _read(function: FunctionType) -> tuple[str, int]:
    """The digest of a function's definition, and how many decorators that has; read once for each code object."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    known = _found.get(id(code))
    if known is None:
        try:
            definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        except (OSError, TypeError, SyntaxError):
            raise ValueError("its source is not at hand") from None
        known = code, digest_of_tree(definition), len(getattr(definition, "decorator_list", ()))
        _found[id(code)] = known
    return known[1:]


def _uncheckpointed(function: FunctionType) -> FunctionType:
    """The layer's forward inside the wrapper that transformers from 5.23 on puts around it as the class is made."""
    inner = getattr(function, "__wrapped__", None)
    return inner if isinstance(inner, FunctionType) and is_checkpointing(function) else function


def is_checkpointing(function: Any) -> bool:
    """Whether a function is the wrapper that transformers from 5.23 on puts around a layer's forward."""
    made_by = getattr(function, "__globals__", {}).get("__name__")
    return made_by == "transformers.modeling_layers" and hasattr(function, "__wrapped__")


def function_of(value: Any) -> FunctionType | None:
    """The Python function that ``value`` is or stands for, or None.

    The ``kernels`` package, where it is installed, turns decorated functions into instances of a module class whose
    ``forward`` calls the function as ``func``; one whose ``forward`` was exchanged stands for no function.
    """
    if isinstance(value, FunctionType):
        return value
    forward = getattr(type(value), "forward", None)
    if isinstance(forward, FunctionType) and "forward" not in getattr(value, "__dict__", {}):
        inner = inspect.getclosurevars(forward).nonlocals.get("func")
        return inner if isinstance(inner, FunctionType) else None
    return None


def digest_of_tree(tree: ast.AST) -> str:
    """The sha256 of a syntax tree."""
    return hashlib.sha256("".join(_pieces(tree)).encode()).hexdigest()


def _pieces(node: Any) -> Iterator[str]:
    """The tree as text; fields that are empty are left out, since versions of Python differ in which they have."""
    if isinstance(node, ast.AST):
        yield f"{type(node).__name__}("
        for name, value in ast.iter_fields(node):
            kept = _undocumented(node, value) if name == "body" else value
            if name not in _NOTES and kept is not None and kept != []:
                yield f"{name}="
                yield from _pieces(kept)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for item in node:
            yield from _pieces(item)
            yield ","
        yield "]"
    else:
        yield repr(node)


def _undocumented(node: ast.AST, body: Any) -> Any:
    if not isinstance(node, _DOCUMENTED) or ast.get_docstring(node, clean=False) is None:
        return body
    return body[1:]
