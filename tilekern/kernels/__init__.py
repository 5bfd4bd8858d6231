"""Kernels: one file each, device code first, then its specs.

``families`` has the shared parts of kernels, ``composites`` launch kernels. The registry below finds all specs: ours,
and the specs of users' modules.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import pkgutil
from collections.abc import Iterable, Iterator

from tilekern.errors import InputError
from tilekern.spec import KernelSpec

# The names of users' modules, separated by commas; child processes inherit it.
VARIABLE = "TILEKERN_SPECS"
ENTRY_POINTS = "tilekern.specs"


def all_specs() -> dict[str, KernelSpec]:
    """Return every spec by name: the ``SPECS`` of each module here, then of each users' module.

    Raises:
        InputError: a user's module cannot be imported or has no ``SPECS``, or two specs have one name.
    """
    return _specs_with(os.environ.get(VARIABLE, ""))


@functools.cache
def _specs_with(names: str) -> dict[str, KernelSpec]:
    return by_name([*own_specs(), *(spec for module in users_modules(names) for spec in _specs_in(module))])


@functools.cache
def own_specs() -> tuple[KernelSpec, ...]:
    """Return the specs of tilekern's own kernels, in the order of their modules' names."""
    modules = [importlib.import_module(found.name) for found in pkgutil.iter_modules(__path__, f"{__name__}.")]
    return tuple(spec for module in modules for spec in getattr(module, "SPECS", ()))


def users_modules(names: str | None = None) -> list[str]:
    """Return the names of users' modules from ``TILEKERN_SPECS`` and the entry points, each once."""
    listed = os.environ.get(VARIABLE, "") if names is None else names
    found = [name.strip() for name in listed.split(",") if name.strip()]
    return list(dict.fromkeys([*found, *_installed()]))


@functools.cache
def _installed() -> tuple[str, ...]:
    return tuple(sorted(entry.value for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)))


def add_specs(*modules: str) -> None:
    """Add users' modules to ``TILEKERN_SPECS``, for this process and its children.

    Raises:
        InputError: see :func:`all_specs`; nothing is added then.
    """
    before = os.environ.get(VARIABLE, "")
    names = ",".join(dict.fromkeys([*filter(None, before.split(",")), *modules]))
    _specs_with(names)
    os.environ[VARIABLE] = names


def _specs_in(module: str) -> Iterator[KernelSpec]:
    try:
        specs = getattr(importlib.import_module(module), "SPECS", None)
    except Exception as error:
        raise InputError(
            f"the module {module}, which has specs of your own, cannot be imported: {type(error).__name__}: {error}; "
            f"put its folder on PYTHONPATH, or take it out of --specs, {VARIABLE} or the entry points {ENTRY_POINTS}"
        ) from error
    if specs is None:
        raise InputError(f"the module {module} has no specs; list its KernelSpecs in a tuple SPECS")
    yield from specs


def by_name(specs: Iterable[KernelSpec]) -> dict[str, KernelSpec]:
    """Return specs by name; names are part of the cache's paths.

    Raises:
        InputError: two have one name.
    """
    found: dict[str, KernelSpec] = {}
    for spec in specs:
        other = found.setdefault(spec.name, spec)
        if other is not spec:
            raise InputError(f"two specs are named {spec.name}, in {other.module} and {spec.module}; rename one")
    return found


def spec_named(name: str) -> KernelSpec:
    """Return the spec of that name.

    Raises:
        InputError: no spec has the name.
    """
    specs = all_specs()
    if name not in specs:
        raise InputError(
            f"unknown kernel {name!r}; known: {', '.join(specs)}; a kernel of your own needs --specs MODULE or "
            f"{VARIABLE}"
        )
    return specs[name]
