"""Digests and shapes of functions: a patch recognises by them the code that it replaces.

A digest is the sha256 of a function's syntax tree without docstrings. Comments, blank lines, indentation and the
Python version do not change it; every name, constant, annotation and decorator does. A shape is looser and identifies
forms: functions quoted from transformers in the files of ``forms/``.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

FORMS = Path(__file__).with_name("forms")
_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Fields that only some versions of the parser set, and that are not code.
_NOTES = ("kind", "type_comment")
# Fields that do not count in a shape.
_UNSHAPED = (*_NOTES, "ctx", "returns", "decorator_list", "type_params")
# By id of the code object, which is kept alive here; equal code objects may have different source text.
_digests: dict[int, tuple[Any, str, int]] = {}


def digest_of(value: Any) -> str:
    """Return the digest of a function, or of the function inside a module made by the ``kernels`` package.

    Raises:
        ValueError: ``value`` is not a Python function, its source is missing, or something else wraps it.
    """
    function = function_of(value)
    if function is None:
        raise ValueError("it is not a plain Python function")
    if is_checkpointing(function) and isinstance(function.__wrapped__, FunctionType):  # type: ignore[attr-defined]
        function = function.__wrapped__  # type: ignore[attr-defined]
    code = getattr(inspect.unwrap(function), "__code__", None)
    known = _digests.get(id(code))
    if known is None:
        definition = definition_of(function)
        known = code, digest_of_tree(definition), len(definition.decorator_list)
        _digests[id(code)] = known
    # Each decorator adds at most one wrapper.
    wrappers = 0
    while (function := getattr(function, "__wrapped__", None)) is not None:
        wrappers += 1
    if wrappers > known[2]:
        raise ValueError("something has been wrapped around it")
    return known[1]


def definition_of(function: Any) -> ast.FunctionDef:
    """Return the definition of a function, parsed from its source.

    Raises:
        ValueError: the source is not available.
    """
    with contextlib.suppress(OSError, TypeError, SyntaxError):
        definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        if isinstance(definition, ast.FunctionDef):
            return definition
    raise ValueError("its source is not at hand")


def is_checkpointing(function: Any) -> bool:
    """Return whether a function is the wrapper of transformers 5.23 and later around a layer's forward."""
    made_by = getattr(function, "__globals__", {}).get("__name__")
    return made_by == "transformers.modeling_layers" and hasattr(function, "__wrapped__")


def function_of(value: Any) -> FunctionType | None:
    """Return the Python function that ``value`` is or stands for, or None.

    The ``kernels`` package turns decorated functions into instances of a module class whose ``forward`` calls the
    function as ``func``; an instance whose ``forward`` was replaced represents no function.
    """
    if isinstance(value, FunctionType):
        return value
    forward = getattr(type(value), "forward", None)
    if isinstance(forward, FunctionType) and "forward" not in getattr(value, "__dict__", {}):
        inner = inspect.getclosurevars(forward).nonlocals.get("func")
        return inner if isinstance(inner, FunctionType) else None
    return None


def digest_of_tree(tree: ast.AST) -> str:
    """Return the sha256 of a syntax tree."""
    return hashlib.sha256("".join(_pieces(tree)).encode()).hexdigest()


def _pieces(node: Any) -> Iterator[str]:
    """Yield the tree as text, without empty fields, since Python versions have different ones."""
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


def shape_of(function: ast.FunctionDef) -> str:
    """Return a function's tree as text, with numbered variables and no annotations, decorators and docstrings.

    Functions with the same shape compute the same if the attributes and globals that they name are the same. The
    function's own name does not count; the name ``self`` does.
    """
    nodes = list(ast.walk(function))
    stored = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    own = (stored | {x.arg for x in nodes if isinstance(x, ast.arg)}) - {"self"}
    numbers: dict[str, str] = {}
    parts: list[str] = []

    def add(node: Any) -> None:
        if isinstance(node, ast.Name | ast.arg):
            name = node.id if isinstance(node, ast.Name) else node.arg
            parts.append(f"{numbers.setdefault(name, str(len(numbers))) if name in own else name},")
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                add(ast.Assign([node.target], node.value))
        elif isinstance(node, ast.AST):
            parts.append(f"{type(node).__name__}(")
            for name in node._fields:
                if name not in _UNSHAPED:
                    value = getattr(node, name, None)
                    add(_undocumented(node, value) if name == "body" else value)
            parts.append(")")
        elif isinstance(node, list):
            parts.append("[")
            for item in node:
                add(item)
            parts.append("]")
        else:
            parts.append(f"{node!r},")

    add(function.args)
    add(_undocumented(function, function.body))
    return "".join(parts)


@functools.cache
def quoted(file: str) -> dict[str, ast.FunctionDef]:
    """Return the functions in a file of ``forms/`` by path: ``Class.method``, or the name of a function."""
    body = ast.parse((FORMS / f"{file}.py").read_text(encoding="utf-8")).body
    found = {x.name: x for x in body if isinstance(x, ast.FunctionDef)}
    for kind in body:
        if isinstance(kind, ast.ClassDef):
            found |= {f"{kind.name}.{x.name}": x for x in kind.body if isinstance(x, ast.FunctionDef)}
    return found


class Table:
    """Values of the forms in a file of ``forms/``, found by the shapes of functions."""

    def __init__(
        self, file: str, rows: Mapping[str, Any],
        reduced: Callable[[ast.FunctionDef], ast.FunctionDef] = lambda function: function,
    ) -> None:  # fmt: skip
        """Make a table.

        Args:
            file: the name of the file.
            rows: values by form. A form is a class (meaning its ``forward``) or the path of a function; " + " joins
                several functions that belong together.
            reduced: returns what of a function counts; all by default.
        """
        self.file, self.rows, self._reduced = file, rows, reduced

    @functools.cached_property
    def _by_shapes(self) -> dict[tuple[str, ...], Any]:
        shapes = {path.removesuffix(".forward"): self._shape_of(x) for path, x in quoted(self.file).items()}
        return {tuple(shapes[path] for path in form.split(" + ")): value for form, value in self.rows.items()}

    def _shape_of(self, function: ast.FunctionDef) -> str:
        return shape_of(self._reduced(function))

    def get(self, *functions: ast.FunctionDef) -> Any:
        """Return the value of the form whose functions have the same shapes as these, else None."""
        return self._by_shapes.get(tuple(map(self._shape_of, functions)))
