"""Patch a single model: its modules get methods of their own, and the classes stay as they are."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from types import CodeType, MethodType
from typing import TYPE_CHECKING, Any

from tilekern.patch.bound_method import Bound, StandIn, place_of
from tilekern.patch.checkpointing import wraps_around
from tilekern.patch.installed import Found, holder, original_at
from tilekern.patch.ledger import Ledger, Touch, is_inside
from tilekern.patch.registry import registered
from tilekern.patch.rewriting import rewritten
from tilekern.patch.table import Patch

if TYPE_CHECKING:
    import torch


def patch_modules(
    found: Found, model: torch.nn.Module, ledger: Ledger, beside: Iterable[Found] = ()
) -> tuple[int, str]:
    """Patch every module of ``model`` that has the function described by ``found``.

    A method may call several functions of one op, or functions of an op in its patch's ``takes_in``. Its replacement
    gets the replacements of all of these, including those in ``beside``.

    Returns:
        The number of modules that are patched now, and a description of the modules left alone (empty if none).
    """
    patch = found.patch
    if inspect.isclass(found.owner):
        replacement = patch.replacement(found.original, **_replaced(patch.attribute, patch.module, beside))
        return _give(found, patch.attribute, replacement, model, ledger)
    if not patch.callers:
        return 0, f"{patch.target} is a plain function that all models share; tilekern.apply() patches it for all"
    total, left = 0, ""
    module = sys.modules[patch.module]
    for caller in patch.callers:
        try:
            function = original_at(module, caller, ledger)
            twin = rewritten(function, lambda _: 1, _replaced(caller, patch.module, (found, *beside)))
        except ValueError as error:
            return total, f"{patch.module}.{caller} {error}"
        number, reason = _give(found, caller, twin, model, ledger)
        total, left = total + number, left or reason
    return total, left


def _replaced(caller: str, module: str, rows: Iterable[Found]) -> dict[str, Any]:
    """Return, by name, the replacements of a module's functions that one of its methods calls."""
    called = [x for x in rows if x.patch.module == module and caller in x.patch.callers]
    return {x.patch.attribute: x.patch.replacement(x.original) for x in called}


def _give(found: Found, path: str, replacement: Any, model: torch.nn.Module, ledger: Ledger) -> tuple[int, str]:
    owner, name = holder(sys.modules[found.patch.module], path)
    where = f"{found.patch.module}.{path}"
    before = ledger.held(owner, name)
    methods = [getattr(owner, name), *([before.original] if before else [])]
    given = StandIn(replacement, found.patch.op, where, None, retires=found.patch not in registered())
    patched = left = 0
    for instance in _having(model.modules(), owner, name):
        touch = ledger.held(instance, name)
        if touch is not None and _gives_way(touch, found.patch, replacement):
            ledger.undo_one(touch)
            touch = None
        known = _ordinary(instance, name, methods) if touch is None else None
        if known is not None:
            ledger.put_bound(instance, name, given, known)
            touch = ledger.held(instance, name)
        patched += touch is not None and touch.still_runs and touch.op == found.patch.op
        left += touch is None or not touch.still_runs
    return patched, f"{left} modules have another {name} than {where}, a hook's or another patch's" if left else ""


def _gives_way(touch: Touch, patch: Patch, replacement: Any) -> bool:
    """Return whether a stand-in is superfluous beside a patch's, or is of the same patch but got other functions."""
    if touch.op != patch.op or not patch.takes_in:
        return touch.op in (*patch.covers, *patch.takes_in)
    return code_of(touch.replacement).co_freevars != code_of(replacement).co_freevars


def code_of(function: Any) -> CodeType:
    """Return the code of a function, inside its decorators."""
    code: CodeType = inspect.unwrap(function).__code__
    return code


def _having(modules: Iterable[Any], owner: type, name: str) -> list[Any]:
    """Return the instances of a class that inherit its method, directly or through transformers' wrapper."""
    method = getattr(owner, name)
    mine = [m for m in modules if isinstance(m, owner)]
    return [m for m in mine if (own := getattr(type(m), name)) is method or wraps_around(own, method)]


def _ordinary(instance: Any, name: str, methods: list[Any]) -> Any:
    """Return the class method that an instance runs: directly, or as its own bound method, perhaps inside wrappers.

    Output capturing, unpickling, and accelerate's hooks and casts leave such bound methods. Return None if the instance
    has another method of its own.
    """
    own = vars(instance).get(place_of(instance, name))
    if own is None:
        return methods[0]
    mine = isinstance(own, (MethodType, Bound)) and own.__self__ is instance
    return next((method for method in methods if mine and is_inside(method, own.__func__)), None)
