"""The digest of a kernel module's source: an artifact whose digest differs from today's is stale.

Docstrings, comments on lines of their own, blank lines and trailing space are left out, so that better words
about a kernel do not throw away what was measured with it; so is a function ``workloads``, which says what to tune
and not what is compiled. Sibling kernel modules that it imports count in.

Working digests out parses every kernel's source, which took a job's first step a quarter of a second. A wheel has
them noted beside the hashes of the files that they were made from: where those are today's, so are the digests.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

NOTES = Path(__file__).with_name("source_digests.json")


@functools.cache
def digest_of_module(name: str) -> str:
    """The sha256 of a module's code and of the kernel modules that it imports, without importing any of them.

    Args:
        name: dotted module name, for example ``tilekern.kernels.rms_norm``.

    Raises:
        ModuleNotFoundError: there is no such module, or its source is not at hand.
    """
    return _noted(name, NOTES) or _worked_out(name)


def note_digests(names: Iterable[str], path: Path) -> None:
    """Write down modules' digests, and the hash of each file that counts in them, for :func:`digest_of_module`.

    Raises:
        ModuleNotFoundError: as there.
    """
    closures = {name: _closure(name) for name in names}
    files = {module: _hash_of(found) for closure in closures.values() for module, found in closure.items()}
    digests = {name: {"digest": _worked_out(name), "files": list(closure)} for name, closure in closures.items()}
    path.write_text(json.dumps({"files": files, "modules": digests}, indent=1, sort_keys=True), encoding="utf-8")


def _noted(name: str, path: Path) -> str | None:
    """A digest that was noted, if each file that counts in it is as it was then."""
    notes = _notes(path)
    if name not in notes["modules"]:
        return None
    module = notes["modules"][name]
    same = all(_hash_of(_path(file)) == notes["files"][file] for file in module["files"])
    return str(module["digest"]) if same else None


@functools.cache
def _notes(path: Path) -> dict[str, Any]:
    """What a wheel noted; nothing in a checkout."""
    if not path.exists():
        return {"files": {}, "modules": {}}
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _worked_out(name: str) -> str:
    digest = hashlib.sha256()
    for path in _closure(name).values():
        digest.update(_parsed(path.read_text(encoding="utf-8"))[0].encode())
    return digest.hexdigest()


def _closure(name: str) -> dict[str, Path]:
    """The file of the module and of each sibling that it imports, in the order of their names."""
    package = name.rpartition(".")[0]
    found: dict[str, Path] = {}
    waiting = [name]
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        found[module] = _path(module)
        imports = _parsed(found[module].read_text(encoding="utf-8"))[1]
        waiting += [target for target in imports if _is_sibling(target, package)]
    return dict(sorted(found.items()))


@functools.cache
def _hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_sibling(name: str, package: str) -> bool:
    return name.rpartition(".")[0] == package and importlib.util.find_spec(name) is not None


def _path(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ModuleNotFoundError(f"the source of {module} is not at hand", name=module)
    return Path(spec.origin)


@functools.cache
def _parsed(text: str) -> tuple[str, tuple[str, ...]]:
    """The lines of a module's source that count, and the names that it imports from anywhere."""
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
    for top in tree.body:
        if isinstance(top, ast.FunctionDef) and top.name == "workloads":
            dropped.update(range(top.lineno, (top.end_lineno or top.lineno) + 1))
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
