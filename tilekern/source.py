"""The digest of a kernel module's source: an artifact whose digest differs from today's is stale.

Docstrings, comments on lines of their own, blank lines and trailing space are left out, so that better words
about a kernel do not throw away what was measured with it; so is a function ``workloads``, which says what to tune
and not what is compiled. Sibling kernel modules that it imports count in.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from pathlib import Path


@functools.cache
def digest_of_module(name: str) -> str:
    """The sha256 of a module's code and of the kernel modules that it imports, without importing any of them.

    Args:
        name: dotted module name, for example ``tilekern.kernels.rms_norm``.

    Raises:
        ModuleNotFoundError: there is no such module, or its source is not at hand.
    """
    digest = hashlib.sha256()
    for path in _closure(name):
        digest.update(_bare(path.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()


def _closure(name: str) -> list[Path]:
    """The module's file, then the files of siblings that it imports, in the order of their names."""
    package = name.rpartition(".")[0]
    found: dict[str, Path] = {}
    waiting = [name]
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        found[module] = _path(module)
        tree = ast.parse(found[module].read_text(encoding="utf-8"))
        waiting += [target for target in _imports(tree, package) if _is_sibling(target, package)]
    return [found[module] for module in sorted(found)]


def _is_sibling(name: str, package: str) -> bool:
    return name.rpartition(".")[0] == package and importlib.util.find_spec(name) is not None


def _path(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ModuleNotFoundError(f"the source of {module} is not at hand", name=module)
    return Path(spec.origin)


def _imports(tree: ast.Module, package: str) -> list[str]:
    names = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            if node.module == package:
                names += [f"{package}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def _bare(text: str) -> str:
    """The lines of code that count."""
    dropped: set[int] = set()
    inside: set[int] = set()
    tree = ast.parse(text)
    for top in tree.body:
        if isinstance(top, ast.FunctionDef) and top.name == "workloads":
            dropped.update(range(top.lineno, (top.end_lineno or top.lineno) + 1))
    for node in ast.walk(tree):
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
