"""Kernels: one file a family, device code first, then its specs. The registry below finds them all."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from tilekern.errors import InputError
from tilekern.spec import KernelSpec


@functools.cache
def all_specs() -> dict[str, KernelSpec]:
    """Every spec of this package by name: each module's public ``SPECS``, in the order of the modules' names."""
    found: dict[str, KernelSpec] = {}
    for module in pkgutil.iter_modules(__path__):
        for spec in getattr(importlib.import_module(f"{__name__}.{module.name}"), "SPECS", ()):
            found[spec.name] = spec
    return found


def spec_named(name: str) -> KernelSpec:
    """The spec of that name.

    Raises:
        InputError: there is none.
    """
    specs = all_specs()
    if name not in specs:
        raise InputError(f"unknown kernel {name!r}; known: {', '.join(specs)}")
    return specs[name]
