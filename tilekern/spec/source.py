"""The digest of a kernel's source: the whole files that it is made from.

The digest of a module covers its file, each file that it imports of tilekern's kernels or, for a user's module, of its
own package and folder, and :mod:`tilekern.spec.space`, which all kernels share. Docstrings, comments and blank lines
are left out. Of an import from there only the names count, since the contents of the file count wherever it is.

A record holds the digest that it was made from. Where today's digest differs, the record is stale, although the edit
may have changed nothing that it runs: ``python -m tilekern.tune refresh --same-code`` compiles no more than it must to
find out, and carries the record over.

The source is parsed and never imported. A wheel has the digests noted beside the hashes of the files that they cover;
while the files have these hashes, nothing is parsed. A checkout notes them where Python keeps bytecode.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

NOTES = Path(__file__).with_name("source_digests.json")
_KEPT = Path(importlib.util.cache_from_source(__file__)).with_suffix(".json")
KERNELS = "tilekern.kernels"
_SHARED = "tilekern.spec.space"


@functools.cache
def source_digest(module: str) -> str:
    """Return the sha256 of a module's source and of the files that it imports, in hexadecimal.

    Args:
        module: dotted name of the module that holds a spec, for example ``tilekern.kernels.rms_norm``.

    Raises:
        ModuleNotFoundError: the module does not exist, or its source is not installed.
    """
    for path in (NOTES, _KEPT):
        noted = _notes(path).get(module)
        if noted is not None and all(_hash_of(file) == sha256 for file, sha256 in noted["files"].items()):
            return str(noted["digest"])
    made = _note(files_of(module))
    _keep(module, made)
    return str(made["digest"])


def files_of(module: str) -> list[str]:
    """Return the modules whose files the digest of a module covers, itself among them, sorted.

    Raises:
        ModuleNotFoundError: as :func:`source_digest`.
    """
    beside = path_of(module).parent
    roots = (f"{KERNELS}.", *([] if _top(module) == "tilekern" else [f"{_top(module)}."]))
    found = {module, _SHARED}
    waiting = [*_parsed(module)[1]]
    while waiting:
        name = waiting.pop()
        path = _find(name) if name not in found else None
        if path is not None and (f"{name}.".startswith(roots) or ("." not in name and path.parent == beside)):
            found.add(name)
            waiting += _parsed(name)[1]
    return sorted(found)


def spec_modules(folder: Path) -> list[str]:
    """Return the modules that may hold specs, of the tilekern in a folder."""
    files = folder.joinpath(*KERNELS.split(".")).rglob("[!_]*.py")
    return sorted(".".join(file.relative_to(folder).with_suffix("").parts) for file in files)


def note_digests(modules: Iterable[str], path: Path) -> None:
    """Write the digests of modules to a file, each with the hashes of the files that it covers.

    Raises:
        ModuleNotFoundError: as :func:`source_digest`.
    """
    notes = {module: _note(files_of(module)) for module in modules}
    path.write_text(json.dumps(notes, indent=1, sort_keys=True), encoding="utf-8")


def _note(files: Sequence[str]) -> dict[str, Any]:
    # This file makes the digests.
    return {"digest": _digest(files), "files": {file: _hash_of(file) for file in (*files, __name__)}}


def _keep(module: str, note: dict[str, Any]) -> None:
    """Keep a note of one of tilekern's modules for later processes, as Python keeps bytecode, if it may be kept."""
    if sys.dont_write_bytecode or _top(module) != "tilekern":
        return
    kept = _notes(_KEPT)
    kept[module] = note
    with contextlib.suppress(OSError):
        _KEPT.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_KEPT.parent) as folder:
            made = Path(folder, _KEPT.name)
            made.write_text(json.dumps(kept), encoding="utf-8")
            made.replace(_KEPT)


def path_of(module: str) -> Path:
    """Return the file of a module, without importing the module.

    Raises:
        ModuleNotFoundError: the module does not exist, or its source is not installed.
    """
    path = _find(module)
    if path is None:
        raise ModuleNotFoundError(f"the source of {module} is not installed", name=module)
    return path


@functools.cache
def _find(module: str) -> Path | None:
    """Return the file of a module; only its topmost package is looked up, since the others would be imported."""
    top, *rest = module.split(".")
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        found = None
    if found is None:
        return None
    if not rest:
        return Path(found.origin) if found.origin and found.origin.endswith(".py") else None
    for folder in found.submodule_search_locations or ():
        path = Path(folder, *rest)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def _digest(modules: Iterable[str]) -> str:
    # In the order of the texts: where a file is does not count.
    hashes = sorted(hashlib.sha256(_parsed(module)[0].encode()).hexdigest() for module in modules)
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


@functools.cache
def _notes(path: Path) -> dict[str, Any]:
    """Return the digests that a file notes; none if it is not there or no such file."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


@functools.cache
def _hash_of(module: str) -> str:
    path = _find(module)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path else ""


@functools.cache
def _parsed(module: str) -> tuple[str, tuple[str, ...]]:
    """Return the lines of a module's source that count, and the modules that it may import."""
    text = path_of(module).read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    dropped: set[int] = set()
    strings: set[int] = set()
    imports: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            dropped.update(_lines_of(node))
            imports.append(_named(node, module))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            dropped.update(_lines_of(node))
        elif isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno:
            strings.update(_lines_of(node))
    strings -= dropped
    lines = enumerate(text.splitlines(), 1)
    counting = [
        line.rstrip()
        for number, line in lines
        if number in strings or (number not in dropped and line.strip() and not line.lstrip().startswith("#"))
    ]
    return "\n".join([*sorted(imports), *counting]), tuple(_imports(nodes, module))


def _named(node: ast.Import | ast.ImportFrom, module: str) -> str:
    """Return the names that an import binds, without the place of a file that counts by its contents."""
    if isinstance(node, ast.Import):
        return ast.unparse(node)
    is_followed = node.level > 0 or _top(node.module or "") in ("tilekern", _top(module))
    return ast.unparse(ast.Import(node.names) if is_followed else node)


def _top(module: str) -> str:
    return module.partition(".")[0]


def _lines_of(node: Any) -> range:
    return range(node.lineno, node.end_lineno + 1)


def _imports(nodes: Iterable[ast.AST], module: str) -> Iterator[str]:
    """Yield what a module imports, inside functions too; what is imported of a module may be a module itself.

    A kernel in CuTe DSL is named by a text, ``module:Class``.
    """
    package = module if path_of(module).name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            submodules = [f"{base}.{alias.name}" for alias in node.names]
            yield from submodules
            # A package's own file counts where something is taken that is no module.
            if not all(map(_find, submodules)):
                yield base
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
            yield node.value.partition(":")[0]
