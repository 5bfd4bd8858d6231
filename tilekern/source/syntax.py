"""The content of a piece of source: the names that it looks up, those that it binds, and its form without the words."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# A name with the attributes that are read of it: ``shared.formula`` is ("shared", "formula").
Chain = tuple[str, ...]
# What an import binds: a dotted name, and the attribute that is taken of it, or None.
Import = tuple[str, str | None]
# Fields that a Python adds to each node without the source saying so.
_UNSAID = frozenset({"ctx", "type_comment", "kind"})
# A class that is named as text, so that it is imported only where it is wanted.
_NAMED_CLASS = re.compile(r"([a-z_]\w*(?:\.[a-z_]\w*)+):([A-Z]\w*)")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, eq=False)
class Names:
    """The names that a piece of source looks up outside of itself, and what its own import statements bind."""

    chains: frozenset[Chain]
    imports: Mapping[str, Import]


@functools.cache
def names_in(node: ast.AST) -> Names:
    """The names that a piece of source looks up outside of itself."""
    reader = _Reader()
    reader.read(node, frozenset())
    return Names(frozenset(reader.chains), reader.imports)


class _Reader:
    """Collects the names that are read and not bound by the function, lambda or comprehension around them."""

    def __init__(self) -> None:
        self.chains: set[Chain] = set()
        self.imports: dict[str, Import] = {}

    def read(self, node: ast.AST, bound: frozenset[str]) -> None:
        if isinstance(node, ast.Name | ast.Attribute):
            self._read_chain(node, bound)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if named := _NAMED_CLASS.fullmatch(node.value):
                self.imports[node.value] = (named[1], named[2])
                self.chains.add((node.value,))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self.imports.update(bindings(node))
            self.chains.update((name,) for name, (_, attribute) in bindings(node) if attribute is not None)
        elif isinstance(node, _FUNCTIONS):
            body = node.body if isinstance(node.body, list) else [node.body]
            for outer in ast.iter_child_nodes(node):
                if outer not in body:
                    self.read(outer, bound)
            inner = bound | _parameters(node.args) | stored(*body)
            for statement in body:
                self.read(statement, inner)
        elif isinstance(node, _COMPREHENSIONS):
            self.read(node.generators[0].iter, bound)
            inner = bound | stored(*(each.target for each in node.generators))
            for child in ast.iter_child_nodes(node):
                self.read(child, inner)
        else:
            for child in ast.iter_child_nodes(node):
                self.read(child, bound)

    def _read_chain(self, node: ast.Name | ast.Attribute, bound: frozenset[str]) -> None:
        chain = chain_of(node)
        if chain is None:
            for child in ast.iter_child_nodes(node):
                self.read(child, bound)
        elif chain[0] not in bound and (isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load)):
            self.chains.add(chain)


def _parameters(arguments: ast.arguments) -> frozenset[str]:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return frozenset(argument.arg for argument in named if argument is not None)


def stored(*nodes: ast.AST) -> frozenset[str]:
    """The names that statements bind in the function or module that they stand in, but for what they import."""
    found: set[str] = set()
    elsewhere: set[str] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            elsewhere.update(name for name, _ in bindings(node))
        elif isinstance(node, ast.Global):
            elsewhere.update(node.names)
        elif not isinstance(node, ast.Lambda | ast.comprehension):
            if isinstance(node, ast.ExceptHandler) and node.name:
                found.add(node.name)
            waiting += ast.iter_child_nodes(node)
    return frozenset(found - elsewhere)


def bindings(statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Import]]:
    """The names that an import statement binds, each with what it stands for."""
    for alias in statement.names:
        top = alias.name.split(".")[0]
        if isinstance(statement, ast.ImportFrom):
            yield alias.asname or alias.name, ("." * statement.level + (statement.module or ""), alias.name)
        elif alias.asname:
            yield alias.asname, (alias.name, None)
        else:
            yield top, (top, None)


def chain_of(node: ast.expr) -> Chain | None:
    """A name, or an attribute of one; None for any other expression."""
    if isinstance(node, ast.Name):
        return (node.id,)
    before = chain_of(node.value) if isinstance(node, ast.Attribute) else None
    return None if before is None else (*before, node.attr)  # type: ignore[attr-defined]


def is_docstring(statement: ast.AST) -> bool:
    """Whether a statement is text that stands by itself."""
    match statement:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


@functools.cache
def form(node: ast.AST, words: bool) -> str:
    """A piece of source as text in which comments, docstrings and layout do not stand; the same on every Python."""
    parts: list[str] = []
    _write(node, parts, words)
    return "".join(parts)


def _write(node: object, parts: list[str], words: bool) -> None:
    if isinstance(node, ast.AST):
        parts.append(f"{type(node).__name__}(")
        for name, value in ast.iter_fields(node):
            if name not in _UNSAID and value is not None and value != []:
                parts.append(f"{name}=")
                _write(value, parts, words)
        parts.append(")")
    elif isinstance(node, list):
        parts.append("[")
        for item in node:
            if not is_docstring(item):
                _write(item, parts, words)
        parts.append("]")
    elif words or not isinstance(node, str) or " " not in node:
        parts.append(f"{type(node).__name__}:{node!a};")
