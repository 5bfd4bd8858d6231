"""Kernels: one file each, device code first, then its specs.

``families`` has the code that many kernels share; ``composites`` launch kernels. The registry below finds all specs.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterable

from tilekern.errors import InputError
from tilekern.spec import KernelSpec


@functools.cache
def all_specs() -> dict[str, KernelSpec]:
    """Return every spec by name: the public ``SPECS`` of each module and package here, in the order of their names.

    Raises:
        ValueError: two specs have the same name.
    """
    modules = [importlib.import_module(found.name) for found in pkgutil.iter_modules(__path__, f"{__name__}.")]
    return by_name(spec for module in modules for spec in getattr(module, "SPECS", ()))


def by_name(specs: Iterable[KernelSpec]) -> dict[str, KernelSpec]:
    """Return specs by their names, which are part of the cache's paths.

    Raises:
        ValueError: two have the same name.
    """
    found: dict[str, KernelSpec] = {}
    for spec in specs:
        if spec.name in found:
            raise ValueError(f"{spec.name} of {spec.module} is also in {found[spec.name].module}; rename one of them")
        found[spec.name] = spec
    return found


def spec_named(name: str) -> KernelSpec:
    """Return the spec of that name.

    Raises:
        InputError: no spec has the name.
    """
    specs = all_specs()
    if name not in specs:
        raise InputError(f"unknown kernel {name!r}; known: {', '.join(specs)}")
    return specs[name]
