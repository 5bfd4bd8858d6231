"""The digest of a whole kernel module, as records of schemas 1 and 2 carry it; it goes when these are read no more.

Docstrings, comments on lines of their own, blank lines and trailing space are left out. Sibling modules that it imports
count in.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator

from tilekern.source.reachability import is_module, path_of


def digest_of_closure(name: str) -> str:
    """The sha256 of the code of a module and of the siblings that it imports, in hexadecimal.

    Raises:
        ModuleNotFoundError: there is no such module, or its source is not at hand.
    """
    digest = hashlib.sha256()
    for module in closure(name):
        digest.update(_parsed(module)[0].encode())
    return digest.hexdigest()


def closure(name: str) -> list[str]:
    """The module and each sibling that it imports, in the order of their names; raises as above."""
    package = name.rpartition(".")[0]
    found: set[str] = set()
    waiting = [name]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += [one for one in _parsed(module)[1] if one.rpartition(".")[0] == package and is_module(one)]
    return sorted(found)


@functools.cache
def _parsed(module: str) -> tuple[str, tuple[str, ...]]:
    """The lines of a module's source that count, and the names that it imports from anywhere."""
    text = path_of(module).read_text(encoding="utf-8")
    tree = ast.parse(text)
    return _bare(text, tree), tuple(_imports(tree))


def _imports(tree: ast.Module) -> list[str]:
    """Modules, and whatever is imported from one, which may be a module too."""
    names = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def _bare(text: str, tree: ast.Module) -> str:
    """The lines of code that count."""
    dropped: set[int] = set()
    inside: set[int] = set()
    for node in _walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            dropped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno:
            inside.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if number in inside - dropped:
            lines.append(line)
        elif number not in dropped and line.strip() and not line.lstrip().startswith("#"):
            lines.append(line.rstrip())
    return "\n".join(lines)


def _walk(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that may be text on lines of its own or of several: not what an expression of one line is made of."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if not isinstance(node, ast.expr) or node.end_lineno != node.lineno:
                yield node
                waiting.append(node)
