"""Which definitions a piece of source reaches by name, read from the source alone: nothing is imported or run.

A definition is a function, a class or an assignment at the top level of a module; names lead from one to the next, into
other modules too (of which packages says :func:`roots_of`). Other packages count by the names that are imported of
them. Where a name cannot be followed (a module that is passed on as a value, ``globals()``), all that it may lead to is
reached.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tilekern.source.syntax import Chain, Import, bindings, chain_of, form, is_docstring, names_in, stored

_NO_SCOPE: Mapping[str, Code] = MappingProxyType({})
# These reach names that stand nowhere in the source.
_DYNAMIC = frozenset({"globals", "eval", "exec", "__import__", "importlib.import_module", "sys.modules"})
_SPEC, _NAME = "tilekern.spec.KernelSpec", "tilekern.spec.name_of"
SPEC_PACKAGES = ("tilekern.kernels", "tilekern.composites")


@dataclass(frozen=True, eq=False)
class Module:
    """A module's source: what stands at its top level, by name.

    ``imports`` are dotted names with the attribute that is taken of them, or None; ``loose`` are statements that bind
    no name, and so may change any.
    """

    name: str
    tree: ast.Module
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, Import] = field(default_factory=dict)
    loose: list[ast.stmt] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Code:
    """A piece of source in its module; ``scope`` holds what its names stand for where it came through a call."""

    node: ast.AST
    module: Module
    scope: Mapping[str, Code] = field(default_factory=lambda: _NO_SCOPE)


class Walk:
    """Follows names from roots on, and digests what it comes by.

    Args:
        words: whether texts of several words count; those of constraints are for people alone.
    """

    def __init__(self, *, words: bool = True) -> None:
        self._words = words
        self._numbers: dict[tuple[int, int], int] = {}
        self._digest = hashlib.sha256()
        self.modules: set[str] = set()

    def visit(self, code: Code) -> int:
        """Follow a piece of source; its number among all that were met."""
        key = id(code.node), id(code.scope)
        if key in self._numbers:
            return self._numbers[key]
        number = self._numbers[key] = len(self._numbers)
        self.modules.add(code.module.name)
        led = [f"{'.'.join(chain)}={self._led(chain, code)}" for chain in sorted(names_in(code.node).chains)]
        self._digest.update(f"{number}: {form(code.node, self._words)}\n{';'.join(led)}\n".encode())
        for statement in code.module.loose:
            self.visit(Code(statement, code.module))
        return number

    def note(self, code: Code) -> None:
        """Digest a piece of source and follow none of its names."""
        self.modules.add(code.module.name)
        self._digest.update(form(code.node, self._words).encode())

    def _led(self, chain: Chain, code: Code) -> list[str | int]:
        return [found if isinstance(found, str) else self.visit(found) for found in resolve(chain, code)]

    @property
    def hexdigest(self) -> str:
        """The sha256 of all that was met, in the order in which names led to it."""
        return self._digest.hexdigest()


def resolve(chain: Chain, code: Code) -> list[Code | str]:
    """The object of a name in a piece of source; text stands for an object of another package."""
    name, *rest = chain
    module = code.module
    if name in code.scope:
        return [code.scope[name]]
    inside = names_in(code.node).imports
    if name in inside:
        found = _imported(inside[name], rest, module)
    elif name in module.definitions:
        return _defined(module, name, rest)
    elif name in module.imports:
        found = _imported(module.imports[name], rest, module)
    elif "*" in module.imports:
        found = [name, *_imported(module.imports["*"], [], module)]
    else:
        found = [name] if name in _DYNAMIC else []
    if _DYNAMIC.isdisjoint(each for each in found if isinstance(each, str)):
        return found
    return [
        Code(module.tree, module),
        *(one for each in module.imports.values() for one in _imported(each, [], module)),
    ]


def _imported(target: Import, rest: list[str], importer: Module) -> list[Code | str]:
    """The object of an import, or an attribute of it; a whole module where it is not said which of its names."""
    package, attribute = target
    path = [*([] if attribute in (None, "*") else [attribute]), *rest]
    roots = roots_of(importer.name)
    package = _absolute(package, importer.name)
    while path and _is_module(f"{package}.{path[0]}", roots):
        package, path = f"{package}.{path[0]}", path[1:]
    if not _is_within(package, roots):
        return [".".join([package, *path[:1]])]
    module = module_named(package)
    if path and path[0] in module.definitions:
        return _defined(module, path[0], path[1:])
    if path and path[0] in module.imports:
        return _imported(module.imports[path[0]], path[1:], module)
    return [Code(module.tree, module)]


def _defined(module: Module, name: str, rest: list[str]) -> list[Code | str]:
    """A definition; of a spec what makes its artifacts valid, and the attribute that is asked for."""
    fields = spec_fields(module, name)
    if fields is None:
        return [Code(statement, module) for statement in module.definitions[name]]
    return [code for role, code in fields.items() if role in rest[:1] or is_of_validity(role)]


# Fields of a spec that say which config is best, and those that say neither that nor what runs. A field that is not
# known here counts among those that say what runs.
OF_FRESHNESS = frozenset({"space", "default", "generic", "inputs_in_l2", "follower"})
_OF_NEITHER = frozenset(
    {"name", "summary", "module", "inputs", "outputs", "reference", "results"}
    | {"bytes_moved", "flops", "result_dtype", "roundings"}
)


def is_of_validity(role: str) -> bool:
    """Whether a field of a spec says how a config becomes a launch."""
    return role not in OF_FRESHNESS | _OF_NEITHER


def specs_of(module: Module) -> dict[str, dict[str, Code]]:
    """The specs that a module makes, by their names, each with the source of its fields; those that can be read."""
    found = {}
    for name in module.definitions:
        fields = spec_fields(module, name)
        called = _text(fields["name"]) if fields and "name" in fields else None
        if fields and called is not None:
            found[called] = fields
    return found


@functools.cache
def spec_fields(module: Module, name: str) -> dict[str, Code] | None:
    """The source of each field of the spec that an assignment makes; None where it makes none, or cannot be read."""
    match module.definitions[name]:
        case [ast.Assign(targets=[ast.Name()], value=ast.Call() as call)]:
            return _fields(Code(call, module))
    return None


def _fields(code: Code) -> dict[str, Code] | None:
    """The keywords of a call of KernelSpec, of a function that only returns one, or of such a spec but for some."""
    call = code.node
    if not isinstance(call, ast.Call) or (called := chain_of(call.func)) is None:
        return None
    match resolve(called, code):
        case [str() as named] if named == _SPEC:
            return None if call.args else _keywords(code, call)
        case ["dataclasses.replace"] if len(call.args) == 1:
            fields, others = _fields(Code(call.args[0], code.module, code.scope)), _keywords(code, call)
            return None if fields is None or others is None else fields | others
        case [Code(node=ast.FunctionDef() as function, module=module)]:
            scope = _bound(code, call, function, module)
            return None if scope is None else _returned(function, module, scope)
    return None


def _keywords(code: Code, call: ast.Call) -> dict[str, Code] | None:
    found: dict[str, Code] = {}
    for keyword in call.keywords:
        if keyword.arg is not None:
            found[keyword.arg] = Code(keyword.value, code.module, code.scope)
            continue
        name = keyword.value.id if isinstance(keyword.value, ast.Name) else ""
        passed = code.scope.get(f"**{name}")
        if passed is None:
            return None
        found |= passed.scope
    return found


def _bound(code: Code, call: ast.Call, function: ast.FunctionDef, module: Module) -> dict[str, Code] | None:
    """The code that a call binds to the parameters of a module's function; None where that cannot be read."""
    given = function.args
    names = [argument.arg for argument in given.args]
    keywords = _keywords(code, call)
    if keywords is None or given.posonlyargs or given.vararg or len(call.args) > len(names):
        return None
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    bound = {name: Code(value, code.module, code.scope) for name, value in zip(names, call.args, strict=False)}
    known = {*names, *(argument.arg for argument in given.kwonlyargs)}
    defaults: list[tuple[str, ast.expr | None]] = [*zip(reversed(names), reversed(given.defaults), strict=False)]
    defaults += [(argument.arg, value) for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    bound = {name: Code(value, module) for name, value in defaults if value is not None} | bound
    bound |= {name: value for name, value in keywords.items() if name in known}
    rest = {name: value for name, value in keywords.items() if name not in known}
    if given.kwarg is not None:
        bound[f"**{given.kwarg.arg}"] = Code(call, code.module, rest)
    return None if known - bound.keys() or (rest and given.kwarg is None) else bound


def _returned(function: ast.FunctionDef, module: Module, scope: dict[str, Code]) -> dict[str, Code] | None:
    """The fields of the spec that a function returns whose body is plain assignments and that return."""
    *before, last = [statement for statement in function.body if not is_docstring(statement)]
    for statement in before:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in scope:
                scope[name] = Code(value, module, scope)
            case _:
                return None
    if not isinstance(last, ast.Return) or last.value is None:
        return None
    return _fields(Code(last.value, module, scope))


def _text(code: Code) -> str | None:
    """The text that an expression is, where that can be read."""
    match code.node:
        case ast.Constant(value=str() as text):
            return text
        case ast.Name(id=name) if name in code.scope:
            return _text(code.scope[name])
        case ast.FormattedValue(value=value):
            return _text(Code(value, code.module, code.scope))
        case ast.Call(func=called, args=[function]) if resolve(chain_of(called) or ("",), code) == [_NAME]:
            return _function_name(Code(function, code.module, code.scope))
        case ast.JoinedStr(values=values):
            parts = [_text(Code(value, code.module, code.scope)) for value in values]
            return None if None in parts else "".join(part for part in parts if part is not None)
    return None


def _function_name(code: Code) -> str | None:
    """The name under which the function is defined that an expression is, where that can be read."""
    chain = chain_of(code.node) if isinstance(code.node, ast.expr) else None
    match resolve(chain, code) if chain else []:
        case [Code(node=ast.FunctionDef(name=name))]:
            return name
        case [Code() as passed]:
            return _function_name(passed)
    return None


@functools.cache
def module_named(name: str) -> Module:
    """A module's source.

    Raises:
        ModuleNotFoundError: there is no such module, or its source is not at hand.
    """
    found = Module(name, ast.parse(path_of(name).read_text(encoding="utf-8")))
    for statement in found.tree.body:
        _sort_in(found, statement)
    return found


def _sort_in(module: Module, statement: ast.stmt) -> None:
    match statement:
        case ast.Import() | ast.ImportFrom():
            module.imports.update(bindings(statement))
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            module.definitions.setdefault(name, []).append(statement)
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign() if _is_plain(statement):
            for name in stored(statement):
                module.definitions.setdefault(name, []).append(statement)
        case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=[]):
            for inner in statement.body:
                _sort_in(module, inner)
        case _ if not is_docstring(statement):
            module.loose.append(statement)
            module.imports.update(names_in(statement).imports)
            for name in stored(statement):
                module.definitions.setdefault(name, []).append(statement)


def _is_plain(statement: ast.Assign | ast.AnnAssign | ast.AugAssign) -> bool:
    """Whether names alone are assigned, and no item or attribute of something."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return all(isinstance(node, ast.Name | ast.Tuple | ast.Store) for each in targets for node in ast.walk(each))


def roots_of(module: str) -> tuple[str, ...]:
    """The packages in which names are followed: the second one of a dotted name's, or the first where it has two.

    Of tilekern all that hold specs, as composites reach into kernels.
    """
    parts = module.split(".")
    root = ".".join(parts[:2]) if len(parts) > 2 else parts[0]
    return SPEC_PACKAGES if root in SPEC_PACKAGES else (root,)


def _absolute(package: str, importer: str) -> str:
    """A package that an import names by dots before it."""
    name = package.lstrip(".")
    if name == package:
        return package
    above = importer.split(".")[: -(len(package) - len(name)) or None]
    if path_of(importer).name == "__init__.py":
        above = importer.split(".")[: len(above) + 1]
    return ".".join([*above, *filter(None, [name])])


def _is_within(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


@functools.cache
def _is_module(name: str, roots: tuple[str, ...]) -> bool:
    """Whether a dotted name is a module within some packages, or a package above one."""
    return any(root.startswith(f"{name}.") for root in roots) or (_is_within(name, roots) and is_module(name))


def is_module(name: str) -> bool:
    """Whether there is a module of that name whose source is at hand."""
    return _found(name) is not None


def modules_within(package: str) -> Iterator[str]:
    """The modules below a package; none where it is not a package, or not at hand."""
    path = _found(package)
    if path is not None and path.name == "__init__.py":
        for file in sorted(path.parent.rglob("*.py")):
            parts = file.relative_to(path.parent).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")])


def path_of(module: str) -> Path:
    """The file of a module's source, which is not imported, nor is a package above it.

    Raises:
        ModuleNotFoundError: there is no such module, or its source is not at hand.
    """
    path = _found(module)
    if path is None:
        raise ModuleNotFoundError(f"the source of {module} is not at hand", name=module)
    return path


def _found(module: str) -> Path | None:
    top, *parts = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    if not parts:
        return Path(spec.origin)
    for folder in spec.submodule_search_locations or ():
        for path in (Path(folder, *parts).with_suffix(".py"), Path(folder, *parts, "__init__.py")):
            if path.is_file():
                return path
    return None
